"""The prefill sweep: what one prefill chunk costs by its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.host_clock import Arrival, DeviceWork, Instant
from harness.stopping import StoppingRule
from runners.batches import extend_batch

if TYPE_CHECKING:
    from harness.schema import MeasureConfig
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner


def sweep_prefill(
    runner: ModelRunner, config: MeasureConfig, seed: int, on_row: Callable[[dict[str, Any]], None]
) -> None:
    """Measure one prefill chunk of each size in `measure.prefill_tokens`, from an empty cache."""
    generator = np.random.default_rng(seed)
    for num_tokens in config.prefill_tokens or prefill_sizes(runner):
        row = runner.kv.add_request()
        try:
            if not runner.kv.extend(row, num_tokens):
                continue
            ids = generator.integers(0, runner.vocab_size, num_tokens, dtype=np.int64)
            batch = extend_batch(runner.kv, [row], [0], [ids])
            samples = _time_prefill(runner, batch, config)
        finally:
            runner.kv.release(row)
        on_row(
            {
                "num_tokens": num_tokens,
                "context_len": num_tokens,
                "step_ms_p50": float(np.median(samples)),
                "num_samples": len(samples),
                "graph_backend": "none",  # prompts never run by graphs
            }
        )


def prefill_sizes(runner: ModelRunner) -> list[int]:
    """Return the chunk sizes to time: powers of four from 16, and the largest chunk that a prompt can fill."""
    largest = min(runner.config.prefill_chunk_tokens, runner.config.max_seq_len)
    return sorted({*(size for size in (16, 64, 256, 1024, 4096) if size < largest), largest})


def _time_prefill(runner: ModelRunner, batch: ForwardBatch, config: MeasureConfig) -> list[float]:
    for _ in range(max(1, config.num_warmup)):  # the first call may compile
        runner.forward(batch).next_token_logits.argmax(dim=-1)
    work, samples = DeviceWork(runner.device), list[float]()
    rule = StoppingRule(
        min_samples=config.min_samples, min_time_s=0.0, max_noise=config.max_noise, timeout_s=config.timeout_s
    )
    while not rule.done:
        work.read()
        start = Instant()
        runner.forward(batch).next_token_logits.argmax(dim=-1)
        samples.append(Arrival(work).ms_since(start))
        rule.add(samples[-1])
    return samples
