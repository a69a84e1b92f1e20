"""The last tables on the terminal, read from the recorded files alone."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.card_facts import card_facts
from harness.floor import Floor, workload_floor
from harness.next_step import next_command
from harness.profile_view import main_graph, shape_line, short_name
from harness.record import Status
from harness.record_reader import read_bench_serve, read_result, read_stream, read_table
from harness.terminal import open_console
from harness.tracking_content import MEMORY_CLASSES, recorded_files
from harness.workload_shares import mode_shares, padding_waste

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_MAX_ROWS = 16
_WIDTH = 100
_TOP_KERNELS = 8
_UNMET = "!"
_MIB = 1024**2
_LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2EL", "e2el"))

Row = Mapping[str, Any]


def print_summary(job_dir: str | Path, console: Console | None = None) -> None:
    """Print what a job found, on stdout unless another console is given."""
    from rich.text import Text

    console = console or open_console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for part in summary_parts(Path(job_dir)):
        console.print(part, soft_wrap=isinstance(part, Text))


def summary_text(job_dir: str | Path, width: int = _WIDTH) -> str:
    """Return the same as plain text, `width` characters wide."""
    from rich.console import Console

    text = io.StringIO()
    print_summary(job_dir, Console(file=text, width=width, highlight=False, color_system=None))
    return text.getvalue()


def summary_parts(job_dir: Path) -> Iterator[RenderableType]:
    """Yield the summary from the top: verdict, captures, batch sizes, workload, files, next command."""
    result = read_result(job_dir)
    unit = _Unit(result["graph_backend"])
    yield from _verdict(job_dir, result)
    yield from _capture_table(read_table(job_dir, "capture").to_pylist(), unit)
    yield from _compilation(result)
    sizes = read_table(job_dir, "sizes").to_pylist()
    yield from _sizes_table(sizes, unit)
    yield from _workload_tables(job_dir, unit, workload_floor(result))
    yield from _card_line(sizes, result["workload"])
    yield from _profile_table(read_table(job_dir, "profile").to_pylist(), result.get("profile"), unit)
    yield from _ending(job_dir, result)


class _Unit:
    """Writes the unit of a latency, with `emulated` where no CUDA graph was behind it."""

    def __init__(self, graph_backend: str | None) -> None:
        self._is_emulated = graph_backend == "emulated"

    def __call__(self, unit: str) -> str:
        return f"{unit}\nemulated" if self._is_emulated else unit

    def in_line(self, text: str) -> str:
        return f"{text} (emulated)" if self._is_emulated else text


def _verdict(job_dir: Path, result: Row) -> Iterator[RenderableType]:
    from rich.text import Text

    error, parity = result["error"], result["parity"]
    yield Text(
        f"\n{job_dir}: {result['status']}",
        style="bold green" if result["status"] == Status.OK else "bold red",
    )
    if error:
        yield Text(f"{error['kind']}: {error['message']}")
    if parity and not parity.get("verified"):
        yield Text(
            "UNVERIFIED: replay was not proven equal to eager; do not rely on these figures", style="bold red"
        )
    elif parity and not parity.get("num_cases"):
        yield Text("parity: no graphs, nothing to prove: an eager job is its own reference")
    elif parity:
        error_text = _number(parity.get("max_abs_error"), ".3g")
        num_cases = parity["num_cases"]
        cases = "1 case" if num_cases == 1 else f"{num_cases} cases"
        yield Text(f"parity: replay equals eager in {cases}, max abs error {error_text}")
    if result["graph_backend"] == "emulated":
        yield Text(
            "no CUDA here: graphs are emulated, and no latency below is that of a CUDA graph", style="yellow"
        )


def _capture_table(rows: list[Row], unit: _Unit) -> Iterator[RenderableType]:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["capture_size"])
    memory = [name for name in MEMORY_CLASSES if any(row[name] is not None for row in rows)]
    heads = [name.removesuffix("_bytes") + "\nMiB" for name in memory]
    compile_heads = ["compile\ns"] if any(row["compiled"] for row in rows) else []
    first = ["capture\nsize", *compile_heads, f"capture\n{unit('s')}"]
    table = _table("Capture sizes", [*first, *heads, "nodes"])
    for row in _thinned(rows):
        compile_s = [_number(row["compile_s"], ".2f") for _ in compile_heads]
        mib = [_number(None if row[name] is None else row[name] / _MIB, ".2f") for name in memory]
        seconds = [*compile_s, _number(row["capture_s"], ".3f")]
        table.add_row(str(row["capture_size"]), *seconds, *mib, _number(row["num_nodes"], "d"))
    yield from _with_note(table, rows, "capture.csv")


def _compilation(result: Row) -> Iterator[RenderableType]:
    """What torch.compile did after warm-up; a count that is not 0 stands among the warnings too."""
    from rich.text import Text

    counts = (result["capture"] or {}).get("compile_counts")
    if counts is None:
        return
    what = "recompiles", "graph_breaks", "recompile_limit_hits", "uncompiled_layers"
    found = ", ".join(f"{counts[f'num_{name}']} {name.replace('_', ' ')}" for name in what)
    yield Text(f"torch.compile: {counts['num_graphs']} graphs in warm-up; {found}")


def _sizes_table(rows: list[Row], unit: _Unit) -> Iterator[RenderableType]:
    """A line a batch size and context length, a column a mode."""
    from rich.text import Text

    if not rows:
        return
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    points: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:
        points.setdefault((row["context_len"], row["batch_size"]), {}).setdefault(row["mode"], row)
    heads = [head for mode in modes for head in (f"{mode}\np50 {unit('ms')}", f"floor\n{unit('share')}")]
    first = ["batch\nsize", "context", "padded\nto"]
    last = ["rel\nstd", f"host prepare\n{unit('us')}"]
    table = _table("Batch sizes", [*first, *heads, *last])
    for (context_len, batch_size), by_mode in _thinned(sorted(points.items())):
        main = by_mode[modes[0]] if modes[0] in by_mode else next(iter(by_mode.values()))
        table.add_row(
            str(batch_size),
            str(context_len),
            _number(main["padded_batch_size"], "d"),
            *(cell for mode in modes for cell in _step_cells(by_mode.get(mode))),
            _number(main["rel_std"], ".1%"),
            _number(main["host_prepare_us_p50"], ".0f"),
        )
    yield from _with_note(table, list(points), "sizes.csv")
    if any(row["unmet_condition"] for row in rows):
        yield Text(f"{_UNMET} a stopping condition was not met: see unmet_condition in sizes.csv")


def _step_cells(row: Row | None) -> tuple[str, str]:
    """The step time, and the floor's share of it."""
    if row is None:
        return "-", "-"
    mark = f" {_UNMET}" if row["unmet_condition"] else "  "
    return _number(row["step_ms_p50"], ".3f") + mark, _number(row["roofline_fraction"], ".1%")


