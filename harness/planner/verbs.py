"""The verbs plan, simulate and export. Each takes its arguments and returns an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from harness.planner.arguments import keys_as_options, parse_export, parse_plan, parse_simulate

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from harness.planner.inputs import Inputs
    from harness.planner.plan import Plan


@keys_as_options()
def main_plan(argv: Sequence[str]) -> int:
    """Plan, or with --verify compare. Returns 1 only if a verification does not hold."""
    args = parse_plan(argv)
    if args.verify:
        return _verify(args)
    from harness.durable import check_output
    from harness.planner.inputs import load_inputs, page_bytes, run_of
    from harness.planner.plan_file import plan_content, write_plan

    check_output("--output", Path(args.output))
    if args.html:
        check_output("--html", Path(args.html))
    inputs = load_inputs(args)
    plan = _planner(args, inputs).plan()
    plan.warnings.extend([*inputs.warnings, *_cost_warnings(plan, inputs, args)])
    content = plan_content(plan, inputs.costs.source, inputs.workload)
    write_plan(args.output, content)
    if args.html:
        _write_page(args, plan, inputs)
    if args.json:
        print(json.dumps(content, indent=2))
        return 0
    from harness.planner.cost_source import read_run
    from harness.planner.tables import print_flags, print_plan

    console = _console()
    kv_page_bytes = page_bytes(read_run(run_of(args))) if inputs.costs.captures.is_known else None
    print_plan(console, plan, inputs.costs.captures.knows_memory, kv_page_bytes)
    kept = "" if plan.is_recommended else f" (the verdict is to keep {plan.default.name}'s)"
    console.print(f"the planned list as flags{kept}:", highlight=False)
    print_flags(console, _all_flags(plan))
    console.print(f"plan: {args.output} (capture=planned capture.plan_path={args.output})", highlight=False)
    return 0


@keys_as_options()
def main_simulate(argv: Sequence[str]) -> int:
    """Replay a trace on a run's costs and print what came out."""
    args = parse_simulate(argv)
    from harness.planner.cost_source import read_run
    from harness.planner.inputs import load_inputs, load_stream, run_of

    inputs = load_stream(args) if args.stream else load_inputs(args)
    if args.sizes:
        sizes = parse_list(args.sizes, inputs.traffic.max_batch_size)
    else:
        sizes = tuple((read_run(run_of(args)).get("capture") or {}).get("sizes") or ())
    simulation = inputs.traffic.under(sizes).simulation
    assert simulation is not None, "simulate takes traces only"
    result = {"sizes": list(sizes)} | simulation.as_dict()
    if args.json:
        described = {"source": asdict(inputs.costs.source), "workload": inputs.workload}
        print(json.dumps(described | result, indent=2))
        return 0
    from harness.planner.tables import print_simulation

    console = _console()
    print_simulation(console, result)
    for warning in inputs.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    return 0


def main_export(argv: Sequence[str]) -> int:
    """Print a list as an engine's flags."""
    args = parse_export(argv)
    from harness.planner.export import export_flags

    sizes = parse_list(args.list, args.max_batch_size)
    flags = export_flags(
        args.engine, sizes, args.max_batch_size, args.engine_version, args.tokens_per_request
    )
    if args.json:
        print(json.dumps(asdict(flags), indent=2))
        return 0
    print(flags.flags)
    if flags.config:
        print(flags.config, end="")
    for note in (flags.checked, *flags.notes):
        print(f"note: {note}", file=sys.stderr)
    return 0


def parse_list(text: str, max_batch_size: int | None) -> tuple[int, ...]:
    """Read a capture list: sizes, a policy's name or a plan file. Raises ConfigError."""
    from harness.planner.plan_file import read_plan
    from runners.capture_sizes import POLICIES, capture_sizes

    if text in POLICIES:
        if max_batch_size is None:
            raise ConfigError("--max-batch-size", None, f"the list of {text} needs a maximum")
        return capture_sizes(text, max_batch_size).sizes
    parts = text.strip("[]").replace(",", " ").split()
    if parts and all(part.isdigit() for part in parts):
        sizes = tuple(sorted({int(part) for part in parts}))
        if not sizes[0]:
            raise ConfigError("LIST", text, "give sizes of 1 or more")
        return sizes
    if not text or not Path(text).exists():
        raise ConfigError(
            "LIST", text, f"is no plan file, no sizes such as 1,2,4 and none of {', '.join(POLICIES)}"
        )
    return read_plan(text).sizes


