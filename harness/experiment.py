"""One job, top to bottom. Each phase writes its part of the record before the next begins."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config_hash import config_hash
from harness.errors import unwritable
from harness.interruptions import Interruptions, JobKilledError
from harness.job_ending import ParityFailedError, end_record, status_of
from harness.progress import CAPTURE, LOAD, PARITY, PROFILE, WORKLOAD, Progress
from harness.record import JobRecord, Status
from harness.record_reader import read_result
from harness.schema import Config, check, load_config

if TYPE_CHECKING:
    import torch

    from harness.memory import MemoryBudget
    from harness.parity import ParityReport
    from harness.workload.base import Workload
    from runners.capture import CaptureRecord, CompileCost
    from runners.model_runner import ModelRunner, RunnerConfig
    from runners.models.loader import LoadedModel, ModelSpec


def run_job(resolved_yaml: str | Path, job_dir: str | Path, progress: Progress | None = None) -> Status:
    """Run one experiment and return how it ended; never exits the process.

    `resolved_yaml` is a composed configuration: YAML text, or the Path of a file. `job_dir` receives
    the record (DESIGN section 4). Importable without Hydra; every failure is a status in
    `result.json`, with the error and its traceback. Raises ConfigError only where there is no such
    folder to be had.
    """
    try:
        record = JobRecord(job_dir)
    except OSError as error:
        raise unwritable(job_dir, error) from error
    try:
        config = load_config(resolved_yaml)
        check(config)
    except Exception as error:
        return end_record(record, status_of(error), error)
    record.update(config=asdict(config))
    return Experiment(config, record, progress or Progress()).run()


def _timed(phase: Callable[[Experiment], None]) -> Callable[[Experiment], None]:
    """Record the seconds that a phase took, also when it failed."""

    @functools.wraps(phase)
    def run(self: Experiment) -> None:
        started = time.perf_counter()
        try:
            phase(self)
        finally:
            self.timings[f"{phase.__name__}_s"] = time.perf_counter() - started
            self.record.update(timings=self.timings)

    return run


class Experiment:
    """The phases of a job, in the order in which they run."""

    def __init__(self, config: Config, record: JobRecord, progress: Progress) -> None:
        self.config = config
        self.record = record
        self.progress = progress
        self.workload: Workload | None = None
        self.device: torch.device
        self.model_spec: ModelSpec
        self.loaded: LoadedModel
        self.budget: MemoryBudget
        self.settings: RunnerConfig
        self.runner: ModelRunner
        #: Bytes read plus bytes written a second; None where it is not measured.
        self.copy_bandwidth: float | None = None
        #: What parity has proven so far.
        self.proof: ParityReport | None = None
        #: Phase → its seconds.
        self.timings: dict[str, float] = {}

    def run(self) -> Status:
        """Run the phases; record and publish whatever happened."""
        status, error = Status.OK, None
        with Interruptions() as interruptions:
            try:
                with interruptions.raised(self.config.job.timeout_s):
                    self._run_phases()
            except BaseException as caught:
                status, error = status_of(caught), caught
            self._conclude(status, error)
            with suppress(KeyboardInterrupt, JobKilledError), interruptions.raised():
                self._publish(status)
        return status

    def _run_phases(self) -> None:
        from runners.graph_backend import own_stream

        self.validate()
        with own_stream(self.device):
            self._run_on_device()

    def _run_on_device(self) -> None:
        self.copy_memory()
        self.build()
        self.capture()
        with self.runner:
            try:
                self.parity()
                self.size_sweep()
                self.loop_sweep()
                self.workload_replay()
                self.loop_sweep_again()
                self.profile()
            finally:
                self.keep_step_warnings()
                self.count_compilations()

    @_timed
    def validate(self) -> None:
        """Refuse what cannot run before a weight is loaded; write down what will run, and where."""
        from harness.build import model_spec
        from harness.device import describe_environment, resolve_device
        from harness.workload.source import load_workload
        from harness.workload_rules import idle_keys
        from runners.models.loader import pin_model

        self.device = resolve_device(self.config.device)
        self.model_spec = pin_model(model_spec(self.config))
        environment = describe_environment(self.device)
        self.record.update(environment=environment)
        self.record.update(
            config_hash=config_hash(self.config, environment, hub_commit=self.model_spec.revision)
        )
        if self.config.workload.enabled:
            self.workload = load_workload(self.config)
            for warning in filter(None, (*self.workload.changed_requests(), idle_keys(self.config))):
                self.record.warn(warning)
            self.record.update(workload={"statistics": asdict(self.workload.statistics())})
            self.progress.note("workload", self.workload.statistics().lines())

    @_timed
    def copy_memory(self) -> None:
        """Measure what no step can outrun, while the device's memory is still free for it."""
        from harness.device import measure_copy_bandwidth

        if not self.config.measure.enabled:
            return
        self.copy_bandwidth = measure_copy_bandwidth(self.device)
        if self.copy_bandwidth is None:
            self.record.warn(
                "the device has too little memory free to measure its bandwidth: there is no roofline"
            )

    @_timed
    def build(self) -> None:
        """Load the model, and see that the cache will fit beside it."""
        from harness.build import describe_model, runner_config
        from harness.cache_flush import flush_bytes
        from harness.memory import cut_warning, plan_memory
        from runners.models.loader import load_model

        with self.progress.task(LOAD):
            self.loaded = load_model(self.model_spec, self.device)
        settings = runner_config(self.config, self.device)
        fraction = self.config.attention.memory_fraction
        measure = self.config.measure
        flushed = flush_bytes(self.device) if measure.enabled and measure.flush_cache else 0
        self.budget = plan_memory(self.loaded, settings, self.device, fraction, flushed)
        self.record.update(
            model=describe_model(self.config.model, self.loaded), memory={"budget": asdict(self.budget)}
        )
        self.budget.check()
        self.settings = replace(settings, num_pages=self.budget.num_pages)
        if (cut := cut_warning(self.budget, settings, fraction)) is not None:
            self.record.warn(cut)

    @_timed
    def capture(self) -> None:
        """Build the runner, which captures its graphs: a row per size, largest first."""
        from harness.capture_list import capture_list
        from harness.memory import memory_part
        from runners.model_runner import ModelRunner
        from runners.padding import StepCosts

        sizes = self.settings.capture_sizes
        if sizes and (gap := capture_list(self.config).warning):
            self.record.warn(gap)
        with self.progress.task(CAPTURE, total=len(self.settings.compile_sizes) + len(sizes)) as task:

            def on_compile(size: int, cost: CompileCost) -> None:
                task.advance(detail=f"size {size} compiled in {cost.compile_s:.1f} s")

            def on_capture(row: CaptureRecord) -> None:
                self.record.append("capture", asdict(row))
                task.advance()

            started = time.perf_counter()
            self.runner = ModelRunner(self.loaded, self.settings, on_capture, on_compile)
            seconds = time.perf_counter() - started
        self.record.finish("capture")
        self.record.update(
            memory=memory_part(self.budget, self.runner),
            graph_backend=self.runner.graph_backend,
            attention=self.runner.attn_backend.describe(),
            capture={
                "sizes": list(sizes),
                "policy": self.config.capture.policy,
                "seconds": seconds,
                "compile_counts": self._compile_counts(),
                "fused": None if self.runner.tuning is None else self.runner.tuning.as_dict(),
            },
        )
        for warning in () if self.runner.tuning is None else self.runner.tuning.warnings:
            self.record.warn(warning)
        if self.config.padding.costs_path is not None and self.runner.graph_runner is not None:
            self.runner.graph_runner.set_step_costs(StepCosts.from_sizes_csv(self.config.padding.costs_path))

    def _compile_counts(self) -> dict[str, int] | None:
        counts = self.runner.compile_counts
        return None if counts is None else asdict(counts)

    @_timed
    def parity(self) -> None:
        """Prove that replay equals eager; a failure ends the job unless `on_failure=warn`."""
        from harness.parity import parity_batch_sizes, sizes_chosen_by_cost

        config = self.config.parity
        if not config.enabled:
            self.record.update(parity={"verified": False, "reason": "parity.enabled=false"})
        elif self.runner.graph_runner is None:
            reason = "no graphs: an eager job is its own reference"
            self.record.update(parity={"verified": True, "num_cases": 0, "reason": reason})
        else:
            largest = self.settings.max_batch_size
            proving = parity_batch_sizes(self.settings.capture_sizes, largest)
            sizes = config.batch_sizes or [
                size for size in proving if not self.runner.graph_runner.refuses(size)
            ]
            self._prove({*sizes, *sizes_chosen_by_cost(self.runner)})

    def _prove(self, batch_sizes: Collection[int]) -> None:
        """Prove these batch sizes under the plans now in force, beside what is proven already."""
        from harness.parity import check_parity

        config = self.config.parity
        with self.progress.task(PARITY, total=len(batch_sizes)) as task:
            report = check_parity(
                self.runner, config, self.config.seed, sorted(batch_sizes), lambda case: task.advance()
            )
        if self.proof is not None:
            report.cases[:0] = self.proof.cases
        self.proof = report
        self.record.update(parity=report.as_dict())
        if not report.verified:
            failed = next(case for case in report.cases if not case.passed)
            message = f"batch {failed.batch_size} ({failed.mode}, padded to {failed.padded_batch_size}): {failed.reason}"
            if config.on_failure == "error":
                raise ParityFailedError(message)
            self.record.warn(f"parity failed and parity.on_failure=warn: {message}")

    @_timed
    def size_sweep(self) -> None:
        """Time every batch size; the costs found go to the padding strategies that need them."""
        from harness.job_sweeps import sweep_sizes
        from runners.padding import StepCosts

        if not self.config.measure.enabled:
            return
        rows = sweep_sizes(self.runner, self.config, self.record, self.progress, self.copy_bandwidth)
        if self.config.padding.costs_path is None and self.runner.graph_runner is not None:
            self.runner.graph_runner.set_step_costs(StepCosts.from_rows(rows))

    @_timed
    def loop_sweep(self) -> None:
        """Time steps beside each other in the scheduler's loop, on requests made for it."""
        from harness.job_sweeps import sweep_loop

        sweep_loop(self.runner, self.config, self.record, "before")

    @_timed
    def loop_sweep_again(self) -> None:
        """The same after the workload: the host may have changed its speed meanwhile."""
        from harness.job_sweeps import sweep_loop

        sweep_loop(self.runner, self.config, self.record, "after")
        if self.config.measure.enabled and self.config.measure.loop_batch_sizes:
            self.record.finish("loop")

    @_timed
    def workload_replay(self) -> None:
        """Let the requests arrive and the scheduler serve them; a row per step and per request."""
        from harness.workload_replay import differing_columns, replay_workload

        if self.workload is None:
            return
        statistics = self._forecast(self.workload)
        self._prove_plans_chosen_by_cost()
        with self.progress.task(WORKLOAD, total=len(self.workload)) as task:
            tally, latencies = replay_workload(
                self.runner, self.workload, self.config, self.record, task.advance
            )
        self.record.finish("steps")
        self.record.finish("requests")
        self.record.update(
            workload={
                "statistics": statistics,
                "clock": self.config.workload.clock,
                "differs_between_runs": differing_columns(self.config.workload),
                "ramp_end_ms": latencies.ramp_end_ms,
                "drain_start_ms": latencies.drain_start_ms,
                **tally.as_dict(),
            }
        )
        summary = {"clock": self.config.workload.clock, **latencies.bench_serve()}
        self.record.write_bench_serve(summary, self.runner.graph_backend)

    @_timed
    def profile(self) -> None:
        """See which kernels a step runs; last, for a profiler disturbs whatever is timed beside it."""
        from harness.step_profile import profile_steps

        if not (self.config.measure.enabled and self.config.measure.profile):
            return
        context_len = self.config.measure.context_lens[0]
        with self.progress.task(PROFILE):
            found = profile_steps(
                self.runner,
                context_len,
                self.config.seed,
                lambda rows: self.record.append_many("profile", rows),
            )
        self.record.finish("profile")
        self.record.update(profile=found)

    def _prove_plans_chosen_by_cost(self) -> None:
        """Prove the plans that the measured costs brought: parity ran before there were any."""
        from harness.parity import sizes_chosen_by_cost

        if self.proof is not None and (sizes := sizes_chosen_by_cost(self.runner, self.proof.cases)):
            self._prove(sizes)

    def _forecast(self, workload: Workload) -> dict[str, Any]:
        """Say what batch to expect, and what can be relied on, before the first request is sent."""
        from harness.forecast import forecast_batches, lock_in
        from harness.workload_replay import describe_clock, use_costs_of_clock

        unsteady = use_costs_of_clock(self.runner, self.config)
        stable = forecast_batches(self.runner, workload, self.config, self.record.job_dir)
        statistics = workload.statistics(stable)
        self.record.update(workload={"statistics": asdict(statistics)})
        self.progress.note("workload", [*statistics.expectation(), describe_clock(self.config.workload)])
        for warning in filter(None, (unsteady, lock_in(stable, self.runner))):
            self.record.warn(warning)
        return asdict(statistics)

    def keep_step_warnings(self) -> None:
        """Write down why steps ran without the graph that one would expect, once a reason."""
        if self.runner.graph_runner is not None:
            for warning in self.runner.graph_runner.warnings:
                self.record.warn(warning)

    def count_compilations(self) -> None:
        """Write down what torch.compile did since the capture; a count that should be 0 and is not warns."""
        counts = self.runner.compile_counts
        if counts is None:
            return
        capture = read_result(self.record.job_dir)["capture"]
        self.record.update(capture=capture | {"compile_counts": asdict(counts)})
        if counts.warning is not None:
            self.record.warn(counts.warning)

    def _conclude(self, status: Status, error: BaseException | None) -> None:
        """Write the status before all else: what else is to be written may be cut short, or fail."""
        end_record(self.record, status, error)
        try:
            self.record.finish_all()
        except Exception as failure:  # the rows stay readable as parts
            with suppress(OSError):  # the status is written, and a full disk takes no more
                self.record.warn(f"a part was left as it is: {type(failure).__name__}: {failure}")
        self.record.close()

    def _publish(self, status: Status) -> None:
        """Publish the record, then show it: a W&B failure, or an interrupt here, costs no result."""
        from harness.summary import print_summary
        from harness.tracking import publish

        publish(self.record.job_dir)
        if status is Status.INVALID_CONFIG:
            return  # nothing was measured, and the caller shows what is to be corrected
        if not self.progress.quiet:
            print_summary(self.record.job_dir)
