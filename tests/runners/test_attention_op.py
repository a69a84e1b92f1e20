from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from runners.model_runner import ModelRunner, RunnerConfig
from runners.models import attention_op
from tests.runners.tiny_models import MAX_SEQ_LEN, decode_batch, extend_batch, tiny_model

NUM_LAYERS = 12


def eager_runner(model_type: str = "qwen3", **fields: Any) -> ModelRunner:
    config = RunnerConfig(device="cpu", kind="eager", max_batch_size=4, max_seq_len=MAX_SEQ_LEN)
    return ModelRunner(tiny_model(model_type, **fields), config)


class DeviceReads(TorchDispatchMode):
    """Counts the operators that would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(str(func))
        if func is torch.ops.cudagraph_harness.paged_attention.default:
            with self:  # a mode is off inside its own handler, and the operator is what matters here
                return attention_op._paged_attention(*args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "phi3"])
def test_a_step_builds_no_mask_and_reads_nothing_back(model_type: str) -> None:
    with eager_runner(model_type) as runner:
        row = runner.kv.add_request()
        steps = [
            extend_batch(runner, row, 0, [1, 2, 3]),
            decode_batch(runner, [row], np.array([4]), [7]),
        ]
        for batch in steps:
            prepared = runner.prepare_eager(batch)
            with DeviceReads() as reads:
                runner.compute_logits(prepared)
            assert reads.seen == []


def count_graphs(runner: ModelRunner, batch_sizes: list[int]) -> int:
    """Compile each decoder layer by itself, run a step of each size, and count what was compiled."""
    torch._dynamo.reset()
    counters.clear()
    for layer in runner.model.model.layers:
        # The graph is traced and run as it is: what is counted does not depend on the code generator.
        layer.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    rows = [runner.kv.add_request() for _ in range(max(batch_sizes))]
    for size in batch_sizes:
        runner.forward(decode_batch(runner, rows[:size], np.full(size, 3), [5] * size))
    assert not counters["graph_break"] and not counters["recompile_limit"]
    return int(counters["stats"]["unique_graphs"])


def test_twelve_layers_share_one_compiled_graph_a_size() -> None:
    with eager_runner(num_hidden_layers=NUM_LAYERS) as runner:
        assert count_graphs(runner, [1, 3, 4]) == 3


def test_layers_of_unlike_groups_compile_once_a_group() -> None:
    kinds = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    with eager_runner(
        "gemma3_text", num_hidden_layers=NUM_LAYERS, layer_types=kinds, sliding_window=6
    ) as runner:
        assert count_graphs(runner, [1, 2]) == 4


def test_a_compiled_layer_writes_the_cache_in_place() -> None:
    with eager_runner() as plain:
        expected = step_logits(plain)
    with eager_runner() as runner:
        for layer in runner.model.model.layers:
            layer.compile(backend="aot_eager", dynamic=False, fullgraph=True)
        torch.testing.assert_close(step_logits(runner), expected, rtol=1e-5, atol=1e-5)


def step_logits(runner: ModelRunner) -> torch.Tensor:
    row = runner.kv.add_request()
    runner.forward(extend_batch(runner, row, 0, [4, 5, 6]))
    runner.forward(decode_batch(runner, [row], np.array([4]), [7]))
    return runner.forward(decode_batch(runner, [row], np.array([5]), [8])).next_token_logits


def test_the_model_does_not_run_outside_a_runner() -> None:
    with eager_runner() as runner, pytest.raises(AssertionError, match="forward_context"):
        runner.model(input_ids=torch.tensor([[1]]), use_cache=False)
