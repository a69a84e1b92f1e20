"""The sweeps of a job: what they measure, and what they leave in its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.progress import SIZE_SWEEP

if TYPE_CHECKING:
    from harness.progress import Progress
    from harness.record import JobRecord
    from harness.schema import Config
    from harness.size_sweep import SizeSweep
    from runners.model_runner import ModelRunner


def sweep_sizes(
    runner: ModelRunner, config: Config, record: JobRecord, progress: Progress, copy_bandwidth: float | None
) -> list[dict[str, Any]]:
    """Time every batch size, prefill and, if asked for, uneven batches; return the rows of the batch sizes."""
    from harness.prefill_sweep import sweep_prefill
    from harness.ragged_sweep import RaggedSweep
    from harness.size_sweep import SizeSweep

    measure = config.measure
    sweep = SizeSweep(runner, measure, config.seed, copy_bandwidth, config.runner.overlap)
    rows: list[dict[str, Any]] = []
    with progress.task(SIZE_SWEEP, total=len(sweep.points())) as task:

        def on_row(row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
            record.append("sizes", row)
            record.append_many("samples", samples)
            rows.append(row)
            task.advance(detail=f"batch {row['batch_size']}, {row['mode']}")

        sweep.run(on_row)
    description = sweep.describe()
    _warn(sweep, rows, record)
    record.finish("sizes")
    record.finish("samples")
    sweep_prefill(runner, measure, config.seed, lambda row: record.append("prefill", row))
    record.finish("prefill")
    if measure.longest_lens:
        RaggedSweep(runner, measure, config.seed).run(lambda row: record.append("ragged", row))
        record.finish("ragged")
    record.update(size_sweep=description)
    return rows


def _warn(sweep: SizeSweep, rows: list[dict[str, Any]], record: JobRecord) -> None:
    from harness.size_sweep import sweep_warnings

    for warning in sweep_warnings(rows):
        record.warn(warning)
    for context_len, largest in sweep.cut_contexts().items():
        record.warn(
            f"at {context_len} tokens only batches up to {largest} fit and were measured: raise attention.num_pages"
        )


def sweep_loop(runner: ModelRunner, config: Config, record: JobRecord, moment: str) -> None:
    """Time steps in the scheduler's loop, `before` or `after` the workload; nothing if that is not asked for."""
    from harness.build import scheduler_limits
    from harness.loop_sweep import LoopSweep
    from harness.prefill_sweep import prefill_sizes

    measure = config.measure
    if not measure.enabled or not measure.loop_batch_sizes:
        return
    sweep = LoopSweep(
        runner,
        scheduler_limits(config),
        measure.loop_batch_sizes,
        measure.prefill_tokens or prefill_sizes(runner),
        measure.context_lens,
        config.seed,
    )
    sweep.run(moment, lambda row: record.append("loop", row))
