"""Charts of the size sweep: step time against batch size, and where a step goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.floor import floor_share
from harness.report.figure import MODE_COLOURS, Choice, Figure, Spec, Table, axis, bars, label, line

Row = Mapping[str, Any]
#: Rows of sizes.csv with half the 95% interval of their median as a share, if known.
Points = list[tuple[Row, float | None]]
#: A log axis is easier to read from this ratio of largest to smallest batch size on.
_MANY_OCTAVES = 16
_POWERS_OF_TWO: Spec = {"dtick": math.log10(2), "tickformat": "d"}
_PARTS = (
    ("host prepare", "var(--host)"),
    ("floor", "var(--floor-bar)"),
    ("device above the floor", "var(--device)"),
    ("rest", "var(--rest)"),
)


def step_time_figure(
    sizes: Sequence[Row], errors: Sequence[float | None], capture_sizes: Sequence[int]
) -> Figure:
    """Return step time against batch size: a line a mode, graphs as steps, and the roofline.

    Args:
        sizes: rows of sizes.csv.
        errors: for each of them half the 95% interval of the median as a share, or None.
        capture_sizes: drawn as ticks along the axis.
    """
    traces: list[Spec] = []
    choices: list[Choice] = []
    for context_len, series in _by_context(sizes, errors):
        first = len(traces)
        for (mode, is_in_force), points in series.items():
            points.sort(key=lambda point: int(point[0]["batch_size"]))
            traces += [
                _step_line(mode, is_in_force, points, capture_sizes),
                _step_points(mode, is_in_force, points),
            ]
        floor = {row["batch_size"]: row["roofline_ms"] for points in series.values() for row, _ in points}
        traces.append(_floor_line(floor))
        choices.append(Choice(f"{context_len} tokens", range(first, len(traces))))
    batch_sizes = [row["batch_size"] for row in sizes]
    return Figure(
        name="step-time",
        title="Step time against batch size",
        caption=f"Median time of one decode step, {_what_is_timed(sizes)}. Between two "
        "capture sizes (ticks on the axis) a graph runs padded to the larger one, hence the steps; a slope passes over "
        "sizes that were not measured. Bars: 95% "
        "interval of the median within this run. Open markers: a stopping condition was not met. Roofline: "
        "reading weights and cache once at the measured copy bandwidth; no step can be faster.",
        alt=_step_alt(sizes),
        traces=traces,
        layout={
            "xaxis": axis("batch size", **_POWERS_OF_TWO),
            "yaxis": axis("step, ms", range=[0, 1.12 * max(_drawn_ms(sizes))]),
            "shapes": [_tick(size) for size in capture_sizes],
        },
        table=_step_table(sizes, errors),
        log_axis=("logarithmic batch axis", "xaxis"),
        is_log=max(batch_sizes) >= _MANY_OCTAVES * min(batch_sizes),
        menu="context",
        choices=choices if len(choices) > 1 else (),
        height=440,
    )


def _what_is_timed(sizes: Sequence[Row]) -> str:
    if any(row.get("overlap") for row in sizes):
        return "two in flight: the pace, from the tokens of the step before to those of this one"
    return "from the call until the sampled tokens can be read"


def _drawn_ms(sizes: Sequence[Row]) -> list[float]:
    """The values that the chart must hold; an interval may leave it."""
    values = [row[name] for row in sizes for name in ("step_ms_p50", "roofline_ms")]
    return [value for value in values if value is not None]


def _by_context(
    sizes: Sequence[Row], errors: Sequence[float | None]
) -> Iterator[tuple[int, dict[tuple[str, bool], Points]]]:
    """Yield for each context length the points by mode. Of two rows of a mode and batch size the first
    is the plan in force, the second the smallest graph that fits."""
    for context_len in dict.fromkeys(row["context_len"] for row in sizes):
        series: dict[tuple[str, bool], Points] = {}
        seen = set()
        for row, error in zip(sizes, errors, strict=True):
            if row["context_len"] != context_len or row["step_ms_p50"] is None:
                continue
            key = (row["mode"], row["batch_size"])
            series.setdefault((row["mode"], key not in seen), []).append((row, error))
            seen.add(key)
        yield context_len, series


def _step_line(mode: str, is_in_force: bool, points: Points, capture_sizes: Sequence[int]) -> Spec:
    batch_sizes = [row["batch_size"] for row, _ in points]
    step_ms = [row["step_ms_p50"] for row, _ in points]
    if mode == "graph":
        batch_sizes, step_ms = graph_steps(batch_sizes, step_ms, capture_sizes)
    trace = line(_series_name(mode, is_in_force), _colour(mode), batch_sizes, step_ms)
    trace["line"] |= {} if is_in_force else {"dash": "dot"}
    return trace | {"mode": "lines", "hoverinfo": "skip", "legendgroup": trace["name"]}


def graph_steps(
    batch_sizes: Sequence[int], step_ms: Sequence[float], capture_sizes: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the points with a corner before each: all batches up to it replay the same graph.

    No corner where capture sizes lie between that were not measured: there the line is a guess.
    """
    x, y = [batch_sizes[0]], [step_ms[0]]
    for before, after, ms in zip(batch_sizes, batch_sizes[1:], step_ms[1:], strict=False):
        if not any(before < size < after for size in capture_sizes):
            x.append(before)
            y.append(ms)
        x.append(after)
        y.append(ms)
    return x, y


