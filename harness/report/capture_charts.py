"""The chart of what each captured size costs: memory by class, and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.figure import Figure, Spec, Table, axis, bars, number

Row = Mapping[str, Any]
_MIB = 1024**2
_MEMORY = (
    ("pool_bytes", "graph pool", "var(--pool)"),
    ("torch_bytes", "other torch", "var(--torch)"),
    ("device_bytes", "device, unknown to torch", "var(--gone)"),
    ("pinned_bytes", "pinned host", "var(--pinned)"),
)
_SECONDS = (
    ("compile_s", "compile", "var(--floor)"),
    ("warmup_s", "warm-up", "var(--host)"),
    ("capture_s", "capture", "var(--compiled)"),
)
#: Graphs hold these on the device.
DEVICE_CLASSES = ("pool_bytes", "torch_bytes", "device_bytes")


def capture_figure(capture: Sequence[Row]) -> Figure:
    """Return memory and seconds added by each captured size, smallest size first."""
    rows = sorted(capture, key=lambda row: int(row["capture_size"]))
    sizes = [str(row["capture_size"]) for row in rows]
    memory = _measured(rows, _MEMORY)
    traces = [_bars(column, name, colour, rows, 1 / _MIB, "MiB", "y") for column, name, colour in memory]
    seconds_domain = [0, 0.44] if memory else [0, 1]
    traces += [
        _bars(column, name, colour, rows, 1, "s", "y2") for column, name, colour in _measured(rows, _SECONDS)
    ]
    return Figure(
        name="capture",
        title="Memory and seconds by capture size",
        caption="What each size added. Sizes are captured largest first, so the largest carries the one-off costs "
        f"and the others share its memory pool. T{_totals(rows)[1:]}. " + _missing(rows),
        alt=f"Two bar charts over {len(rows)} capture sizes, {sizes[0]} to {sizes[-1]}: {_totals(rows)}.",
        traces=traces,
        layout={
            "xaxis": axis(
                "capture size", type="category", categoryorder="array", categoryarray=sizes, anchor="y2"
            ),
            **({"yaxis": axis("MiB", domain=[0.56, 1])} if memory else {}),
            "yaxis2": axis("s", domain=seconds_domain),
        },
        table=_table(rows),
        height=460 if memory else 320,
    )


def graph_bytes(capture: Sequence[Row]) -> int | None:
    """Return the device memory of all graphs together; None if no class of it was measured."""
    values = [row[name] for row in capture for name in DEVICE_CLASSES if row[name] is not None]
    return sum(values) if values else None


def capture_seconds(capture: Sequence[Row]) -> float | None:
    """Return the seconds of all captures, warm-up and compilation included."""
    values = [row[name] for row in capture for name, _, _ in _SECONDS if row[name] is not None]
    return sum(values) if values else None


def _measured(rows: Sequence[Row], classes: tuple[tuple[str, str, str], ...]) -> list[tuple[str, str, str]]:
    return [entry for entry in classes if any(row[entry[0]] is not None for row in rows)]


def _bars(
    column: str, name: str, colour: str, rows: Sequence[Row], scale: float, unit: str, axis_name: str
) -> Spec:
    values = [None if row[column] is None else row[column] * scale for row in rows]
    return bars(name, colour, [str(row["capture_size"]) for row in rows], values) | {
        "yaxis": axis_name,
        "hovertemplate": f"size %{{x}}: %{{y:.4g}} {unit}<extra>{name}</extra>",
    }


def _missing(rows: Sequence[Row]) -> str:
    missing = [name for column, name, _ in _MEMORY if all(row[column] is None for row in rows)]
    return f"Not measured here: {', '.join(missing)}." if missing else ""


def _totals(rows: Sequence[Row]) -> str:
    num_bytes, seconds = graph_bytes(rows), capture_seconds(rows)
    memory = (
        "device memory was not measured"
        if num_bytes is None
        else f"{number(num_bytes / _MIB)} MiB on the device"
    )
    return f"together {memory} and {number(seconds, 3)} s"


def _table(rows: Sequence[Row]) -> Table:
    memory = [f"{name} MiB" for _, name, _ in _MEMORY]
    heads = ("capture size", *memory, *(f"{name} s" for _, name, _ in _SECONDS), "nodes")
    return Table(
        heads,
        [
            [
                row["capture_size"],
                *(None if row[column] is None else row[column] / _MIB for column, _, _ in _MEMORY),
                *(row[column] for column, _, _ in _SECONDS),
                row["num_nodes"],
            ]
            for row in rows
        ],
    )
