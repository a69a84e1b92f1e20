"""Plans, simulations and verifications on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from harness.planner.export import EngineFlags
    from harness.planner.halves import HalfSize
    from harness.planner.honesty import Comparison
    from harness.planner.plan import Judged, Plan
    from harness.planner.verify import Verification

_MIB = 1024**2
_REASONS = {
    "no_slower": "no slower",
    "slower": "slower",
    "within_noise": "within noise",
    "not_measured": "not measured",
    "too_little_traffic": "too little traffic",
    "same_list": "no list has fewer graphs",
}

HALVES_COLUMNS = (
    "engine",
    "graphs",
    "step ms",
    "half",
    "step ms",
    "half's gain [95%]",
    "regret",
    "hindsight",
    "verdict",
)
HALVES_NOTE = (
    "hindsight: the gain of the best list of as many graphs, had this part of the traffic been known. "
    "For a half list as the plan, flags and all: --default ENGINE --max-graphs GRAPHS/2"
)


def print_plan(console: Console, plan: Plan, knows_memory: bool, kv_page_bytes: int | None) -> None:
    """The verdicts first, then the lists side by side, then what half as many graphs would do."""
    for line in [*verdict_lines(plan), *half_lines(plan)]:
        console.print(line, highlight=False)
    console.print(_judged_table(plan, knows_memory, kv_page_bytes))
    console.print(_halves_table(plan))
    console.print(HALVES_NOTE, highlight=False)
    for line in _fit_lines(plan):
        console.print(line, highlight=False)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)


def verdict_lines(plan: Plan) -> list[str]:
    """The decision in one sentence, the list, and what it saves where it is no faster."""
    comparison, default = plan.default.against, plan.default
    sizes = " ".join(map(str, plan.choice.sizes))
    if plan.is_recommended:
        verdict = f"use the plan: {gain_text(comparison)} faster than {default.name}"
    elif comparison is not None and comparison.interval is not None:
        verdict = f"keep the default ({default.name}): a gain of {gain_text(comparison)} is within noise"
        if not comparison.is_measured:
            verdict = (
                f"keep the default ({default.name}): {comparison.beyond_share:.0%} of the decode steps have more KV "
                "tokens than were measured"
            )
        elif comparison.is_worse:
            verdict = f"keep the default ({default.name}): the plan is slower, gain {gain_text(comparison)}"
    else:
        verdict = f"keep the default ({default.name}): too little traffic to judge a plan on"
    lines = [verdict, f"planned list ({plan.choice.num_graphs} graphs): {sizes}"]
    fewer = len(default.sizes) - plan.choice.num_graphs
    is_no_slower = comparison is not None and comparison.is_measured and not comparison.is_worse
    if not plan.is_recommended and is_no_slower and fewer > 0:
        lines.append(
            f"the plan is no slower with {fewer} graphs fewer: worth it where graph memory or start-up time matters"
        )
    return lines


def halves_title(plan: Plan) -> str:
    within = "" if plan.budget.is_unlimited else " and within the budget"
    return f"At most half of an engine's graphs{within}, held-out part"


def half_lines(plan: Plan) -> list[str]:
    """For which engines' lists at most half of the graphs do as well, and for which not."""
    adopted = [row.engine.name for row in plan.halves if row.is_adopted]
    kept = [row.engine.name for row in plan.halves if not row.is_adopted]
    verdicts = (("adopt it in place of the list of", adopted), ("keep the list of", kept))
    return [f"at most half the graphs: {word} {', '.join(names)}" for word, names in verdicts if names]


def half_cells(row: HalfSize) -> tuple[str, ...]:
    """An engine's list beside its half, in the order of `HALVES_COLUMNS`."""
    return (
        row.engine.name,
        str(len(row.engine.sizes)),
        _number(row.engine.step_ms, 3),
        str(len(row.half.sizes)),
        _number(row.half.step_ms, 3),
        gain_text(row.comparison),
        "-" if row.regret is None else f"{row.regret:.2%}",
        "-" if row.hindsight_gain is None else f"{row.hindsight_gain:+.2%}",
        f"{'adopt' if row.is_adopted else 'keep the default'}: {_REASONS[row.reason]}",
    )


def gain_text(comparison: Comparison | None) -> str:
    if comparison is None:
        return "-"
    if comparison.interval is None:
        return f"{comparison.gain:+.2%}"
    low, high = comparison.interval
    return f"{comparison.gain:+.2%} [{low:+.2%}, {high:+.2%}]"