def _step_points(mode: str, is_in_force: bool, points: Points) -> Spec:
    rows = [row for row, _ in points]
    step_ms = [row["step_ms_p50"] for row in rows]
    name = _series_name(mode, is_in_force)
    trace = line(name, _colour(mode), [row["batch_size"] for row in rows], step_ms)
    trace["marker"]["symbol"] = ["circle-open" if row["unmet_condition"] else "circle" for row in rows]
    bars_ms = [ms * (error or 0.0) for ms, (_, error) in zip(step_ms, points, strict=True)]
    trace["error_y"] = {"type": "data", "array": bars_ms, "thickness": 1, "width": 2, "color": _colour(mode)}
    trace["text"] = [_step_hover(row, error) for row, error in points]
    trace["hovertemplate"] = "%{text}<extra>" + label(name) + "</extra>"
    return trace | {"mode": "markers", "legendgroup": name, "showlegend": False}


def _series_name(mode: str, is_in_force: bool) -> str:
    return mode if is_in_force else f"{mode}, smallest that fits"


def _colour(mode: str) -> str:
    return MODE_COLOURS.get(mode, "var(--compiled)")


def _step_hover(row: Row, error: float | None) -> str:
    spread = "" if error is None else f" ± {error:.1%}"
    lines = [
        f"batch {row['batch_size']}, padded to {row['padded_batch_size']}",
        f"p50 {row['step_ms_p50']:.4g} ms{spread}, p99 {row['step_ms_p99']:.4g} ms, {row['num_samples']} samples",
    ]
    if row["roofline_fraction"] is not None:
        lines.append(f"the roofline is {row['roofline_fraction']:.1%} of it")
    if row["unmet_condition"]:
        lines.append(label(row["unmet_condition"]))
    return "<br>".join(lines)


def _floor_line(floor: Mapping[int, float | None]) -> Spec:
    batch_sizes = sorted(floor)
    trace = line("roofline", "var(--floor)", batch_sizes, [floor[size] for size in batch_sizes])
    trace["mode"] = "lines"
    trace["line"]["dash"] = "dash"
    trace["hovertemplate"] = "batch %{x}: %{y:.4g} ms<extra>roofline</extra>"
    return trace


def _tick(capture_size: int) -> Spec:
    return {
        "type": "line", "x0": capture_size, "x1": capture_size, "yref": "paper", "y0": 0, "y1": 0.025,
        "line": {"color": "var(--graph)", "width": 1.5},
    }  # fmt: skip


def _step_alt(sizes: Sequence[Row]) -> str:
    said = []
    for mode in dict.fromkeys(row["mode"] for row in sizes):
        rows = sorted(
            (row for row in sizes if row["mode"] == mode and row["step_ms_p50"] is not None),
            key=lambda row: int(row["batch_size"]),
        )
        if rows:
            ends = [
                f"{row['step_ms_p50']:.3g} ms at batch {row['batch_size']}" for row in (rows[0], rows[-1])
            ]
            said.append(f"{mode} from {ends[0]} to {ends[1]}")
    return "Line chart of the median step time against the batch size: " + "; ".join(said) + "."


def _step_table(sizes: Sequence[Row], errors: Sequence[float | None]) -> Table:
    heads = (
        "batch size", "context", "mode", "padded to", "p50 ms", "± %", "p99 ms", "floor ms", "floor % of p50",
        "replay ms", "floor % of replay", "back to back ms", "floor % of back to back", "SM MHz", "W", "mJ a token",
        "samples", "discarded", "not met",
    )  # fmt: skip
    names = ("batch_size", "context_len", "mode", "padded_batch_size", "step_ms_p50")
    later = (
        "sm_clock_mhz",
        "power_w",
        "energy_mj_per_token",
        "num_samples",
        "num_discarded",
        "unmet_condition",
    )
    rows = [
        [
            *(row[name] for name in names),
            None if error is None else round(100 * error, 2),
            row["step_ms_p99"],
            row["roofline_ms"],
            _floor_percent(row, "step_ms_p50"),
            row["replay_ms_p50"],
            _floor_percent(row, "replay_ms_p50"),
            row["back_to_back_ms"],
            _floor_percent(row, "back_to_back_ms"),
            *(row[name] for name in later),
        ]
        for row, error in zip(sizes, errors, strict=True)
    ]
    return Table(heads, rows)


