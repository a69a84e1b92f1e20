"""The command lines of plan, simulate and export."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from harness.errors import ConfigError
from harness.workload.engine_logs import ENGINE_LOG_FORMATS
from harness.workload.trace_formats import FORMATS
from runners.capture_sizes import POLICIES

_TRACE_FORMATS = (*FORMATS, "csv")
_MAX_WINDOWS = 1000
_FOR_REQUESTS = (
    "columns",
    "over_length",
    "max_requests",
    "duration_s",
    "rate_scale",
    "request_rate",
    "max_concurrency",
    "slo",
    "seed",
    "num_pages",
    "prefill_chunk_tokens",
    "pool_mib",
)


#: Keys of the configuration that the readers of traces name, and the options that they are here.
_OPTIONS = {"workload.path": "--workload", "model.max_seq_len": "--max-seq-len"} | {
    f"workload.{name}": "--" + name.replace("_", "-")
    for name in (
        *("format", "columns", "over_length", "max_requests", "duration_s", "rate_scale", "request_rate"),
        "max_concurrency",
    )
}
_KEY = re.compile("|".join(map(re.escape, _OPTIONS)))


@contextmanager
def keys_as_options() -> Iterator[None]:
    """Let a ConfigError name the options that the user typed, not the keys of a configuration."""
    try:
        yield
    except ConfigError as error:
        if error.field not in _OPTIONS:
            raise
        remedy = _KEY.sub(lambda key: _OPTIONS[key[0]], error.remedy)
        raise ConfigError(_OPTIONS[error.field], error.value, remedy) from error


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as every other part of the program does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.prog, None, f"{message}; see --help")


def parse_plan(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser(
        "plan",
        "The best capture list for a traffic, from a run's measured costs: exact, with the feedback of step time on "
        "batch size, judged on traffic that it did not see, and 'keep the default' where the gain is within noise.",
        "examples:\n"
        "  python -m harness plan RUN --workload trace.csv --format azure\n"
        "  python -m harness plan RUN --workload trace.csv --format azure --max-graphs 12 --memory-mib 500\n"
        "  python -m harness plan RUN --workload server.log --format vllm_log\n"
        "  python -m harness capture=planned capture.plan_path=plan.json      measure what was planned\n"
        "  python -m harness plan --verify RUN                                then compare",
    )
    _add_run(parser)
    _add_traffic(parser, (*_TRACE_FORMATS, *ENGINE_LOG_FORMATS))
    _add_limits(parser)
    budget = parser.add_argument_group("budget (without one: the fewest graphs within 0.5% of the best)")
    budget.add_argument("--max-graphs", type=_whole, metavar="N", help="graphs at most")
    budget.add_argument(
        "--memory-mib", type=_positive, metavar="M", help="graph memory on the device at most"
    )
    budget.add_argument("--capture-seconds", type=_positive, metavar="S", help="time of the capture at most")
    choice = parser.add_argument_group("choosing and judging")
    choice.add_argument(
        "--default", choices=sorted(POLICIES), help="the list in use today (the log's own, or vllm)"
    )
    choice.add_argument(
        "--padding",
        default="nearest",
        choices=["nearest", "cheapest"],
        help="the rule of the runner (nearest)",
    )
    choice.add_argument("--interpolate", action="store_true", help="also choose sizes between measured ones")
    choice.add_argument(
        "--fit-share", type=_share, default=0.5, metavar="X", help="part to fit on; the rest judges (0.5)"
    )
    choice.add_argument(
        "--windows", type=_windows, default=40, metavar="N", help="windows of the traffic (40)"
    )
    choice.add_argument(
        "--context",
        type=_positive,
        default=1024.0,
        metavar="T",
        help="KV tokens a request, for logs without them (1024)",
    )
    outputs = parser.add_argument_group("outputs")
    outputs.add_argument(
        "--output", default="plan.json", metavar="FILE", help="the plan, for capture.plan_path (plan.json)"
    )
    outputs.add_argument("--html", metavar="FILE", help="a page with histogram, lists and Pareto front")
    outputs.add_argument("--json", action="store_true", help="print the plan as JSON instead of tables")
    outputs.add_argument(
        "--verify", metavar="RUN", help="compare a run's replay with its simulation, and plan nothing"
    )
    outputs.add_argument(
        "--plan", metavar="FILE", help="with --verify: take the costs that this plan was made from"
    )
    parser.set_defaults(above_max="eager")
    args = parser.parse_args(argv)
    if args.plan and not args.verify:
        parser.error("--plan goes with --verify: it names the plan whose costs a run is compared with")
    if args.verify and args.workload:
        parser.error("--verify compares the requests that the run replayed: leave out --workload")
    if args.format in ENGINE_LOG_FORMATS:
        _refuse_for_logs(parser, args)
    return args


def parse_simulate(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser(
        "simulate",
        "Replay a trace against a run's measured costs, without a GPU: the scheduler of the workload replay, with a "
        "table of costs for a GPU.",
        "examples:\n"
        "  python -m harness simulate RUN --workload trace.csv --format azure\n"
        "  python -m harness simulate RUN --workload trace.csv --format azure --sizes 1,2,4,8,256 --slo tpot=30",
    )
    _add_run(parser)
    _add_traffic(parser, _TRACE_FORMATS)
    _add_limits(parser)
    parser.add_argument("--stream", action="store_true", help="read the trace in parts, in little memory")
    parser.add_argument(
        "--sizes", metavar="LIST", help="1,2,4 or a plan file or a policy (the run's own list)"
    )
    parser.add_argument(
        "--padding",
        default="nearest",
        choices=["nearest", "exact", "max", "cheapest", "split"],
        help="(nearest)",
    )
    parser.add_argument("--above-max", default="eager", choices=["eager", "split"], help="(eager)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(windows=1)
    return parser.parse_args(argv)


def parse_export(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser(
        "export",
        "A capture list as the flags of an engine.",
        "examples:\n"
        "  python -m harness export plan.json --engine vllm\n"
        "  python -m harness export 1,2,4,8,40 --engine sglang --engine-version 0.5.9 --max-batch-size 42",
    )
    parser.add_argument(
        "list", metavar="LIST", help="a plan file, sizes such as 1,2,4, or a policy such as vllm"
    )
    parser.add_argument("--engine", required=True, metavar="E", help="vllm, sglang, tensorrt_llm or lmdeploy")
    parser.add_argument(
        "--engine-version", metavar="V", help="flags of this release (the one checked against)"
    )
    parser.add_argument(
        "--max-batch-size", type=_whole, metavar="N", help="the engine's limit on running requests"
    )
    parser.add_argument(
        "--tokens-per-request", type=_whole, default=1, metavar="N", help="1, or speculative tokens + 1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def _parser(verb: str, description: str, epilog: str) -> _Parser:
    return _Parser(
        prog=f"python -m harness {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="a measured job's folder (the committed record of Qwen3-8B dimensions on an H200)",
    )
    parser.add_argument(
        "--allow-unverified", action="store_true", help="use a run whose replay was not proven equal to eager"
    )


def _add_traffic(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    group = parser.add_argument_group("traffic (without a path: the requests that the run replayed)")
    group.add_argument("--workload", metavar="PATH", help="a trace, or an engine's log")
    group.add_argument("--format", choices=formats, metavar="F", help=", ".join(formats))
    group.add_argument(
        "--columns",
        type=_pairs,
        default={},
        metavar="K=V,…",
        help="format csv: arrival_s=…,prompt_len=…,output_len=…",
    )
    group.add_argument(
        "--over-length",
        default="clip",
        choices=["clip", "skip", "error"],
        help="requests above --max-seq-len (clip)",
    )
    group.add_argument("--max-requests", type=_whole, metavar="N", help="requests to take")
    group.add_argument("--duration-s", type=_positive, metavar="S", help="arrivals up to this time")
    group.add_argument(
        "--rate-scale", type=_positive, default=1.0, metavar="X", help="speed the arrivals up (1)"
    )
    group.add_argument("--request-rate", type=_positive, metavar="R", help="requests a second")
    group.add_argument("--max-concurrency", type=_whole, metavar="N", help="requests in flight at most")
    group.add_argument(
        "--slo", type=_limits, default={}, metavar="K=MS,…", help="ttft=…,tpot=…,e2el=… of a good answer"
    )
    group.add_argument("--seed", type=int, default=0, help="spreads bucketed stamps (0)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits (the run's own, where left out)")
    group.add_argument("--max-batch-size", type=_whole, metavar="N", help="the largest running batch")
    group.add_argument("--max-seq-len", type=_whole, metavar="N", help="tokens of a request")
    group.add_argument("--num-pages", type=_whole, metavar="N", help="KV pages for requests")
    group.add_argument("--prefill-chunk-tokens", type=_whole, metavar="N", help="tokens of a prefill step")
    group.add_argument(
        "--pool-mib", type=_positive, metavar="M", help="memory that KV pages and graphs share"
    )


def _refuse_for_logs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A log has batches: what shapes or serves requests would be left out in silence."""
    for name in _FOR_REQUESTS:
        if getattr(args, name) != parser.get_default(name):
            option = name.replace("_", "-")
            parser.error(
                f"--{option} is for the requests of a trace, and --format {args.format} reads batches"
            )


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def _windows(text: str) -> int:
    """Each window has a histogram of its own."""
    if (value := _whole(text)) > _MAX_WINDOWS:
        raise argparse.ArgumentTypeError(f"{text} is above {_MAX_WINDOWS}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value


def _share(text: str) -> float:
    if not 0 < (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and equals and value for name, equals, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value,name=value")
    return {name: value for name, _, value in pairs}


def _limits(text: str) -> dict[str, float]:
    limits = {name: _positive(value) for name, value in _pairs(text).items()}
    if unknown := set(limits) - {"ttft", "tpot", "e2el"}:
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of ttft, tpot, e2el")
    return limits
