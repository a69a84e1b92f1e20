"""The emulated graph behaves as a captured one: same function, same buffers, no new inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runners.graph_backend import EmulatedGraph, create_graph, own_stream, side_stream

POOL = (-1, 0)


def test_without_cuda_graphs_are_emulated_and_say_so() -> None:
    graph = create_graph(torch.device("cpu"))

    assert graph.backend == "emulated"
    assert graph.num_nodes is None


def test_a_replay_reads_what_the_static_input_holds_now() -> None:
    source, target = torch.zeros(3), torch.zeros(3)
    graph = EmulatedGraph()
    graph.capture(lambda: torch.mul(source, 2, out=target), POOL)

    source.fill_(3.0)
    graph.replay()

    assert target.tolist() == [6.0, 6.0, 6.0]


def test_a_failing_step_is_not_captured() -> None:
    def fail() -> None:
        raise MemoryError

    graph = EmulatedGraph()
    with pytest.raises(MemoryError):
        graph.capture(fail, POOL)
    with pytest.raises(AssertionError):
        graph.replay()


def test_a_reset_graph_cannot_be_replayed() -> None:
    graph = EmulatedGraph()
    graph.capture(lambda: None, POOL)
    graph.reset()

    with pytest.raises(AssertionError):
        graph.replay()


@pytest.mark.parametrize("stream", [side_stream, own_stream])
def test_a_stream_is_nothing_without_cuda(stream: Any) -> None:
    with pytest.raises(ZeroDivisionError), stream(torch.device("cpu")):
        raise ZeroDivisionError
