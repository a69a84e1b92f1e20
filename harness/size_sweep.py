"""The size sweep: what one decode step costs at each batch size, mode and context length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.device import Telemetry, synchronize
from harness.memory import kv_bytes_per_token
from harness.probe import ProbeRequests
from harness.step_timer import StepTimer, StepTiming
from harness.stopping import StoppingRule, WarmUp
from runners.batches import extend_batch
from runners.padding import Mode, StepPlan

if TYPE_CHECKING:
    from harness.schema import MeasureConfig
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner

#: Samples between two looks at the throttle reasons.
_BLOCK = 8
_BACK_TO_BACK_STEPS = 16
_MAX_AUTO_OFF_SIZES = 16


@dataclass(frozen=True)
class SweepPoint:
    """One row of `sizes.csv` to be measured."""

    batch_size: int
    context_len: int
    #: None: as the strategy in force decides.
    plan: StepPlan


def sweep_batch_sizes(capture_bs: Sequence[int], max_batch_size: int) -> list[int]:
    """Return the captured sizes, some sizes between them (one past each, thinned) and the maximum."""
    on = set(capture_bs) | {1, max_batch_size}
    off = sorted({size + 1 for size in on if size + 1 <= max_batch_size} - on)
    step = max(1, -(-len(off) // _MAX_AUTO_OFF_SIZES))
    return sorted(on | set(off[::step]))


def fitting_requests(num_pages: int, page_size: int, context_len: int) -> int:
    """Return how many requests of `context_len` tokens a pool holds beside its null page."""
    return (num_pages - 1) // -(-context_len // page_size)


class SizeSweep:
    """Measures every point and hands each finished row to `on_row`.

    A point is timed until its samples are quiet (`StoppingRule`) or `measure.timeout_s` is over;
    then the row names the condition that was not met. Samples of a block during which the GPU
    throttled are discarded and counted. With `overlap` the steps are those of two in flight: `step_ms` is
    the pace, and what the device waited for the host is beside it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: MeasureConfig,
        seed: int,
        copy_bandwidth: float,
        overlap: bool = False,
    ) -> None:
        self._overlap = overlap
        self._runner = runner
        self._config = config
        self._seed = seed
        self._copy_bandwidth = copy_bandwidth
        self._timer = StepTimer(runner)
        self._telemetry = Telemetry(runner.device)
        self._kv_bytes_per_token = kv_bytes_per_token(runner.loaded, runner.kv.dtype)

    def points(self) -> list[SweepPoint]:
        """List what will be measured: per context and batch size, the strategy's plan and eager."""
        graphs = self._runner.graph_runner
        capture_bs = graphs.capture_bs if graphs is not None else []
        config = self._runner.config
        sizes = self._config.batch_sizes or sweep_batch_sizes(capture_bs, config.max_batch_size)
        return [
            SweepPoint(batch_size, context_len, plan)
            for context_len in self._config.context_lens
            for batch_size in sorted(sizes)
            if batch_size <= fitting_requests(config.num_kv_pages, config.page_size, context_len)
            for plan in self._plans(batch_size)
        ]

    def _plans(self, batch_size: int) -> Iterator[StepPlan]:
        """The plan in force, the graph of the smallest captured size that fits, and eager, once each.

        With Inductor's graphs, compiled steps stand in for ours.
        """
        graphs = self._runner.graph_runner
        eager = StepPlan("eager", (), "forced")
        if graphs is not None:
            seen = set()
            mode: Mode = "compiled" if graphs.graph_backend == "inductor" else "graph"
            fitting = [size for size in graphs.capture_bs if size >= batch_size][:1]
            for plan in (
                graphs.plan(batch_size),
                *(StepPlan(mode, (size,), "forced") for size in fitting),
            ):
                if plan.mode != "eager" and (plan.mode, plan.sizes) not in seen:
                    seen.add((plan.mode, plan.sizes))
                    yield StepPlan(plan.mode, plan.sizes, "forced")
        yield eager

    def run(self, on_row: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> None:
        """Measure all points; `on_row(row, samples)` gets each row with its raw samples."""
        points = self.points()
        for context_len in self._config.context_lens:
            here = [point for point in points if point.context_len == context_len]
            largest = max(point.batch_size for point in here)
            with ProbeRequests(self._runner, [context_len] * largest, self._seed) as probe:
                for point in here:
                    on_row(*self._measure(probe, point))

    def _measure(
        self, probe: ProbeRequests, point: SweepPoint
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        batch = probe.decode_batch(point.batch_size)
        warm_up = self._warm_up(batch, point.plan)
        rule = StoppingRule(
            min_samples=self._config.min_samples,
            min_time_s=self._config.min_time_s,
            max_noise=self._config.max_noise,
            timeout_s=self._config.timeout_s,
        )
        timings: list[StepTiming] = []
        num_discarded = 0
        while not rule.done:
            block = self._block(batch, point.plan)
            if self._telemetry.throttle_reasons():
                num_discarded += len(block)
                continue
            timings += block
            for timing in block:
                rule.add(timing.step_ms)
        unmet = "; ".join(filter(None, (warm_up.unmet_condition, rule.unmet_condition))) or None
        row = self._row(point, timings, num_discarded, unmet)
        row["back_to_back_ms"] = self._timer.back_to_back(batch, point.plan, _BACK_TO_BACK_STEPS)
        return row, _samples(row, timings)

    def _block(self, batch: ForwardBatch, plan: StepPlan) -> list[StepTiming]:
        if self._overlap:
            return self._timer.overlapped(batch, plan, _BLOCK)
        return [self._timer.isolated(batch, plan) for _ in range(_BLOCK)]

    def _warm_up(self, batch: ForwardBatch, plan: StepPlan) -> WarmUp:
        """Run steps until their level is stable; none of them is a sample."""
        warm_up = WarmUp(self._config.num_warmup)
        deadline = time.monotonic() + self._config.timeout_s
        while not warm_up.done and time.monotonic() < deadline:
            warm_up.add(self._timer.isolated(batch, plan).step_ms)
        return warm_up

    def _row(
        self, point: SweepPoint, timings: list[StepTiming], num_discarded: int, unmet_condition: str | None
    ) -> dict[str, Any]:
        floor_ms = self._floor_ms(point.batch_size, point.context_len)
        row = {
            "batch_size": point.batch_size,
            "padded_batch_size": point.plan.padded_batch_size(point.batch_size),
            "mode": point.plan.mode,
            "graph_backend": "none" if point.plan.mode == "eager" else self._runner.graph_backend,
            "compiled": self._runner.is_compiled(point.plan),
            "context_len": point.context_len,
            "num_kv_tokens": point.batch_size * point.context_len,
            "num_samples": len(timings),
            "num_discarded": num_discarded,
            "unmet_condition": unmet_condition,
            "overlap": self._overlap,
            "roofline_ms": floor_ms,
        }
        return row | _statistics(timings, floor_ms)

    def _floor_ms(self, batch_size: int, context_len: int) -> float:
        """Time to read the step's weights and cache once at the measured copy bandwidth."""
        num_bytes = (
            self._runner.loaded.decode_weight_bytes + batch_size * context_len * self._kv_bytes_per_token
        )
        return 1e3 * num_bytes / self._copy_bandwidth

    def floor_bytes(self) -> dict[str, int]:
        """Return what the roofline counts: weight bytes a step reads, and KV bytes a token."""
        return {
            "decode_weight_bytes": self._runner.loaded.decode_weight_bytes,
            "kv_bytes_per_token": self._kv_bytes_per_token,
        }


def _samples(row: dict[str, Any], timings: list[StepTiming]) -> list[dict[str, Any]]:
    """Return the raw samples of a row: each isolated step, and the mean of the back-to-back ones."""
    point = {
        name: row[name]
        for name in ("batch_size", "padded_batch_size", "mode", "graph_backend", "context_len")
    }
    timing_kind = "overlapped" if row["overlap"] else "isolated"
    isolated = [
        {**point, "timing": timing_kind, "sample": index, **asdict(timing)}
        for index, timing in enumerate(timings)
    ]
    return [*isolated, {**point, "timing": "back_to_back", "sample": 0, "step_ms": row["back_to_back_ms"]}]


def _statistics(timings: list[StepTiming], floor_ms: float) -> dict[str, float | None]:
    """Summarise the samples of a point; everything is None where every block was discarded."""
    names = (
        "host_prepare_us_p50",
        "host_exposed_us_p50",
        "replay_ms_p50",
        "step_ms_p50",
        "step_ms_p99",
        "rel_std",
        "rel_iqr",
        "roofline_fraction",
    )
    if not timings:
        return dict.fromkeys(names)
    step_ms = np.array([timing.step_ms for timing in timings])
    p25, p50, p75, p99 = np.percentile(step_ms, (25, 50, 75, 99)).tolist()
    values = (
        float(np.median([timing.host_prepare_us for timing in timings])),
        float(np.median([timing.host_exposed_us for timing in timings])),
        float(np.median([timing.replay_ms for timing in timings])),
        p50,
        p99,
        float(step_ms.std() / step_ms.mean()),
        (p75 - p25) / p50,
        floor_ms / p50,
    )
    return dict(zip(names, values, strict=True))


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
    for _ in range(config.num_warmup):
        runner.forward(batch)
    samples: list[float] = []
    rule = StoppingRule(
        min_samples=config.min_samples, min_time_s=0.0, max_noise=config.max_noise, timeout_s=config.timeout_s
    )
    while not rule.done:
        synchronize(runner.device)
        start = time.perf_counter()
        runner.forward(batch).next_token_logits.argmax(dim=-1).cpu()
        samples.append((time.perf_counter() - start) * 1e3)
        rule.add(samples[-1])
    return samples
