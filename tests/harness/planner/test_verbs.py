from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.planner.cost_source import DEFAULT_RUN, load_costs
from harness.planner.verbs import main_export, main_plan, main_simulate, parse_list
from tests.harness.planner.measured_run import write_run

LOG = "\n".join(
    f"[2026-10-01 11:53:31 TP0] Decode batch, #running-req: {size}, #token: {size * 500}, token usage: 0.05, "
    f"cuda graph: True, gen throughput (token/s): {size / (4 + size / 50) * 1000:.2f}, #queue-req: 0"
    for repeat in range(60)
    for size in (1, 3, 4, 8, 9, 16, 20, 32)
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"{second / 10:.1f},{200 + second % 50},{50 + second % 30}" for second in range(1500)]
    path.write_text("\n".join(["time,prompt,output", *rows]) + "\n")
    return path


def traffic_of(trace: Path) -> list[str]:
    columns = "arrival_s=time,prompt_len=prompt,output_len=output"
    return ["--workload", str(trace), "--format", "csv", "--columns", columns]


def test_a_plan_is_printed_written_and_drawn(
    run: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = [str(run), *traffic_of(trace), "--max-graphs", "4", "--slo", "tpot=30"]
    assert main_plan([*arguments, "--output", str(plan), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "--cudagraph-capture-sizes" in shown and "enable_padding: true" in shown
    content = json.loads(plan.read_text())
    assert len(content["sizes"]) <= 4 and content["sizes"][-1] == 64
    assert content["verdict"]["decision"] in ("use_plan", "keep_default")
    assert "At most half of an engine's graphs" in shown and "at most half the graphs: " in shown
    for row in content["halves"]:
        assert row["num_graphs"] <= min(4, row["max_graphs"])
        assert (row["verdict"]["decision"] == "adopt") == (row["verdict"]["reason"] == "no_slower")
    assert content["prediction"]["simulation"]["completed"] == 1500
    drawn = page.read_text()
    assert "Plotly.newPlot" in drawn and "Pareto front" in drawn
    assert "At most half of an engine&#x27;s graphs" in drawn and "<th>verdict</th>" in drawn
    assert 'src="http' not in drawn and "<link" not in drawn


def test_json_is_the_plan_file(
    run: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main_plan([str(run), *traffic_of(trace), "--json", "--output", str(plan)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plan.read_text())


def test_costs_beyond_what_was_measured_are_marked(
    run: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        str(run),
        *traffic_of(trace),
        "--max-batch-size",
        "50",
        "--output",
        str(tmp_path / "plan.json"),
    ]
    assert main_plan(arguments) == 0
    assert "interpolated between measured neighbours: the times of sizes [50]" in capsys.readouterr().out


def test_a_log_with_times_is_planned_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG + "\nDecode batch, #running-req: broken\n")
    arguments = ["--workload", str(log), "--format", "sglang_log", "--max-graphs", "3"]
    assert main_plan([*arguments, "--output", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert "1 malformed lines" in shown and "Decode batch, #running-req: broken" in shown
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["source"]["graph_backend"] == "sglang_log" and not content["source"]["verified"]
    assert content["sizes"][-1] == 32 and content["workload"]["num_steps"] == 480


def test_a_log_is_planned_on_the_costs_of_a_run(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    arguments = [str(run), "--workload", str(log), "--format", "sglang_log", "--memory-mib", "100"]
    assert main_plan([*arguments, "--output", str(tmp_path / "plan.json"), "--json"]) == 0
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["source"]["graph_backend"] == "cuda"
    assert content["prediction"]["device_bytes"] <= 100 * 2**20


def test_memory_is_no_budget_where_nobody_measured_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    with pytest.raises(ConfigError, match="--memory-mib"):
        main_plan(["--workload", str(log), "--format", "sglang_log", "--memory-mib", "100"])


def test_a_shared_pool_leaves_fewer_pages_to_more_graphs(run: Path, trace: Path, tmp_path: Path) -> None:
    """1 MiB is 16 pages here, and the largest graph alone takes 72 MiB."""
    arguments = [str(run), *traffic_of(trace), "--output", str(tmp_path / "plan.json"), "--json"]
    assert main_plan([*arguments, "--pool-mib", "300"]) == 0
    with pytest.raises(ConfigError, match="too few for one request"):
        main_plan([*arguments, "--pool-mib", "80"])


def test_a_trace_is_simulated_under_any_list(
    run: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for extra in ([], ["--sizes", "64"], ["--sizes", "1", "--above-max", "eager"]):
        assert main_simulate([str(run), *traffic_of(trace), "--json", *extra]) == 0
        results.append(json.loads(capsys.readouterr().out))
    own, largest, small = results
    assert own["mean_step_ms"] < largest["mean_step_ms"]
    assert small["mode_shares"]["eager"] > 0
    assert main_simulate([str(run), *traffic_of(trace)]) == 0
    assert "share of graph steps" in capsys.readouterr().out


def test_a_trace_in_parts_gives_the_same_simulation(
    run: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for extra in ([], ["--stream"]):
        assert main_simulate([str(run), *traffic_of(trace), "--json", *extra]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert all(results[0][name] == results[1][name] for name in ("num_steps", "duration", "mean_tpot_ms"))


def test_a_list_is_sizes_a_policy_or_a_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"schema_version": "1.0", "kind": "capture_plan", "sizes": [2, 8]}')
    assert parse_list("[8,1,4]", None) == (1, 4, 8)
    assert parse_list("max_only", 7) == (7,)
    assert parse_list(str(plan), None) == (2, 8)
    with pytest.raises(ConfigError, match="--max-batch-size"):
        parse_list("vllm", None)
    with pytest.raises(ConfigError, match="no plan file"):
        parse_list("absent.json", None)

    for zero in ("0", "0,4"):
        with pytest.raises(ConfigError, match="1 or more"):
            parse_list(zero, None)


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for option in ("--output", "--html"):
        for path in (tmp_path / "none" / "plan.json", tmp_path):
            with pytest.raises(ConfigError, match=f"^{option}={path}"):
                main_plan([str(tmp_path / "no_run"), option, str(path)])


def test_what_is_wrong_with_the_traffic_names_the_options(run: Path, trace: Path) -> None:
    for changes, expected in (
        (["--workload", "/nowhere"], "--workload=/nowhere: cannot be read"),
        (
            ["--max-seq-len", "9", "--over-length", "error"],
            "--over-length=error: .*longer than --max-seq-len",
        ),
        (["--format", "azur"], "python -m harness simulate: argument --format: invalid choice"),
    ):
        with pytest.raises(ConfigError, match=f"^{expected}"):
            main_simulate([str(run), *traffic_of(trace), *changes])
    with pytest.raises(ConfigError, match="^--format: name the format"):
        main_simulate([str(run), "--workload", str(trace)])


def test_export_says_which_sizes_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_export(["1,2,700", "--engine", "vllm", "--max-batch-size", "300"]) == 0
    shown = capsys.readouterr()
    assert (
        "--cudagraph-capture-sizes 1 2 300 " in shown.out and "above --max-batch-size 300: 700" in shown.err
    )


def test_export_prints_the_flags_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_export(["1,2,8", "--engine", "sglang", "--max-batch-size", "9"]) == 0
    shown = capsys.readouterr()
    assert (
        shown.out == "--cuda-graph-bs-decode 1 2 8 9 --cuda-graph-max-bs-decode 9 --max-running-requests 9\n"
    )
    assert "checked against SGLang" in shown.err


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        (main_plan, ["--max-graphs", "0"]),
        (main_plan, ["--max-graphs", "2.5"]),
        (main_plan, ["--memory-mib", "inf"]),
        (main_plan, ["--windows", "100000"]),
        (main_plan, ["--plan", "plan.json"]),
        (main_plan, ["--verify", "RUN", "--workload", "trace.csv"]),
        (main_plan, ["--format", "vllm_log", "--rate-scale", "2"]),
        (main_plan, ["--fit-share", "1"]),
        (main_plan, ["--slo", "itl=5"]),
        (main_simulate, ["--columns", "time"]),
        (main_export, ["1,2"]),
    ],
)
def test_a_wrong_argument_is_a_usage_error_of_the_harness(verb: object, arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="--help"):
        verb(arguments)  # type: ignore[operator]


@pytest.mark.parametrize("verb", [main_plan, main_simulate, main_export])
def test_help_is_shown(verb: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        verb(["--help"])  # type: ignore[operator]
    assert stop.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_the_verbs_import_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, harness.planner.verbs, harness.planner.inputs, harness.planner.plan, harness.planner.page, "
        "harness.planner.tables, harness.planner.plan_file\n"
        "print(sorted({'torch', 'transformers', 'wandb', 'pandas', 'flashinfer'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("over_length", "said"),
    [
        ("clip", "of 1,500 requests are longer than 250 tokens"),
        ("skip", "requests longer than 250 tokens were left out"),
    ],
)
def test_requests_that_a_run_cannot_hold_are_warned_of(
    run: Path, trace: Path, tmp_path: Path, over_length: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(run), *traffic_of(trace), "--max-seq-len", "250", "--over-length", over_length]
    assert main_plan([*arguments, "--output", str(tmp_path / "plan.json")]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_longer_requests_than_were_measured_keep_the_default(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, output = tmp_path / "trace.csv", tmp_path / "plan.json"
    trace.write_text("time,prompt,output\n" + "".join(f"{i / 20},3000,60\n" for i in range(400)))
    assert main_plan([str(run), *traffic_of(trace), "--default", "max_only", "--output", str(output)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "keep the default (max_only)" in shown and "measure.context_lens" in shown
    content = json.loads(output.read_bytes())
    assert content["verdict"]["decision"] == "keep_default" and content["verdict"]["beyond_share"] > 0.05
    assert {row["verdict"]["reason"] for row in content["halves"]} <= {"not_measured", "same_list"}


def test_requests_that_arrive_at_once_keep_the_default(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time,prompt,output\n" + "0.0,200,50\n" * 3)
    assert main_plan([str(run), *traffic_of(trace), "--output", str(tmp_path / "plan.json")]) == 0
    assert "too little traffic to judge a plan on" in capsys.readouterr().out


def test_a_log_without_times_is_planned_on_the_default_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    table = ["| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |"]
    table += [f"| {size} | {size + size % 2} | {size % 2} | FULL | 40 |" for size in (1, 2, 3, 8)]
    log.write_text("".join(f"INFO [cuda_graph.py:123] {row}\n" for row in table * 12))
    arguments = ["--workload", str(log), "--format", "vllm_log", "--output", str(tmp_path / "plan.json")]
    assert main_plan(arguments) == 0
    source = load_costs(DEFAULT_RUN).source
    shown = " ".join(capsys.readouterr().out.split())
    assert source.model and f"no step times: they are those of {source.model} on {source.device}" in shown


def test_times_of_a_log_are_not_said_to_be_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    arguments = ["--workload", str(log), "--format", "sglang_log", "--output", str(tmp_path / "plan.json")]
    assert main_plan(arguments) == 0
    shown = capsys.readouterr().out
    assert "intervals lack their noise" in " ".join(shown.split()) and "measure.context_lens" not in shown


def test_a_file_is_no_run(trace: Path) -> None:
    with pytest.raises(ConfigError, match="give the folder of one job"):
        main_simulate([str(trace)])