def _floor_percent(row: Row, latency: str) -> float | None:
    share = floor_share(row, latency)
    return None if share is None else 100 * share


def step_parts_figure(sizes: Sequence[Row]) -> Figure | None:
    """Return bars that split the median step into host prepare, device and rest; None if not timed."""
    rows = [row for row in _in_force(sizes) if _parts(row) is not None]
    if not rows:
        return None
    traces: list[Spec] = []
    choices: list[Choice] = []
    contexts = {row["context_len"] for row in rows}
    for context_len, mode in dict.fromkeys((row["context_len"], row["mode"]) for row in rows):
        chosen = [row for row in rows if (row["context_len"], row["mode"]) == (context_len, mode)]
        first = len(traces)
        traces += _part_bars(chosen)
        name = mode + (f", context {context_len}" if len(contexts) > 1 else "")
        choices.append(Choice(name, range(first, len(traces))))
    first_choice = choices[0].traces
    for index, trace in enumerate(traces):
        trace["visible"] = index in first_choice
    heads = ("batch size", "context", "mode", *(f"{name} ms" for name, _ in _PARTS), "step ms")
    return Figure(
        name="step-parts",
        title="Where the step goes",
        caption=f"Medians. {_what_is_prepared(rows)} Device: "
        "between two events around the graph (of an eager step: around its kernels, gaps between launches "
        "included), split at the roofline. Rest: launch, and reading the tokens.",
        alt="Stacked bars of the step time by batch size. " + _parts_alt(rows),
        traces=traces,
        layout={"xaxis": axis("batch size", type="category"), "yaxis": axis("step, ms")},
        table=Table(heads, [_part_row(row) for row in rows]),
        menu="mode",
        choices=choices,
    )


def _what_is_prepared(rows: Sequence[Row]) -> str:
    if any(row.get("overlap") for row in rows):
        return "Host prepare: what of it the device waited for; the rest is hidden behind the step before."
    return "Host prepare: copies, attention plan and padding on the CPU before the launch."


def _in_force(sizes: Sequence[Row]) -> list[Row]:
    first: dict[tuple[int, int, str], Row] = {}
    for row in sizes:
        first.setdefault((row["context_len"], row["batch_size"], row["mode"]), row)
    return list(first.values())


def _parts(row: Row) -> tuple[float, float, float, float] | None:
    """Return host prepare, floor, device above the floor and rest, in ms; they add up to the step.

    Medians of parts need not add up to the median of the whole; the rest takes the difference.
    """
    if row["step_ms_p50"] is None or row["replay_ms_p50"] is None or row["host_prepare_us_p50"] is None:
        return None
    host_us = row["host_exposed_us_p50"] if row.get("overlap") else row["host_prepare_us_p50"]
    host_ms, device_ms = (host_us or 0.0) / 1e3, row["replay_ms_p50"]
    floor_ms = min(row["roofline_ms"] or 0.0, device_ms)
    return host_ms, floor_ms, device_ms - floor_ms, max(0.0, row["step_ms_p50"] - host_ms - device_ms)


def _part_bars(rows: Sequence[Row]) -> list[Spec]:
    batch_sizes = [str(row["batch_size"]) for row in rows]
    parts = [_parts(row) or (0.0,) * 4 for row in rows]
    steps = [row["step_ms_p50"] for row in rows]
    traces = []
    for index, (name, colour) in enumerate(_PARTS):
        trace = bars(name, colour, batch_sizes, [part[index] for part in parts])
        shares = [part[index] / step for part, step in zip(parts, steps, strict=True)]
        trace["customdata"] = shares
        trace["hovertemplate"] = f"batch %{{x}}: %{{y:.4g}} ms, %{{customdata:.1%}}<extra>{name}</extra>"
        traces.append(trace)
    return traces


def _part_row(row: Row) -> list[object]:
    return [row["batch_size"], row["context_len"], row["mode"], *(_parts(row) or ()), row["step_ms_p50"]]


def _parts_alt(rows: Sequence[Row]) -> str:
    row = max(rows, key=lambda row: (row["mode"] == "graph", int(row["batch_size"])))
    host_ms, floor_ms, above_ms, rest_ms = _parts(row) or (0.0,) * 4
    return (
        f"At batch {row['batch_size']} ({row['mode']}): host prepare {host_ms:.3g} ms, floor {floor_ms:.3g} ms, "
        f"device above the floor {above_ms:.3g} ms, rest {rest_ms:.3g} ms."
    )