def _workload_tables(job_dir: Path, unit: _Unit, floor: Floor | None) -> Iterator[RenderableType]:
    from rich.text import Text

    steps = read_stream(job_dir, "steps")
    if len(steps):
        table = _table(
            "Decode steps",
            ["mode", "reason", "mean\nbatch", "steps", "of steps",
             *(f"{name}\n{unit('share')}" for name in ("of time", "floor"))],
        )  # fmt: skip
        for share in mode_shares(steps, floor):
            time_share = _number(share.time_share, ".1%")
            mean_batch = _number(share.mean_batch_size, ".1f")
            table.add_row(
                *(share.mode, share.reason, mean_batch, str(share.num_steps), f"{share.share:.1%}"),
                *(time_share, _number(share.floor_share, ".1%")),
            )
        yield table
        waste = _number(padding_waste(steps), ".1%")
        yield Text(f"padding waste: {waste} of the rows that graphs replayed")
    summary = read_bench_serve(job_dir)
    if summary:
        yield _latency_table(summary, unit)
        rate = (
            _number(summary.get("request_throughput"), ".2f"),
            _number(summary.get("output_throughput"), ".1f"),
        )
        throughput = f"{rate[0]} requests/s, {rate[1]} output tokens/s"
        yield Text(f"{summary.get('completed')} requests completed: {unit.in_line(throughput)}")


