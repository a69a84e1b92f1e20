"""The head's logits land in the caller's buffer where that is possible, and are the same everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.head_output import head_writes_to, output_head
from runners.models.loader import load_model
from tests.runners.tiny_models import tiny_spec


def head_of(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 32, bias=bias).requires_grad_(False)


def test_a_plain_head_writes_to_the_buffer_what_it_would_have_returned() -> None:
    head, hidden, output = head_of(), torch.randn(1, 5, 8), torch.zeros(5, 32)
    with head_writes_to(head, output):
        logits = head(hidden)
    assert logits.shape == (1, 5, 32) and logits.data_ptr() == output.data_ptr()
    torch.testing.assert_close(output, head(hidden)[0])


@pytest.mark.parametrize("rows", [4, 6])
def test_a_call_of_another_size_leaves_the_buffer_alone(rows: int) -> None:
    head, hidden, output = head_of(), torch.randn(1, rows, 8), torch.zeros(5, 32)
    with head_writes_to(head, output):
        assert torch.equal(head(hidden), nn.functional.linear(hidden, head.weight))
    assert not output.any()


@pytest.mark.parametrize("head", [None, head_of(bias=True), nn.Sequential(head_of())])
def test_any_other_head_is_called_as_it_is(head: nn.Module | None) -> None:
    output = torch.zeros(5, 32)
    with head_writes_to(head, output):
        if head is not None:
            head(torch.randn(5, 8))
    assert not output.any()


@pytest.mark.parametrize("implementation", ["transformers", "fused"])
def test_the_head_of_a_model_writes_to_the_buffer_of_its_captures(implementation: str) -> None:
    spec = tiny_spec("qwen3", tie_word_embeddings=True)
    loaded = load_model(replace(spec, implementation=implementation), "cpu")
    config = RunnerConfig("cpu", 4, 64, (2, 4), page_size=4)
    with ModelRunner(loaded, config) as runner:
        assert runner.graph_runner is not None
        batch, output = runner.graph_runner.buffers.static_batch(2), torch.zeros(2, runner.vocab_size)
        runner.attn_backend.init_forward_metadata(batch)
        head = output_head(runner.model)
        with head_writes_to(head, output):
            logits = runner.compute_logits(batch)
        assert logits.data_ptr() == output.data_ptr()
        torch.testing.assert_close(output, runner.compute_logits(batch))
        with head_writes_to(head, torch.zeros(3, runner.vocab_size)):
            assert runner.compute_logits(batch).shape == (2, runner.vocab_size)


def test_the_head_is_itself_again_also_after_an_error() -> None:
    head = head_of()
    with pytest.raises(ZeroDivisionError), head_writes_to(head, torch.zeros(5, 32)):
        raise ZeroDivisionError
    assert "forward" not in head.__dict__
