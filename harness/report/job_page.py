"""The page of one job: what it found, how far to trust it, and the charts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.card_facts import card_facts
from harness.floor import workload_floor
from harness.record import Status
from harness.record_reader import read_result, read_table
from harness.report.bootstrap import median_error
from harness.report.capture_charts import capture_figure, capture_seconds, graph_bytes
from harness.report.figure import Figure, Table, number
from harness.report.page import Banner, Fact, Page, Section, details_markup, table_markup
from harness.report.profile_charts import profile_figure
from harness.report.step_charts import step_parts_figure, step_time_figure
from harness.report.workload_charts import latency_figure, padding_figure, timeline_figure
from harness.report.workload_rows import read_requests, read_steps

Row = Mapping[str, Any]
_MIB = 1024**2
_NORMAL_95 = 1.96


def job_page(job_dir: Path) -> Page:
    """Read a job's folder, finished, failed or cut off, and say what is in it."""
    result = read_result(job_dir)
    capture, sizes = (read_table(job_dir, name).to_pylist() for name in ("capture", "sizes"))
    return Page(
        title=f"{(result['model'] or {}).get('name') or 'Job'}: {_policy(result)}",
        subtitle=f"{job_dir} · {_when(result)}",
        banners=list(banners(result)),
        is_emulated=result["graph_backend"] == "emulated",
        is_unverified=is_unverified(result),
        sections=[
            Section("overview", "Overview", facts=list(_facts(job_dir, result, capture, sizes))),
            Section("steps", "Batch sizes", figures=list(_step_figures(job_dir, result, sizes))),
            Section("kernels", "Kernels", figures=list(_profile_figures(job_dir, result))),
            Section("captures", "Captures", figures=[capture_figure(capture)] if capture else []),
            Section("workload", "Workload", figures=list(_workload_figures(job_dir, result))),
            Section("parity", "Parity", facts=list(_parity_facts(result)), markup=_parity_table(result)),
            Section("record", "Record", note=_record_note(result), markup=_record(result)),
        ],
        footer="Made by python -m harness report from the recorded files.",
    )


def is_unverified(result: Row) -> bool:
    """Whether figures were taken although parity was not proven."""
    return bool(result["parity"]) and not result["parity"].get("verified")


def banners(result: Row) -> Iterator[Banner]:
    """Yield what must not be missed: a failure, missing proof, emulated graphs, warnings."""
    error = result["error"] or {}
    if result["status"] == Status.RUNNING:
        yield Banner("Running", "This job has not ended; the page shows what it has recorded so far.")
    elif result["status"] != Status.OK:
        said = f"{error.get('kind')}: {error.get('message')}" if error else "no error was recorded"
        yield Banner(str(result["status"]), said, is_bad=True)
    if is_unverified(result):
        reason = result["parity"].get("reason") or f"{result['parity'].get('num_failed')} cases failed"
        yield Banner(
            "UNVERIFIED",
            f"Replay was not proven equal to eager ({reason}); do not rely on these figures.",
            is_bad=True,
        )
    if result["graph_backend"] == "emulated":
        yield Banner(
            "Emulated",
            "This machine has no CUDA: graphs were emulated, and no latency here is that of a CUDA graph.",
        )
    for warning in result["warnings"] or ():
        yield Banner("Warning", warning)


def _policy(result: Row) -> str:
    config = result["config"] or {}
    kind = (config.get("runner") or {}).get("kind")
    if kind == "eager":
        return "eager, no graphs"
    policy = (config.get("capture") or {}).get("policy") or "no capture list"
    padding = (config.get("padding") or {}).get("strategy")
    return f"capture={policy}" + (f", padding={padding}" if padding else "")


def _when(result: Row) -> str:
    environment = result["environment"] or {}
    device = (
        environment.get("device_name")
        or environment.get("cpu")
        or environment.get("device")
        or "unknown device"
    )
    return f"{device} · {result['started_at']}"


def _facts(job_dir: Path, result: Row, capture: Sequence[Row], sizes: Sequence[Row]) -> Iterator[Fact]:
    summary, workload = result["summary"] or {}, result["workload"] or {}
    yield Fact("status", str(result["status"]))
    sizes_captured = sorted(row["capture_size"] for row in capture)
    if sizes_captured:
        yield Fact("capture sizes", str(len(sizes_captured)), f"{sizes_captured[0]} to {sizes_captured[-1]}")
        num_bytes = graph_bytes(capture)
        seconds = capture_seconds(capture)
        yield Fact("graph memory", "–" if num_bytes is None else f"{num_bytes / _MIB:,.1f} MiB",
                   "not measured here" if num_bytes is None else "on the device")  # fmt: skip
        yield Fact(
            "capture", "–" if seconds is None else f"{seconds:.2f} s", "warm-up and compilation included"
        )
    yield from _step_facts(sizes)
    yield from (Fact(*fact) for fact in card_facts(sizes, result["workload"]))
    for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl")):
        if summary.get(f"median_{key}_ms") is not None:
            yield Fact(f"{name}, median", f"{number(summary[f'median_{key}_ms'])} ms",
                       f"p99 {number(summary.get(f'p99_{key}_ms'))} ms")  # fmt: skip
    if summary.get("output_throughput") is not None:
        completed = f"{summary.get('completed')} requests"
        yield Fact("output", f"{summary['output_throughput']:,.0f} tokens/s", completed)
    if workload.get("mode_shares"):
        shares = workload["mode_shares"]
        yield Fact("decode steps by graph", f"{shares.get('graph', 0) + shares.get('split', 0):.1%}",
                   ", ".join(f"{mode} {share:.1%}" for mode, share in shares.items()))  # fmt: skip
    if workload.get("padding_waste") is not None:
        yield Fact("padding", f"{workload['padding_waste']:.1%}", "of the rows decoded")
    share = None if (floor := workload_floor(result)) is None else read_steps(job_dir).floor_share(floor)
    if share is not None:
        yield Fact("roofline, workload", f"{share:.1%}", "of the decode steps is the floor")


