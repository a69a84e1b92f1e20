"""Charts of the workload replay: padding waste, batch size and mode over time, latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.report.figure import MODE_COLOURS, Figure, Spec, Table, axis, bars, line, number
from harness.report.workload_rows import (
    MODES,
    Requests,
    Steps,
    binned_quantiles,
    inter_token_gaps,
    weighted_quantiles,
)

#: A million steps are drawn as this many stretches of time.
_MIN_BINS, _MAX_BINS = 24, 240
_STEPS_A_BIN = 8
_NUM_QUANTILES = 160
_REPLAYED = (MODES.index("graph"), MODES.index("split"))
_LATENCIES = (
    ("TTFT", "ttft", "var(--host)"),
    ("TPOT", "tpot", "var(--graph)"),
    ("ITL", "itl", "var(--split)"),
)


def padding_figure(steps: Steps, capture_sizes: Sequence[int]) -> Figure | None:
    """Return the histogram of the decode batch sizes, and how much of each is padding."""
    decode = steps.decode()
    if not len(decode):
        return None
    batch_sizes = np.unique(decode.batch_size)
    index = np.searchsorted(batch_sizes, decode.batch_size)
    by_mode = {
        mode: np.bincount(index[decode.mode == code], minlength=len(batch_sizes))
        for code, mode in enumerate(MODES)
    }
    is_replayed = np.isin(decode.mode, _REPLAYED)
    rows = np.bincount(index[is_replayed], decode.padded_batch_size[is_replayed], len(batch_sizes))
    real = np.bincount(index[is_replayed], decode.batch_size[is_replayed], len(batch_sizes))
    waste = np.divide(rows - real, rows, out=np.full(len(rows), np.nan), where=rows > 0)
    total = float((rows - real).sum() / rows.sum()) if rows.sum() else None
    traces = [
        bars(mode, MODE_COLOURS[mode], batch_sizes.tolist(), (100 * count / len(decode)).tolist())
        | {"hovertemplate": f"batch %{{x}}: %{{y:.3g}}% of the decode steps<extra>{mode}</extra>"}
        for mode, count in by_mode.items()
        if count.any()
    ]
    traces.append(
        bars("padding", "var(--eager)", batch_sizes.tolist(), (100 * waste).tolist())
        | {"yaxis": "y2", "showlegend": False,
           "hovertemplate": "batch %{x}: %{y:.3g}% of the rows replayed are padding<extra></extra>"}
    )  # fmt: skip
    said = (
        "no graph was replayed"
        if total is None
        else f"{total:.1%} of all rows that graphs replayed were padding"
    )
    return Figure(
        name="padding",
        title="Padding waste over the workload's batch sizes",
        caption=f"Above: how often each batch size was decoded, and how. Below: the share of padding among the rows "
        f"replayed at that batch size. Ticks on the axis: capture sizes. Altogether {said}.",
        alt=f"Histogram of {len(decode)} decode steps over batch sizes {batch_sizes[0]} to {batch_sizes[-1]}, and "
        f"the padding of each; {said}.",
        traces=traces,
        layout={
            "xaxis": axis("batch size", anchor="y2"),
            "yaxis": axis("% of decode steps", domain=[0.42, 1]),
            "yaxis2": axis("% padding", domain=[0, 0.32], rangemode="tozero"),
            "shapes": [_tick(size) for size in capture_sizes if size <= batch_sizes[-1] * 1.1],
        },
        table=_padding_table(batch_sizes, by_mode, rows, waste),
        height=460,
    )


def _tick(capture_size: int) -> Spec:
    return {
        "type": "line", "x0": capture_size, "x1": capture_size, "yref": "paper", "y0": 0.36, "y1": 0.39,
        "line": {"color": "var(--graph)", "width": 1.5},
    }  # fmt: skip


def _padding_table(batch_sizes: Any, by_mode: Mapping[str, Any], rows: Any, waste: Any) -> Table:
    modes = [mode for mode, count in by_mode.items() if count.any()]
    heads = ("batch size", *(f"{mode} steps" for mode in modes), "rows replayed", "padding %")
    return Table(
        heads,
        [
            [int(size), *(int(by_mode[mode][i]) for mode in modes), int(rows[i]), float(100 * waste[i])]
            for i, size in enumerate(batch_sizes)
        ],
    )


def timeline_figure(steps: Steps, capture_sizes: Sequence[int]) -> Figure | None:
    """Return batch size and modes over the virtual clock, in a few hundred stretches of time."""
    if not len(steps):
        return None
    edges_ms = np.linspace(0, float(steps.clock_ms.max()) or 1.0, 1 + _num_bins(len(steps)))
    time_s = ((edges_ms[1:] + edges_ms[:-1]) / 2e3).tolist()
    end_s, width_s = float(edges_ms[-1]) / 1e3, float(edges_ms[1]) / 1e3
    median = _batch_quantiles(steps.decode(), edges_ms)
    shares = {mode: busy_share(steps, code, edges_ms) for code, mode in enumerate(MODES)}
    shares = {mode: share for mode, share in shares.items() if share.any()}
    traces = _batch_band(median, time_s, end_s, capture_sizes)
    traces += [
        bars(mode, MODE_COLOURS[mode], time_s, (100 * share).tolist())
        | {
            "yaxis": "y2",
            "width": width_s,
            "hovertemplate": f"%{{x:.4g}} s: %{{y:.3g}}%<extra>{mode}</extra>",
        }
        for mode, share in shares.items()
    ]
    return Figure(
        name="timeline",
        title="Batch size and mode over time",
        caption=f"Along the workload's own clock, in stretches of {width_s:.3g} s. Above: the decode batch, its "
        "median and the middle 80%; the dashed line is the largest capture size. Below: how each stretch was "
        "spent, idle time left blank.",
        alt=f"Time line over {end_s:.4g} s: the median decode batch of a stretch lies between "
        f"{_least(median[1])} and {_most(median[1])}; time was spent in {', '.join(shares) or 'nothing'}.",
        traces=traces,
        layout={
            "xaxis": axis("s", anchor="y2", range=[0, end_s]),
            "yaxis": axis("batch size", domain=[0.47, 1], rangemode="tozero"),
            "yaxis2": axis("% of time", domain=[0, 0.37], range=[0, 100]),
            "bargap": 0,
        },
        table=_timeline_table(time_s, median[1], shares),
        height=460,
    )


def _num_bins(num_steps: int) -> int:
    return min(_MAX_BINS, max(_MIN_BINS, num_steps // _STEPS_A_BIN))


def _batch_quantiles(decode: Steps, edges_ms: Any) -> Any:
    """Return the 10%, 50% and 90% decode batch of each stretch, `[3, num_bins]`; NaN where none ended."""
    num_bins = len(edges_ms) - 1
    if not len(decode):
        return np.full((3, num_bins), np.nan)
    bin_of = np.clip(np.searchsorted(edges_ms, decode.clock_ms, side="left") - 1, 0, num_bins - 1)
    return binned_quantiles(decode.batch_size, bin_of, num_bins, (0.1, 0.5, 0.9))


def _batch_band(
    quantiles: Any, time_s: list[float], end_s: float, capture_sizes: Sequence[int]
) -> list[Spec]:
    known = ~np.isnan(quantiles[1])
    low, median, high = (values[known].tolist() for values in quantiles)
    known_s = np.array(time_s)[known].tolist()
    edge: Spec = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
    traces = [
        line("10%", "rgba(0,0,0,0)", known_s, low) | edge,
        line("90%", "rgba(0,0,0,0)", known_s, high) | edge | {"fill": "tonexty", "fillcolor": "var(--band)"},
        line("decode batch, median", "var(--graph)", known_s, median)
        | {"mode": "lines", "hovertemplate": "%{x:.4g} s: batch %{y}<extra></extra>"},
    ]
    if capture_sizes:
        largest = max(capture_sizes)
        ceiling = line("largest capture size", "var(--soft)", [0, end_s], [largest, largest])
        ceiling["line"] |= {"dash": "dash", "width": 1.5}
        traces.append(
            ceiling | {"mode": "lines", "hovertemplate": "largest capture size: %{y}<extra></extra>"}
        )
    return traces


def busy_share(steps: Steps, code: int, edges_ms: Any) -> Any:
    """Return the share of each stretch between `edges_ms` spent in steps of a mode; a step over an edge
    counts on both sides of it."""
    chosen = steps.mode == code
    ends = steps.clock_ms[chosen]
    lengths = np.nan_to_num(steps.step_ms[chosen])
    before = np.concatenate([[0.0], np.cumsum(lengths)])
    running = np.searchsorted(ends, edges_ms, side="right")
    inside = np.minimum(running, len(ends) - 1) if len(ends) else running
    partly = np.zeros(len(edges_ms))
    is_running = running < len(ends)
    partly[is_running] = (
        np.clip(edges_ms - (ends - lengths)[inside], 0, lengths[inside])[is_running] if len(ends) else 0
    )
    return np.clip(np.diff(before[running] + partly) / np.diff(edges_ms), 0, 1)


def _timeline_table(time_s: list[float], median: Any, shares: Mapping[str, Any]) -> Table:
    heads = ("s", "decode batch", *(f"{mode} %" for mode in shares))
    rows = [
        [time, float(median[i]), *(float(100 * share[i]) for share in shares.values())]
        for i, time in enumerate(time_s)
        if not np.isnan(median[i]) or any(share[i] for share in shares.values())
    ]
    return Table(heads, rows[:: -(-len(rows) // 100) or 1])


def _least(values: Any) -> str:
    return "-" if np.isnan(values).all() else f"{np.nanmin(values):.0f}"


def _most(values: Any) -> str:
    return "-" if np.isnan(values).all() else f"{np.nanmax(values):.0f}"


def latency_figure(steps: Steps, requests: Requests, summary: Mapping[str, Any]) -> Figure | None:
    """Return the distributions of TTFT, TPOT and ITL as the share of values at or below a latency."""
    if not len(requests):
        return None
    ones = np.ones(len(requests), dtype=np.int64)
    has_tpot = ~np.isnan(requests.tpot_ms)
    gaps, weights = inter_token_gaps(steps, requests)
    samples = {
        "ttft": (requests.ttft_ms, ones),
        "tpot": (requests.tpot_ms[has_tpot], ones[has_tpot]),
        "itl": (gaps, weights),
    }
    shares = np.unique(
        np.concatenate([np.linspace(0.002, 0.98, _NUM_QUANTILES - 20), np.linspace(0.98, 1, 20)])
    )
    traces = []
    for name, key, colour in _LATENCIES:
        values, weight = samples[key]
        if weight.sum():
            curve = weighted_quantiles(values, weight, shares)
            traces.append(
                line(name, colour, curve.tolist(), (100 * shares).tolist())
                | {
                    "mode": "lines",
                    "hovertemplate": f"%{{y:.3g}}% at or below %{{x:.4g}} ms<extra>{name}</extra>",
                }
            )
    num_preempted = int((requests.num_preemptions > 0).sum())
    preempted = (
        f" {num_preempted} requests were preempted; the pauses this caused are not in the ITL curve."
        * bool(num_preempted)
    )
    return Figure(
        name="latency",
        title="TTFT, TPOT and ITL",
        caption="Share of requests (TTFT, TPOT) and of gaps between tokens (ITL) at or below a latency, by the "
        f"definitions of vllm bench serve.{preempted}",
        alt="Cumulative distributions. " + _latency_alt(summary),
        traces=traces,
        layout={
            "xaxis": axis("ms", tickvals=[digit * 10.0**power for power in range(-3, 7) for digit in (1, 3)]),
            "yaxis": axis("% at or below", range=[0, 101]),
            "hovermode": "closest",
        },
        table=_latency_table(summary),
        log_axis=("logarithmic time axis", "xaxis"),
        is_log=True,
    )


def _latency_alt(summary: Mapping[str, Any]) -> str:
    said = [
        f"{name}: median {number(summary[f'median_{key}_ms'])} ms, p99 {number(summary[f'p99_{key}_ms'])} ms"
        for name, key, _ in _LATENCIES
        if summary.get(f"median_{key}_ms") is not None and summary.get(f"p99_{key}_ms") is not None
    ]
    return "; ".join(said) + "."


def _latency_table(summary: Mapping[str, Any]) -> Table:
    statistics = ("mean", "median", "std", "p99")
    names = (*((name, key) for name, key, _ in _LATENCIES), ("E2EL", "e2el"))
    rows = [
        [name, *(summary.get(f"{statistic}_{key}_ms") for statistic in statistics)] for name, key in names
    ]
    return Table(("", *(f"{statistic} ms" for statistic in statistics)), rows)