def _latency_table(summary: Row, unit: _Unit) -> Table:
    table = _table("Latencies", ["", *(f"{name}\n{unit('ms')}" for name in ("mean", "median", "p99"))])
    for label, key in _LATENCIES:
        values = [summary.get(f"{name}_{key}_ms") for name in ("mean", "median", "p99")]
        if any(value is not None for value in values):
            table.add_row(label, *(_number(value, ".2f") for value in values))
    return table


def _card_line(sizes: Sequence[Row], workload: Row | None) -> Iterator[RenderableType]:
    from rich.text import Text

    facts = [f"{fact.name} {fact.value} ({fact.note})" for fact in card_facts(sizes, workload)]
    if facts:
        yield Text("card: " + "; ".join(facts))


def _profile_table(rows: list[Row], profile: Row | None, unit: _Unit) -> Iterator[RenderableType]:
    """The longest kernels of the largest graph (without CUDA, operators), and the gaps between them."""
    from rich.text import Text

    shape = main_graph((profile or {}).get("graphs") or ())
    if shape is None:
        return
    chosen = [row for row in rows if all(row[name] == shape[name] for name in ("batch_size", "mode"))]
    title = f"Where the {chosen[0]['kind']}s of a step at batch {shape['batch_size']} ({shape['mode']}) go"
    table = _table(title, ["", "calls\na step", f"a step\n{unit('us')}", "share"])
    for row in chosen[:_TOP_KERNELS]:
        table.add_row(
            short_name(row["name"], 56),
            *(_number(row["num_calls"], ".0f"), _number(row["time_us"], ".1f"), _number(row["share"], ".1%")),
        )
    yield table
    if len(chosen) > _TOP_KERNELS:
        yield Text(f"{_TOP_KERNELS} of {len(chosen)} names; all are in profile.csv")
    if shape["num_kernels"] is not None:
        yield Text(shape_line(shape))


def _ending(job_dir: Path, result: Row) -> Iterator[RenderableType]:
    from rich.text import Text

    for warning in result["warnings"]:
        yield Text(f"warning: {warning}", style="yellow")
    names = ["result.json", *(path.relative_to(job_dir).as_posix() for path in recorded_files(job_dir))]
    yield Text(f"files: {job_dir}/ {', '.join(names)}")
    wandb = result["wandb"] or {}
    if wandb.get("status") == "ok":
        yield Text(f"W&B ({wandb.get('mode')}): {wandb.get('dir')}")
    elif wandb.get("status") == "failed":
        yield Text(f"W&B failed, the record is complete: {wandb.get('reason')}", style="yellow")
    command, reason = next_command(result, read_stream(job_dir, "steps"))
    yield Text(f"next: {command}\n      ({reason})\n")


def _table(title: str, heads: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False
    )
    for head in heads:
        is_text = head in ("mode", "reason", "")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    return table


def _thinned(rows: Sequence[Any]) -> list[Any]:
    """At most `_MAX_ROWS` rows, evenly, the first and the last always."""
    if len(rows) <= _MAX_ROWS:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (_MAX_ROWS - 1))] for i in range(_MAX_ROWS)]


def _with_note(table: Table, rows: Sequence[Any], file_name: str) -> Iterator[RenderableType]:
    from rich.text import Text

    yield table
    if len(rows) > _MAX_ROWS:
        yield Text(f"{_MAX_ROWS} of {len(rows)} rows; all are in {file_name}")


def _number(value: float | None, form: str) -> str:
    """What was not measured is a dash."""
    return "-" if value is None else format(value, form)