def _step_facts(sizes: Sequence[Row]) -> Iterator[Fact]:
    """The largest batch: what graphs gain over eager there, and what the roofline leaves to gain."""
    timed = [row for row in sizes if row["step_ms_p50"] is not None]
    if not timed:
        return
    largest = max(row["batch_size"] for row in timed)
    at_largest = {row["mode"]: row for row in reversed(timed) if row["batch_size"] == largest}
    main = at_largest.get("graph") or next(iter(at_largest.values()))
    eager = at_largest.get("eager")
    gain = ""
    if eager is not None and main is not eager:
        gain = f"{eager['step_ms_p50'] / main['step_ms_p50']:.2f}× as fast as eager"
    yield Fact(f"step at batch {largest}", f"{number(main['step_ms_p50'])} ms", gain or main["mode"])
    if main["roofline_fraction"] is not None:
        yield Fact(
            f"roofline at batch {largest}", f"{main['roofline_fraction']:.1%}", "of the step is the floor"
        )


def _step_figures(job_dir: Path, result: Row, sizes: Sequence[Row]) -> Iterator[Figure]:
    if not any(row["step_ms_p50"] is not None for row in sizes):
        return
    yield step_time_figure(sizes, _median_errors(job_dir, sizes), _capture_sizes(result))
    parts = step_parts_figure(sizes)
    if parts is not None:
        yield parts


def _profile_figures(job_dir: Path, result: Row) -> Iterator[Figure]:
    rows = read_table(job_dir, "profile").to_pylist()
    if rows:
        yield profile_figure(rows, (result.get("profile") or {}).get("graphs") or ())


def _capture_sizes(result: Row) -> list[int]:
    return list((result["capture"] or {}).get("sizes") or ())


def _median_errors(job_dir: Path, sizes: Sequence[Row]) -> list[float | None]:
    """Half the 95% interval of each row's median as a share; None without its samples."""
    names = ("context_len", "batch_size", "padded_batch_size", "mode")
    table = read_table(job_dir, "samples")
    samples: dict[tuple[Any, ...], list[float]] = {}
    columns = (table[name].to_pylist() for name in (*names, "timing", "step_ms"))
    for *key, timing, step_ms in zip(*columns, strict=True):
        if timing != "back_to_back" and step_ms:
            samples.setdefault(tuple(key), []).append(step_ms)
    errors: list[float | None] = []
    for row in sizes:
        series = samples.get(tuple(row[name] for name in names), [])
        errors.append(_NORMAL_95 * median_error(np.array(series)).log_error if len(series) > 1 else None)
    return errors


def _workload_figures(job_dir: Path, result: Row) -> Iterator[Figure]:
    steps, requests = read_steps(job_dir), read_requests(job_dir)
    capture_sizes = _capture_sizes(result)
    figures = (
        timeline_figure(steps, capture_sizes),
        padding_figure(steps, capture_sizes),
        latency_figure(steps, requests, result["summary"] or {}),
    )
    yield from (figure for figure in figures if figure is not None)


def _parity_facts(result: Row) -> Iterator[Fact]:
    parity = result["parity"]
    if not parity or "num_cases" not in parity:
        return
    yield Fact("verified", "yes" if parity.get("verified") else "no", f"{parity['num_cases']} cases")
    for name, key in (("bitwise equal", "num_bitwise"), ("failed", "num_failed")):
        if parity.get(key) is not None:
            yield Fact(name, str(parity[key]))
    for name, key, note in (
        ("max abs error", "max_abs_error", "replay against eager, same padding"),
        ("unpadded max abs error", "unpadded_max_abs_error", "replay against eager without padding"),
        ("top-1 agreement", "top1_agreement", ""),
    ):
        if parity.get(key) is not None:
            yield Fact(name, f"{parity[key]:.3g}", note)


def _parity_table(result: Row) -> str:
    cases = (result["parity"] or {}).get("cases") or []
    if not cases:
        return ""
    heads = list(cases[0])
    rows = [[_cell(case.get(head)) for head in heads] for case in cases]
    return f"<details><summary>Cases</summary>{table_markup(Table(heads, rows))}</details>"


def _cell(value: Any) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, int | float | str) or value is None else json.dumps(value)


def _record_note(result: Row) -> str:
    return f"schema {result['schema_version']}, config hash {result['config_hash'] or '–'}"


def _record(result: Row) -> str:
    parts = (
        "config",
        "environment",
        "model",
        "memory",
        "size_sweep",
        "workload",
        "profile",
        "timings",
        "error",
    )
    return details_markup(
        (name.replace("_", " ").capitalize(), json.dumps(result[name], indent=2))
        for name in parts
        if result.get(name)
    )
