"""The workload that a configuration asks for."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from harness.build import scheduler_limits
from harness.workload.arrivals import Arrivals, from_histogram, ramp, steady, synthetic
from harness.workload.histogram import SHIPPED, LengthHistogram
from harness.workload.shaping import Shaping
from harness.workload.traces import load_trace

if TYPE_CHECKING:
    from harness.schema import Config, WorkloadConfig
    from harness.workload.base import Workload

#: Requests a second of made traffic that names no rate.
_DEFAULT_RATE = 16.0


def load_workload(config: Config) -> Workload:
    """Make or read the requests of `config.workload`. Raises ConfigError for a file that cannot be used."""
    workload, seed = config.workload, config.seed
    lengths = workload.prompt_len, workload.output_len
    shaping = _shaping(config)
    if workload.kind == "trace":
        return _trace(workload, shaping, seed)
    if workload.kind == "lengths":
        histogram = LengthHistogram.load(workload.path or SHIPPED)
        return from_histogram(_arrivals(workload), _num_requests(workload), histogram, shaping, seed)
    if workload.kind == "synthetic":
        return synthetic(_arrivals(workload), _num_requests(workload), *lengths, shaping, seed)
    assert workload.max_requests is not None, "check_source asks for it"
    if workload.kind == "ramp":
        rates = workload.start_rate, _rate(workload)
        return ramp(*rates, workload.max_requests, *lengths, shaping, seed)
    batch_size = workload.batch_size or config.runner.max_batch_size
    batch_size = min(batch_size, workload.max_concurrency or batch_size)
    return steady(batch_size, workload.max_requests, *lengths, shaping, seed)


def _shaping(config: Config) -> Shaping:
    workload = config.workload
    return Shaping(
        # A request that no empty pool could hold is over length too.
        max_seq_len=scheduler_limits(config).max_request_tokens,
        over_length=workload.over_length,
        max_requests=workload.max_requests,
        duration_s=workload.duration_s,
        rate_scale=workload.rate_scale,
        # The rate of other kinds is that of their arrivals already.
        request_rate=workload.request_rate if workload.kind == "trace" else None,
        max_concurrency=workload.max_concurrency,
    )


def _trace(workload: WorkloadConfig, shaping: Shaping, seed: int) -> Workload:
    assert workload.path is not None, "check_source asks for a path"
    return load_trace(
        workload.path, workload.format, shaping, asdict(workload.columns), workload.sec_multiplier, seed
    )


def _arrivals(workload: WorkloadConfig) -> Arrivals:
    return Arrivals(
        workload.arrival, _rate(workload), workload.burstiness, workload.burst_size, workload.burst_at_s
    )


def _rate(workload: WorkloadConfig) -> float:
    return _DEFAULT_RATE if workload.request_rate is None else workload.request_rate


def _num_requests(workload: WorkloadConfig) -> int:
    """Return the number asked for, or one that fills `duration_s`."""
    if workload.max_requests is not None:
        return workload.max_requests
    assert workload.duration_s is not None, "check_source asks for one of the two"
    # A quarter more than expected: `duration_s` cuts what arrives too late.
    return workload.burst_size + max(1, math.ceil(1.25 * workload.duration_s * _rate(workload)))