def _planner(args: argparse.Namespace, inputs: Inputs) -> Any:
    from harness.planner.lists import NamedList
    from harness.planner.optimise import Budget
    from harness.planner.plan import Planner
    from runners.capture_sizes import capture_sizes

    costs, traffic = inputs.costs, inputs.traffic
    if args.memory_mib is not None and not costs.captures.knows_memory:
        raise ConfigError(
            "--memory-mib", args.memory_mib, "the costs have no graph memory: give a run on a GPU"
        )
    if args.capture_seconds is not None and not costs.captures.is_known:
        raise ConfigError(
            "--capture-seconds", args.capture_seconds, "the costs have no capture times: name a run"
        )
    max_batch_size = traffic.max_batch_size
    logged = {size for size in inputs.workload.get("capture_sizes", []) if size <= max_batch_size}
    if logged and args.default is None:
        default = NamedList("the engine's list", tuple(sorted(logged | {max_batch_size})))
    else:
        name = args.default or "vllm"
        default = NamedList(name, capture_sizes(name, max_batch_size).sizes)
    return Planner(
        costs,
        traffic,
        costs.candidates(max_batch_size, args.interpolate),
        default,
        Budget(args.max_graphs, args.memory_mib, args.capture_seconds),
        args.padding,
        args.fit_share,
        _progress(args),
    )


def _cost_warnings(plan: Plan, inputs: Inputs, args: argparse.Namespace) -> list[str]:
    """Say what of the plan's costs was not measured but read between or beyond measurements."""
    graph, warnings = inputs.costs.graph, []
    between = [size for size in plan.choice.sizes if not graph.is_measured(size)]
    if between:
        warnings.append(f"interpolated between measured neighbours: the times of sizes {between}")
    compared = plan.default.against
    if compared is not None and not compared.is_measured:
        warnings.append(
            f"{compared.beyond_share:.0%} of the decode steps have more KV tokens than were measured at their size, "
            "whose last time is held: measure with measure.context_lens that reach them, with as many KV pages as that takes"
        )
    unknown = inputs.costs.captures.unknown_classes
    if inputs.costs.captures.knows_memory and unknown:
        warnings.append(f"graph memory is a lower bound: {', '.join(unknown)} was not measured")
    return warnings


def _verify(args: argparse.Namespace) -> int:
    """The run's own costs, unless a plan is given: then those that the plan was made from."""
    from harness.planner.contexts import ContextGrid
    from harness.planner.cost_source import load_costs, read_run
    from harness.planner.inputs import limits_of
    from harness.planner.plan_file import read_plan
    from harness.planner.tables import print_verification
    from harness.planner.verify import verify

    result = read_run(args.verify)
    costs_run = read_plan(args.plan).content["source"]["path"] if args.plan else args.run or args.verify
    costs = load_costs(costs_run, args.allow_unverified)
    limits = limits_of(result, args)
    verification = verify(args.verify, result, costs, limits, ContextGrid.up_to(limits.max_seq_len))
    if args.json:
        rows = [asdict(row) | {"deviation": row.deviation} for row in verification.rows]
        kinds = [asdict(kind) | {"deviation": kind.deviation} for kind in verification.kinds]
        found = {"holds": verification.holds, "rows": rows, "kinds": kinds, "notes": verification.notes}
        print(json.dumps({"costs": str(costs_run)} | found, indent=2))
    else:
        console = _console()
        print_verification(console, verification)
        console.print(f"costs of {costs_run}", highlight=False)
    return 0 if verification.holds else 1


def _write_page(args: argparse.Namespace, plan: Plan, inputs: Inputs) -> None:
    from harness.durable import write_output
    from harness.planner.page import plan_page

    source = inputs.costs.source
    measured = ", ".join(filter(None, (source.path, source.model, source.device)))
    traffic = f"{inputs.workload['path'] or source.path} ({inputs.workload['format']})"
    page = plan_page(plan, _all_flags(plan), measured, traffic)
    write_output("--html", Path(args.html), page)


def _all_flags(plan: Plan) -> list[Any]:
    from harness.planner.export import ENGINES, export_flags

    return [export_flags(engine, plan.choice.sizes) for engine in ENGINES]


def _progress(args: argparse.Namespace) -> Any:
    """One line that is written over, on a terminal only."""
    if args.json or not sys.stderr.isatty():
        return lambda _: None
    return lambda word: print(f"\r\033[Ksimulating {word}", end="\r", file=sys.stderr)


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)
