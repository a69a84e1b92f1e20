#!/usr/bin/env python3
"""Rebuild the results in docs/planner.md from records: the plans for three traces, and the check of the simulator.

    python scripts/planner_page.py --traces DIR [--run docs/results/planner_h200_8b] [--check RECORD ...]

Replaces what stands between the page's two marks. DIR holds the Azure 2023 traces and Mooncake's; no GPU is
needed. The plans are those of --run, beside a summary of those of each --check; the simulator is checked
against the replay of each. Takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.planner.cost_source import DEFAULT_RUN  # noqa: E402

BEGIN, END = "<!-- made by scripts/planner_page.py -->", "<!-- end -->"
TRACES = (
    ("Azure 2023 conversation", "AzureLLMInferenceTrace_conv.csv", "azure"),
    ("Azure 2023 code", "AzureLLMInferenceTrace_code.csv", "azure"),
    ("Mooncake conversation", "mooncake_conversation_trace.jsonl", "mooncake"),
)
ENGINES = (
    ("vllm", "vLLM"),
    ("sglang", "SGLang"),
    ("tensorrt_llm", "TensorRT-LLM"),
    ("lmdeploy", "LMDeploy"),
)
CHECK_NOTE = "How far prediction and measurement lie apart (`python -m harness plan --verify RECORD`, the replay of the same run):"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the traces")
    parser.add_argument("--run", type=Path, default=DEFAULT_RUN, help="the record")
    parser.add_argument(
        "--check",
        type=Path,
        nargs="*",
        default=[ROOT / "docs/results/planner_h200"],
        help="further records to plan with and to check the simulator against",
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs/planner.md", help="the page to write")
    options = parser.parse_args()
    page = options.page.read_text()
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        parser.error(f"{options.page} lacks the marks {BEGIN} and {END}")
    checked = [record.resolve() for record in options.check]
    made = results(options.run.resolve(), checked, options.traces.resolve())
    options.page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    return 0


def results(run: Path, checked: list[Path], traces: Path) -> str:
    """Return the part of the page that the records decide."""
    by_run = {
        record: {name: plan(record, traces / file, kind) for name, file, kind in TRACES}
        for record in (run, *checked)
    }
    plans = by_run[run]
    parts = [described(run), plan_table(plans), halves(plans), warnings(plans), by_record(by_run), CHECK_NOTE]
    return "\n\n".join([*parts, *(check(record) for record in (run, *checked))])


def plan(run: Path, trace: Path, kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        verb("plan", str(run), "--workload", str(trace), "--format", kind, "--output", str(output))
        content: dict[str, Any] = json.loads(output.read_bytes())
    return content


def verb(*arguments: str) -> str:
    """Run a verb in the checkout. `--verify` ends with 1 where the prediction is off: that is a result."""
    command = [sys.executable, "-m", "harness", *arguments, "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not ended.stdout.startswith("{"):
        raise SystemExit(ended.stderr)
    return ended.stdout


def described(run: Path) -> str:
    return (
        f"Cost table: {measured(run)}. Command: `python -m harness plan {shown(run)} --workload TRACE --format F`. "
        "Step times in ms on the held-out part:"
    )


def measured(run: Path) -> str:
    """Say what a record was measured on."""
    result = json.loads((run / "result.json").read_bytes())
    config, environment = result["config"], result["environment"]
    versions = environment["versions"]
    lens = ", ".join(f"{length:,}" for length in config["measure"]["context_lens"])
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton") if versions.get(name))
    return (
        f"`{shown(run)}` ({environment['device_name']}, {result['started_at'][:10]}, {config['model']['name']}, "
        f"`model.implementation={config['model']['implementation']}`, {len(result['capture']['sizes'])} captured "
        f"sizes to {max(result['capture']['sizes'])}, contexts of {lens} tokens, requests of up to "
        f"{config['model']['max_seq_len']:,}; {packages})"
    )


def shown(run: Path) -> Path:
    return run.relative_to(ROOT) if run.is_relative_to(ROOT) else run


def plan_table(plans: dict[str, dict[str, Any]]) -> str:
    first = {row["name"]: row["num_graphs"] for row in next(iter(plans.values()))["judged"]}
    heads = [f"{title}'s list ({first[name]})" for name, title in ENGINES]
    lines = [
        f"| trace | plan (graphs) | step | {' | '.join(heads)} | gain over vLLM [95%] | verdict |",
        "|---" * (len(ENGINES) + 5) + "|",
    ]
    for trace, content in plans.items():
        rows = {row["name"]: row for row in content["judged"]}
        sizes = " ".join(map(str, content["sizes"]))
        times = " | ".join(number(rows[name]["step_ms"]) for name, _ in ENGINES)
        plan_ms = number(rows["plan"]["step_ms"])
        cells = (gain_text(content["verdict"]), verdict_text(content["verdict"]))
        lines.append(
            f"| {trace} | {sizes} ({len(content['sizes'])}) | {plan_ms} | {times} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def verdict_text(verdict: dict[str, Any]) -> str:
    return "use the plan" if verdict["decision"] == "use_plan" else "keep the default"


def by_record(by_run: dict[Path, dict[str, dict[str, Any]]]) -> str:
    """Show how far the answers hang on the model: load, plan and verdicts with each record's costs."""
    lines = [
        "How far that hangs on the model, `python -m harness plan RECORD --workload TRACE --format F`. *Beyond*: the held-out "
        "decode steps with more KV tokens than were measured at their size, under the plan or vLLM's list.",
        "",
        "| costs | trace | mean batch | beyond | graphs | gain over vLLM [95%] | verdict | halves |",
        "|---" * 8 + "|",
    ]
    for run, plans in by_run.items():
        for trace, content in plans.items():
            verdict, simulation = content["verdict"], content["prediction"]["simulation"]
            reasons = Counter(row["verdict"]["reason"].replace("_", " ") for row in content["halves"])
            cells = (
                f"`{run.name}`",
                trace,
                f"{simulation['mean_batch_size']:.1f}",
                f"{verdict['beyond_share']:.1%}",
                str(len(content["sizes"])),
                gain_text(verdict),
                verdict_text(verdict),
                ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def halves(plans: dict[str, dict[str, Any]]) -> str:
    """Say for each engine's list and trace whether at most half of its graphs do as well."""
    lines = [
        "For each engine's list the best one of at most half its graphs, `--default ENGINE --max-graphs HALF`: **adopt** it "
        "where the whole interval of its gain shows that it is no slower, or else **keep** the engine's list. Where it "
        "is slower, *in hindsight* is the gain of the best list of as many graphs for the held-out part itself.",
        "",
        f"| engine's list (graphs) | {' | '.join(plans)} |",
        "|---" * (len(plans) + 1) + "|",
    ]
    rows = [{row["engine"]: row for row in content["halves"]} for content in plans.values()]
    for name, row in rows[0].items():
        cells = " | ".join(half_text(by_engine[name]) for by_engine in rows)
        lines.append(f"| {name} ({row['engine_num_graphs']}) | {cells} |")
    return "\n".join([*lines, "", *counts(plans)])


def half_text(row: dict[str, Any]) -> str:
    verdict, gain = row["verdict"], f"{row['num_graphs']} graphs: {gain_text(row)}"
    if verdict["decision"] == "adopt":
        return f"**adopt** {gain}"
    reason = verdict["reason"].replace("_", " ")
    if verdict["reason"] == "slower":
        reason += f", in hindsight {percent(verdict['hindsight_gain'])}"
    return f"**keep**, {gain}, {reason}"


def counts(plans: dict[str, dict[str, Any]]) -> list[str]:
    """How many verdicts of each kind there are."""
    verdicts = [row["verdict"] for content in plans.values() for row in content["halves"]]
    adopted = sum(verdict["decision"] == "adopt" for verdict in verdicts)
    slower = sum(verdict["reason"] == "slower" for verdict in verdicts)
    return [
        f"Of {len(verdicts)} verdicts {adopted} are to adopt and {len(verdicts) - adopted} to keep, "
        f"{slower} of these because half is slower."
    ]


def warnings(plans: dict[str, dict[str, Any]]) -> str:
    lines = [f"- {trace}: {text}." for trace, content in plans.items() for text in content["warnings"]]
    return "\n".join(["What the verb warns of:", "", *(lines or ["- nothing."])])


def check(run: Path) -> str:
    """The simulator against the replay of the same run."""
    found = json.loads(verb("plan", "--verify", str(run)))
    lines = [f"{measured(run)}:", "", "| | predicted | measured | apart |", "|---|---|---|---|"]
    for row in found["rows"]:
        figures = (number(row["predicted"]), number(row["measured"]), percent(row["deviation"]))
        lines.append(f"| {row['name']} | {' | '.join(figures)} |")
    lines += ["", "| steps by kind, on the batches that ran | steps | predicted ms | measured ms | apart |"]
    lines.append("|---|---|---|---|---|")
    for kind in found["kinds"]:
        figures = (number(kind["predicted_ms"]), number(kind["measured_ms"]), percent(kind["deviation"]))
        lines.append(f"| {kind['name']} | {kind['num_steps']} | {' | '.join(figures)} |")
    lines += ["", *(f"- {note}." for note in found["notes"])]
    verdict = "hold" if found["holds"] else "do not hold"
    return "\n".join([*lines, "", f"The 5% of TPOT and of mode shares **{verdict}** on this record."])


def gain_text(row: dict[str, Any]) -> str:
    if row["interval"] is None:
        return percent(row["gain"])
    low, high = row["interval"]
    return f"{percent(row['gain'])} [{percent(low)}, {percent(high)}]"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


if __name__ == "__main__":
    sys.exit(main())
