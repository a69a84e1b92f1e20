"""The size sweep: what one decode step costs at each batch size, mode and context length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.cache_flush import CacheFlush
from harness.energy import energy_of
from harness.floor import Floor
from harness.memory import kv_bytes_per_token
from harness.point_samples import PointSamples, SweepPoint
from harness.probe import ProbeRequests
from harness.step_timer import StepTimer, StepTiming
from harness.stopping import StoppingRule, WarmUp
from harness.telemetry import Telemetry, TelemetryWatch, clock_drift
from harness.time_sheet import TimeSheet
from runners.padding import Mode, StepPlan

if TYPE_CHECKING:
    from harness.schema import MeasureConfig
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner

#: Samples between two looks at the card, at least.
_BLOCK = 8
_BACK_TO_BACK_STEPS = 16
_MAX_AUTO_OFF_SIZES = 16
#: Calls that never count, however long they take: code compiles in the first, and Inductor records its
#: CUDA graphs in the second and third.
_FIRST_CALLS = 3


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

    The points of a context length are visited `measure.rounds` times, the last time in turn and before that
    in a random order: what the rounds of a point differ by is what another run would, and a machine that
    changes its speed makes points noisy, not one size slower than its neighbour. In a round a point is
    timed until its samples are quiet (`StoppingRule`) or its share of `measure.timeout_s` is over; then the
    row names the condition that was not met. Samples of a block during which the GPU throttled, or something
    was compiled, are discarded and counted. With `overlap` the steps are those of two in flight: `step_ms` is the pace, and what the device
    waited for the host is beside it.

    Attributes:
        times: where the wall time of `run` went.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: MeasureConfig,
        seed: int,
        copy_bandwidth: float | None,
        overlap: bool = False,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._overlap = overlap
        self._runner = runner
        self._config = config
        self._seed = seed
        self._flush = CacheFlush(runner.device) if config.flush_cache else None
        self._timer = StepTimer(runner, self._flush)
        self._telemetry = telemetry or Telemetry.of(runner.device)
        self._watch = TelemetryWatch(self._telemetry)
        kv_bytes = kv_bytes_per_token(runner.loaded, runner.kv.dtype)
        self._floor = Floor(runner.loaded.decode_weight_bytes, kv_bytes, copy_bandwidth)
        self.times = TimeSheet()

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

    def cut_contexts(self) -> dict[int, int]:
        """Return the contexts at which the pool does not hold all batch sizes, with the largest measured, or 0."""
        most = dict.fromkeys(self._config.context_lens, 0)
        for point in self.points():
            most[point.context_len] = max(point.batch_size, most[point.context_len])
        return {length: size for length, size in most.items() if size < max(most.values())}

    def _plans(self, batch_size: int) -> Iterator[StepPlan]:
        """The plan in force, the graph of the smallest captured size that fits, and eager, once each.

        With Inductor's graphs, compiled steps stand in for ours. Without graphs there is always eager.
        """
        graphs = self._runner.graph_runner
        eager = StepPlan("eager", (), "forced")
        if graphs is not None:
            seen = set()
            mode: Mode = "compiled" if graphs.graph_backend == "inductor" else "graph"
            fitting = [size for size in graphs.capture_bs if size >= batch_size][:1]
            in_force = [] if graphs.refuses(batch_size) else [graphs.plan(batch_size)]
            for plan in (
                *in_force,
                *(StepPlan(mode, (size,), "forced") for size in fitting),
            ):
                if plan.mode != "eager" and (plan.mode, plan.sizes) not in seen:
                    seen.add((plan.mode, plan.sizes))
                    yield StepPlan(plan.mode, plan.sizes, "forced")
        eager_sizes = self._config.eager_batch_sizes
        if graphs is None or not eager_sizes or batch_size in eager_sizes:
            yield eager

    def run(self, on_row: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> None:
        """Measure all points; `on_row(row, samples)` gets each row with its raw samples."""
        self.times = TimeSheet()
        points, shuffle = self.points(), np.random.default_rng(self._seed)
        for context_len in self._config.context_lens:
            here = [PointSamples(point) for point in points if point.context_len == context_len]
            if not here:  # the pool holds no request as long as this
                continue
            largest = max(samples.point.batch_size for samples in here)
            with self.times.book("prefill"):
                probe = ProbeRequests(self._runner, [context_len] * largest, self._seed)
            with probe:
                for index in range(self._config.rounds):
                    is_last = index == self._config.rounds - 1
                    order = range(len(here)) if is_last else shuffle.permutation(len(here)).tolist()
                    for samples in (here[at] for at in order):
                        batch = probe.decode_batch(samples.point.batch_size)
                        self._sample(samples, batch, index)
                        if is_last:
                            self._sample_back_to_back(samples, batch)
                            with self.times.book("record"):
                                on_row(*self._results(samples))

    def _sample(self, samples: PointSamples, batch: ForwardBatch, index: int) -> None:
        """Measure a point for one round."""
        config, plan = self._config, samples.point.plan
        with self.times.book("warm_up"):
            warm_up = self._warm_up(batch, plan)
        rule = StoppingRule(
            min_samples=-(-config.min_samples // config.rounds),
            min_time_s=config.min_time_s / config.rounds,
            max_noise=config.max_noise,
            timeout_s=config.timeout_s / config.rounds,
        )
        while not rule.done:
            compiled = self._runner.compile_counts
            with self.times.book("samples"):
                block = self._block(batch, plan, rule)
            with self.times.book("telemetry"):
                reading = self._watch.look()
            samples.throttle_reasons.update(reading.throttle_reasons or ())
            if reading.is_throttled or self._runner.compile_counts != compiled:
                samples.num_discarded += len(block)
                continue
            samples.add(block, index, reading)
            for timing in block:
                if not timing.preempted:
                    rule.add(timing.step_ms)
        samples.note_unmet(index, config.rounds, warm_up.unmet_condition, rule.unmet_condition)

    def _block(self, batch: ForwardBatch, plan: StepPlan, rule: StoppingRule) -> list[StepTiming]:
        """Time steps until a look at the card costs little beside them."""
        block = self._steps(batch, plan, _BLOCK)
        while not self._watch.is_due and not rule.timed_out:
            block += self._steps(batch, plan, _BLOCK)
        return block

    def _steps(self, batch: ForwardBatch, plan: StepPlan, num_steps: int) -> list[StepTiming]:
        if self._overlap:
            return self._timer.overlapped(batch, plan, num_steps)
        return [self._timer.isolated(batch, plan) for _ in range(num_steps)]

    def _warm_up(self, batch: ForwardBatch, plan: StepPlan) -> WarmUp:
        """Run steps as they will be timed until their level is stable; none of them is a sample."""
        config = self._config
        least = max(_FIRST_CALLS, config.num_warmup)
        warm_up, deadline_s = WarmUp(least), float("inf")
        while not warm_up.done and time.monotonic() < deadline_s:
            for timing in self._steps(batch, plan, 1):
                warm_up.add(timing.step_ms)
            if warm_up.num_samples == least:  # what was compiled until here may have taken minutes
                deadline_s = time.monotonic() + config.timeout_s / config.rounds
        return warm_up

    def _sample_back_to_back(self, samples: PointSamples, batch: ForwardBatch) -> None:
        """Measure the steps in a row, and the energy that they take."""
        plan = samples.point.plan

        def run() -> float:
            return self._timer.back_to_back(batch, plan, _BACK_TO_BACK_STEPS)

        with self.times.book("back_to_back"):
            samples.back_to_back_ms = run()
        with self.times.book("energy"):
            energy_mj = energy_of(run, self._telemetry.energy_mj, self._config.energy_s)
        if energy_mj is not None:
            samples.energy_mj_per_token = energy_mj / (_BACK_TO_BACK_STEPS * batch.batch_size)
        with self.times.book("telemetry"):
            samples.num_other_processes = self._telemetry.num_other_processes()

    def _results(self, samples: PointSamples) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the row of a point, and its raw samples."""
        point = samples.point
        is_eager = point.plan.mode == "eager"
        how = {
            "graph_backend": "none" if is_eager else self._runner.graph_backend,
            "compiled": self._runner.is_compiled(point.plan),
            "overlap": self._overlap,
            "flush_cache": self._config.flush_cache,
        }
        row = samples.row(self._floor.step_ms(point.batch_size * point.context_len)) | how
        return row, samples.raw(row)

    def describe(self) -> dict[str, Any]:
        """Return the `size_sweep` part of `result.json`: what the roofline counts, what was flushed, and where
        the wall time went."""
        seconds = self.times.seconds()
        measuring_s = sum(seconds.get(f"{name}_s", 0.0) for name in ("telemetry", "record", "other"))
        return {
            **asdict(self._floor),
            "flushed_bytes": None if self._flush is None else self._flush.num_bytes,
            "overhead": {**seconds, "measuring_share": measuring_s / seconds["wall_s"]},
        }


def sweep_warnings(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say what makes the rows of a sweep, in the order of measuring, incomparable with each other."""
    fall = clock_drift([row["sm_clock_mhz"] for row in rows])
    if fall is not None:
        yield (
            f"SM clock fell from {fall[0]:.0f} to {fall[1]:.0f} MHz during the size sweep: what came later was "
            "measured on a slower card (sm_clock_mhz in sizes.csv)"
        )
    others = max((row["num_other_processes"] or 0 for row in rows), default=0)
    if others:
        yield f"{others} other process(es) computed on the GPU during the size sweep; its times are not the model's alone"
