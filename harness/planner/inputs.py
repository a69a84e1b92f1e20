"""What a verb works on: costs, limits and traffic, from a run, a trace or an engine's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from harness.planner.contexts import ContextGrid
from harness.planner.cost_source import DEFAULT_RUN, load_costs, read_run
from harness.planner.log_source import log_costs, log_histogram
from harness.planner.step_times import Runner
from harness.planner.traffic import LoggedTraffic, SimulatedTraffic, Traffic
from harness.planner.verify import recorded_workload
from harness.scheduler import SchedulerLimits
from harness.workload.engine_logs import ENGINE_LOG_FORMATS, load_engine_log
from harness.workload.shaping import Shaping
from harness.workload.trace_stream import stream_trace
from harness.workload.traces import load_trace

if TYPE_CHECKING:
    import argparse

    from harness.planner.cost import CostTable
    from harness.workload.base import Workload
    from harness.workload.logged_batches import LoggedBatches

_MIB = 1024**2


@dataclass(frozen=True)
class Inputs:
    """Costs and traffic of a verb, and how the traffic is described in its outputs."""

    costs: CostTable
    traffic: Traffic
    workload: dict[str, Any]
    warnings: list[str]


def run_of(args: argparse.Namespace) -> Path:
    """The run that is named, or the default one."""
    return Path(args.run) if args.run else DEFAULT_RUN


def load_inputs(args: argparse.Namespace) -> Inputs:
    """Read what the arguments name. Raises ConfigError for what cannot be used."""
    if args.format in ENGINE_LOG_FORMATS:
        return _from_log(args)
    costs = load_costs(run_of(args), args.allow_unverified)
    result = read_run(run_of(args))
    limits = limits_of(result, args)
    workload, described = _workload(args, result, limits)
    traffic = SimulatedTraffic(
        costs=costs,
        workload=workload,
        limits_for=lambda sizes: _less_graphs(limits, sizes, costs, result, args.pool_mib),
        grid=ContextGrid.up_to(limits.max_seq_len),
        # Requests that arrive all at once have no parts in time.
        num_windows=args.windows if workload.arrival_s[-1] > 0 else 1,
        max_batch_size=limits.max_batch_size,
        runner=runner_of(args),
        slo_ms=args.slo,
    )
    return Inputs(costs, traffic, described, [*costs.source.warnings, *_length_warnings(workload, limits)])


def load_stream(args: argparse.Namespace) -> Inputs:
    """As `load_inputs`, with the trace read in parts while it is simulated: for one list, in one pass."""
    if args.workload is None:
        raise ConfigError("--workload", None, "name the trace that is to be read in parts")
    costs = load_costs(run_of(args), args.allow_unverified)
    result = read_run(run_of(args))
    limits = limits_of(result, args)
    parts = stream_trace(args.workload, _format(args), _shaping(args, limits), args.columns, args.seed)
    traffic = SimulatedTraffic(
        costs=costs,
        workload=parts,
        limits_for=lambda sizes: _less_graphs(limits, sizes, costs, result, args.pool_mib),
        grid=ContextGrid.up_to(limits.max_seq_len),
        num_windows=1,
        max_batch_size=limits.max_batch_size,
        runner=runner_of(args),
        slo_ms=args.slo,
    )
    described = {"path": str(args.workload), "format": args.format, "rate_scale": args.rate_scale}
    return Inputs(costs, traffic, described, list(costs.source.warnings))


def runner_of(args: argparse.Namespace) -> Runner:
    return Runner(args.padding, args.above_max)


def limits_of(result: Mapping[str, Any], args: argparse.Namespace) -> SchedulerLimits:
    """What the scheduler may use: as in the run, except for what the arguments change."""
    config = result["config"]
    max_seq_len = args.max_seq_len or config["model"]["max_seq_len"]
    max_batch_size = args.max_batch_size or config["runner"]["max_batch_size"]
    page_size = config["attention"]["page_size"]
    given = args.num_pages or (config["attention"].get("num_pages") or _cut_pool(result) or 0) - 1
    return SchedulerLimits(
        max_batch_size=max_batch_size,
        num_pages=given if given > 0 else max_batch_size * -(-max_seq_len // page_size),
        page_size=page_size,
        prefill_chunk_tokens=args.prefill_chunk_tokens or config["runner"]["prefill_chunk_tokens"],
        max_seq_len=max_seq_len,
    )


def _cut_pool(result: Mapping[str, Any]) -> int | None:
    """Pages of a pool that was cut to what fitted the device; None for one of every request at full length."""
    config, budget = result["config"], (result.get("memory") or {}).get("budget") or {}
    per_request = -(-config["model"]["max_seq_len"] // config["attention"]["page_size"])
    whole = config["runner"]["max_batch_size"] * per_request + 1
    pages: int = budget.get("num_pages") or whole
    return pages if pages < whole else None


def page_bytes(result: Mapping[str, Any]) -> int | None:
    """Bytes of a KV page over all layers; None for a run that did not record them."""
    per_token = (result.get("size_sweep") or {}).get("kv_bytes_per_token")
    return None if per_token is None else int(per_token) * int(result["config"]["attention"]["page_size"])


def _less_graphs(
    limits: SchedulerLimits,
    sizes: Sequence[int],
    costs: CostTable,
    result: Mapping[str, Any],
    pool_mib: float | None,
) -> SchedulerLimits:
    """With --pool-mib, the graphs' memory comes out of the same pool as the KV pages."""
    if pool_mib is None:
        return limits
    a_page = page_bytes(result)
    if a_page is None or not costs.captures.knows_memory:
        raise ConfigError(
            "--pool-mib", pool_mib, "the run did not measure graph memory and KV bytes: give a run on a GPU"
        )
    left = pool_mib * _MIB - float(costs.captures.device_bytes(sizes).sum())
    pages = int(left // a_page) - 1  # the null page
    if pages * limits.page_size < limits.max_request_tokens:
        raise ConfigError(
            "--pool-mib",
            pool_mib,
            f"{len(sizes)} graphs leave {max(pages, 0)} pages, too few for one request of "
            f"{limits.max_request_tokens} tokens: raise it, or lower --max-seq-len",
        )
    return replace(limits, num_pages=pages)


def _workload(
    args: argparse.Namespace, result: Mapping[str, Any], limits: SchedulerLimits
) -> tuple[Workload, dict[str, Any]]:
    if args.workload is None:
        workload = recorded_workload(run_of(args), result)
        described: dict[str, Any] = {"path": None, "format": "requests of the run"}
    else:
        shaping = _shaping(args, limits)
        workload = load_trace(args.workload, _format(args), shaping, args.columns, seed=args.seed)
        described = {"path": str(args.workload), "format": args.format}
    statistics = workload.statistics()
    return workload, described | {
        "num_requests": len(workload),
        "duration_s": statistics.duration_s,
        "request_rate": statistics.request_rate,
        "rate_scale": args.rate_scale,
        "max_concurrency": workload.max_concurrency,
        "notes": workload.notes,
    }


def _length_warnings(workload: Workload, limits: SchedulerLimits) -> list[str]:
    """Say what became of requests that are longer than the run can hold."""
    lines, longest = [], f"{limits.max_request_tokens:,} tokens"
    if clipped := workload.notes.get("num_clipped"):
        lines.append(
            f"{clipped:,} of {len(workload):,} requests are longer than {longest} and were shortened to it: "
            "--over-length skip leaves them out"
        )
    if skipped := workload.notes.get("num_skipped"):
        lines.append(
            f"{skipped:,} requests longer than {longest} were left out, {len(workload):,} are planned for: "
            "--over-length clip shortens them"
        )
    return lines


def _format(args: argparse.Namespace) -> str:
    if args.format is None:
        raise ConfigError("--format", None, "name the format of the trace: azure, mooncake, …")
    return str(args.format)


def _shaping(args: argparse.Namespace, limits: SchedulerLimits) -> Shaping:
    return Shaping(
        max_seq_len=limits.max_request_tokens,
        over_length=args.over_length,
        max_requests=args.max_requests,
        duration_s=args.duration_s,
        rate_scale=args.rate_scale,
        request_rate=args.request_rate,
        max_concurrency=args.max_concurrency,
    )


def _from_log(args: argparse.Namespace) -> Inputs:
    """Batches of an engine's log; costs of the run that is named, of the log itself, or of the default run."""
    if args.workload is None:
        raise ConfigError("--workload", None, f"name the log of format {args.format}")
    logged = load_engine_log(args.workload, args.format)
    costs = None if args.run else log_costs(logged, str(args.workload), args.format, args.context)
    warnings = _log_warnings(logged)
    if costs is None:
        costs = load_costs(run_of(args), args.allow_unverified)
        max_seq_len = read_run(run_of(args))["config"]["model"]["max_seq_len"]
        if not args.run:
            source = costs.source
            warnings.append(f"the log has no step times: they are those of {source.model} on {source.device}")
    else:
        max_seq_len = max(int(args.context), 1)
    largest = costs.graph.sizes[-1]
    max_batch_size = args.max_batch_size or min(largest, max(logged.capture_sizes, default=largest))
    grid = ContextGrid.up_to(args.max_seq_len or max_seq_len)
    histogram, num_above = log_histogram(logged, max_batch_size, grid, args.windows, args.context)
    described = {
        "path": str(args.workload),
        "format": args.format,
        "num_steps": logged.num_steps,
        "num_used": logged.num_used,
        "num_malformed": logged.num_malformed,
        "malformed_examples": logged.malformed_examples,
        "num_other_steps": logged.num_other_steps,
        "num_above_max": num_above,
        "capture_sizes": list(logged.capture_sizes),
        "notes": logged.notes,
    }
    traffic = LoggedTraffic(costs, histogram, grid, runner_of(args))
    if num_above:
        warnings.append(
            f"{num_above} steps above {max_batch_size} are left out: prefill, or raise --max-batch-size"
        )
    return Inputs(costs, traffic, described, [*costs.source.warnings, *warnings])


def _log_warnings(logged: LoggedBatches) -> list[str]:
    warnings = list(logged.notes)
    if logged.num_malformed:
        warnings.append(f"{logged.num_malformed} malformed lines, such as {logged.malformed_examples[0]!r}")
    return warnings
