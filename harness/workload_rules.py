"""Workloads that cannot run: each rule names a field, its value and the remedy."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from harness.errors import ConfigError
from harness.rules import check_costs, check_within

if TYPE_CHECKING:
    from harness.lengths import LengthSpec
    from harness.schema import Config

#: Kinds that draw their arrivals by a rate; the others cannot have a burst.
_BY_RATE = ("synthetic", "lengths")


def check_workload(config: Config) -> None:
    """Raise ConfigError unless the workload has what its kind and its clock need. Imports no torch."""
    check_source(config)
    check_rate(config)
    check_lengths(config)
    check_clock(config)


def check_source(config: Config) -> None:
    """The requests can be read or made."""
    from harness.workload.histogram import LengthHistogram
    from harness.workload.traces import check_trace

    workload = config.workload
    if workload.kind == "trace":
        if workload.path is None:
            raise ConfigError("workload.path", None, "workload=trace needs a file: add workload.path=FILE")
        check_trace(workload.path, workload.format, dataclasses.asdict(workload.columns))
        return
    if workload.kind == "lengths":
        if workload.path is not None:
            LengthHistogram.load(workload.path)
    elif workload.path is not None:
        raise ConfigError(
            "workload.path", workload.path, f"unused with workload.kind={workload.kind}: add workload=trace"
        )
    bounded_by_time = workload.duration_s is not None and workload.kind in _BY_RATE
    if workload.max_requests is None and not bounded_by_time:
        raise ConfigError(
            "workload.max_requests", None, f"workload={workload.kind} needs a number of requests"
        )


def check_rate(config: Config) -> None:
    """The rate, the ramp and the burst fit the kind."""
    workload = config.workload
    at_once = workload.request_rate is not None and math.isinf(workload.request_rate)
    if at_once and workload.kind == "ramp":
        raise ConfigError("workload.request_rate", "inf", "a ramp ends at a rate: give requests a second")
    if at_once and workload.kind in _BY_RATE and workload.max_requests is None:
        raise ConfigError(
            "workload.max_requests", None, "with request_rate=inf all arrive at once: say how many"
        )
    if workload.format != "timed_trace" and workload.sec_multiplier != 1:
        raise ConfigError(
            "workload.sec_multiplier",
            workload.sec_multiplier,
            "goes with workload.format=timed_trace; other formats have units of their own",
        )
    if not workload.burst_size:
        return
    if workload.kind not in _BY_RATE:
        raise ConfigError(
            "workload.burst_size",
            workload.burst_size,
            f"unused with workload.kind={workload.kind}: write workload=synthetic or lengths, or burst_size=0",
        )
    if workload.max_requests is not None and workload.burst_size > workload.max_requests:
        raise ConfigError(
            "workload.burst_size",
            workload.burst_size,
            f"must be at most workload.max_requests={workload.max_requests}, which it is a part of",
        )


def idle_keys(config: Config) -> str | None:
    """Say which keys of the workload nothing reads: a steady batch has no arrivals, and only it has a size.

    A warning, and no refusal: an overlay may have set them for the kind that it chose itself.
    """
    workload = config.workload
    unset: dict[str, object] = {"batch_size": None}
    if workload.kind == "steady":
        unset = {"request_rate": None, "duration_s": None, "rate_scale": 1.0}
    idle = {key: value for key in unset if (value := getattr(workload, key)) != unset[key]}
    if not idle:
        return None
    given = ", ".join(f"workload.{key}={value:g}" for key, value in idle.items())
    reads = (
        "a steady batch keeps its size and has no arrivals"
        if workload.kind == "steady"
        else "only steady reads it"
    )
    return f"{given}: unused with workload.kind={workload.kind}, for {reads}"


def check_lengths(config: Config) -> None:
    """Made requests fit the runner and the model."""
    workload = config.workload
    if workload.kind == "steady" and workload.batch_size is not None:
        check_within(
            "workload.batch_size",
            [workload.batch_size],
            "runner.max_batch_size",
            config.runner.max_batch_size,
        )
    if workload.kind not in ("steady", "synthetic", "ramp") or workload.over_length != "error":
        return
    shortest = _shortest(workload.prompt_len) + _shortest(workload.output_len)
    if shortest > config.model.max_seq_len:
        raise ConfigError(
            "workload.over_length",
            "error",
            f"every request has at least {shortest} tokens and model.max_seq_len={config.model.max_seq_len}: raise that, "
            "shorten workload.prompt_len or workload.output_len, or write clip or skip",
        )


def _shortest(spec: LengthSpec) -> int:
    return max(spec.min, round(spec.mean)) if spec.distribution == "fixed" and spec.mean else spec.min


def check_clock(config: Config) -> None:
    """A clock that does not measure has its times."""
    workload = config.workload
    if workload.clock == "fixed" and workload.fixed_step_ms is None:
        raise ConfigError("workload.fixed_step_ms", None, "workload.clock=fixed needs the ms of a step")
    if workload.clock == "costs":
        if workload.costs_path is None:
            raise ConfigError(
                "workload.costs_path", None, "workload.clock=costs needs the sizes.csv of a run"
            )
        _check_cost_table(config, workload.costs_path)


def _check_cost_table(config: Config, path: str) -> None:
    """The table knows every kind of step that this runner can take."""
    from harness.step_times import CostTable

    check_costs("workload.costs_path", path)
    modes = {"eager"}
    if config.runner.kind == "cuda_graph":
        modes.add("compiled" if config.compile.mode == "reduce_overhead" else "graph")
    CostTable.load(path).require(*sorted(modes))
