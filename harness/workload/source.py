"""The workload that a configuration asks for."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from harness.build import scheduler_limits
from harness.workload.arrivals import steady, synthetic
from harness.workload.shaping import Shaping
from harness.workload.traces import load_trace

if TYPE_CHECKING:
    from harness.schema import Config
    from harness.workload.base import Workload

#: Requests of a made workload that names neither a number nor a duration.
_DEFAULT_NUM_REQUESTS = 128


def load_workload(config: Config) -> Workload:
    """Make or read the requests of `config.workload`. Raises ConfigError for a file that cannot be used."""
    workload = config.workload
    shaping = Shaping(
        # A request that no empty pool could hold is over length too.
        max_seq_len=scheduler_limits(config).max_request_tokens,
        over_length=workload.over_length,
        max_requests=workload.max_requests,
        duration_s=workload.duration_s,
        rate_scale=workload.rate_scale,
        max_concurrency=workload.max_concurrency,
    )
    if workload.kind == "trace":
        assert workload.path is not None, "check_workload asks for a path"
        return load_trace(workload.path, workload.format, shaping, asdict(workload.columns), seed=config.seed)
    lengths = workload.prompt_len, workload.output_len
    if workload.kind == "steady":
        batch_size = workload.batch_size or config.runner.max_batch_size
        return steady(batch_size, workload.max_requests or 4 * batch_size, *lengths, shaping, config.seed)
    return synthetic(
        workload.arrival,
        workload.request_rate,
        _num_requests(config),
        *lengths,
        shaping,
        burstiness=workload.burstiness,
        seed=config.seed,
    )


def _num_requests(config: Config) -> int:
    workload = config.workload
    if workload.max_requests is not None:
        return workload.max_requests
    if workload.duration_s is not None:
        # A quarter more than expected: `duration_s` cuts what arrives too late.
        return max(1, math.ceil(1.25 * workload.duration_s * workload.request_rate))
    return _DEFAULT_NUM_REQUESTS