def _judged_table(plan: Plan, knows_memory: bool, kv_page_bytes: int | None) -> Table:
    table = Table(title="Held-out part of the traffic", title_justify="left")
    columns = [
        "list",
        "graphs",
        "step ms",
        "plan's gain [95%]",
        "TPOT ms",
        "waste",
        "MiB",
        "KV pages",
        "capture s",
    ]
    for name in columns:
        table.add_column(name, justify="left" if name == "list" else "right")
    for row in _unique((plan.plan, plan.default, *plan.engines)):
        simulation = row.traffic.simulation
        tpot_ms = simulation.latency_ms["tpot"]["mean"] if simulation else None
        table.add_row(
            row.name,
            str(len(row.sizes)),
            _number(row.step_ms, 3),
            gain_text(row.against),
            _number(tpot_ms, 2),
            _share(simulation.padding_waste() if simulation else None),
            _number(row.device_bytes / _MIB if knows_memory else None, 0),
            _number(row.device_bytes / kv_page_bytes if knows_memory and kv_page_bytes else None, 0),
            _number(row.seconds if row.seconds else None, 1),
        )
    return table


def _halves_table(plan: Plan) -> Table:
    table = Table(title=halves_title(plan), title_justify="left")
    for name in HALVES_COLUMNS:
        table.add_column(name, justify="left" if name in ("engine", "verdict") else "right")
    for row in plan.halves:
        table.add_row(*half_cells(row))
    return table


def _fit_lines(plan: Plan) -> Iterable[str]:
    if plan.hindsight_step_ms and plan.plan.step_ms:
        regret = plan.plan.step_ms / plan.hindsight_step_ms - 1
        yield f"regret against the best list of as many graphs in hindsight: {regret:.2%}"
    slack = plan.slack
    if slack.worst_regret is not None:
        yield f"slack for drift: {slack.share:.1%} of the weight; worst window left out regrets {slack.worst_regret:.2%}"
    state = "reached" if plan.converged else "not reached, the fastest of the cycle is taken"
    yield f"fixed point of list and batches: {state} after {len(plan.rounds)} rounds"
    if plan.choice.gap:
        yield f"the search was cut short: the list is within {plan.choice.gap:.3%} of the best"


def _unique(rows: Sequence[Judged]) -> Iterable[Judged]:
    """The default is one of the engines' lists most of the time: show it once."""
    seen: set[str] = set()
    for row in rows:
        if row.name not in seen:
            seen.add(row.name)
            yield row


def print_simulation(console: Console, result: dict[str, Any]) -> None:
    console.print(f"list: {' '.join(map(str, result['sizes']))}", highlight=False)
    table = Table(show_header=False, title="Simulated replay", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in result.items():
        if name in ("sizes", "batch_size_steps"):
            continue
        if name == "mode_shares":
            for mode, share in value.items():
                table.add_row(f"share of {mode} steps", _share(share))
        else:
            table.add_row(name, _number(value, 3) if isinstance(value, float) else str(value))
    console.print(table)


def print_verification(console: Console, verification: Verification) -> None:
    table = Table(
        title=f"Prediction and measurement, {verification.num_requests} requests", title_justify="left"
    )
    for name in ("", "predicted", "measured", "apart", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    for row in verification.rows:
        mark = "" if not row.counts else "ok" if row.is_within else "beyond 5%"
        text = _share if row.is_share else lambda value: _number(value, 3)
        apart = "-" if row.deviation is None else f"{row.deviation:+.2%}"
        table.add_row(row.name, text(row.predicted), text(row.measured), apart, mark)
    console.print(table)
    if verification.kinds:
        console.print(_kinds_table(verification))
    for note in verification.notes:
        console.print(note, highlight=False)


def _kinds_table(verification: Verification) -> Table:
    table = Table(title="Steps by kind, on the batches that ran", title_justify="left")
    for name in ("", "steps", "predicted ms", "measured ms", "apart", "share of the time"):
        table.add_column(name, justify="left" if name == "" else "right")
    total_ms = sum(kind.num_steps * kind.measured_ms for kind in verification.kinds)
    for kind in verification.kinds:
        table.add_row(
            kind.name,
            str(kind.num_steps),
            _number(kind.predicted_ms, 3),
            _number(kind.measured_ms, 3),
            f"{kind.deviation:+.1%}",
            _share(kind.num_steps * kind.measured_ms / total_ms),
        )
    return table


def print_flags(console: Console, flags: Iterable[EngineFlags]) -> None:
    for engine in flags:
        console.print(f"{engine.engine} ({engine.checked}):", highlight=False)
        console.print(f"  {engine.flags}", highlight=False, markup=False, soft_wrap=True)
        for line in (engine.config or "").splitlines():
            console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
        for note in engine.notes:
            console.print(f"  note: {note}", highlight=False, markup=False)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
