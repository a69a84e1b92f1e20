from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.workload.engine_logs import load_engine_log
from harness.workload.logged_batches import LoggedBatches, StepTimeBins

PREFIX = "(APIServer pid=66) INFO 09-02 08:46:23 [compilation/cuda_graph.py:123]"
TABLE = f"""{PREFIX} **CUDAGraph Config Settings:**
{PREFIX}
{PREFIX} - Mode: FULL_AND_PIECEWISE
{PREFIX} - Capture sizes: [1, 2, 4, 8]
{PREFIX}
{PREFIX} **CUDAGraph Stats:**
{PREFIX}
{PREFIX} | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
{PREFIX} |-----------------|---------------|--------------|--------------|-------|
{PREFIX} | 3               | 4             | 1            | FULL         | 40    |
{PREFIX} | 8               | 8             | 0            | FULL         | 7     |
{PREFIX} | 412             | 416           | 4            | PIECEWISE    | 5     |
{PREFIX} | 600             | 600           | 0            | NONE         | 2     |
"""
STATS = "INFO 12-10 15:42:47 forward_context.py:58] Batchsize forward time stats (batchsize, count, median_time(ms)): "
DECODE = (
    "[2026-10-01 11:53:31 TP0] Decode batch, #running-req: {n}, #token: {t}, token usage: 0.05, {more}"
    "gen throughput (token/s): {r}, #queue-req: 0"
)


def load(tmp_path: Path, text: str, format_name: str) -> LoggedBatches:
    path = tmp_path / "server.log"
    path.write_text(text)
    return load_engine_log(path, format_name)


def steps(logged: LoggedBatches) -> dict[int, int]:
    (window,) = logged.windows(1)
    return dict(window.num_steps)


def test_vllm_tables_count_decode_steps_and_leave_the_others_out(tmp_path: Path) -> None:
    logged = load(tmp_path, TABLE + "INFO something else | with | pipes |\n", "vllm_log")
    assert steps(logged) == {3: 40, 8: 7}
    assert logged.num_other_steps == 7
    assert logged.capture_sizes == (1, 2, 4, 8)


def test_tables_without_a_log_prefix_are_read_too(tmp_path: Path) -> None:
    assert steps(load(tmp_path, TABLE.replace(PREFIX + " ", ""), "vllm_log")) == {3: 40, 8: 7}


def test_a_broken_row_is_counted_and_shown(tmp_path: Path) -> None:
    logged = load(tmp_path, TABLE + f"{PREFIX} | 3 | 4 | one | FULL | 40 |\n", "vllm_log")
    assert logged.num_malformed == 1 and "| 3 | 4 | one" in logged.malformed_examples[0]
    assert steps(logged) == {3: 40, 8: 7}


def test_vllm_batch_sizes_are_cumulative_for_each_process(tmp_path: Path) -> None:
    lines = [
        f"(EngineCore_DP0 pid=1) {STATS}[(8, 100, 5.5), (1, 10, 4.0)]",
        f"(EngineCore_DP1 pid=2) {STATS}[(8, 50, 5.7)]",
        f"(EngineCore_DP0 pid=1) {STATS}[(8, 300, 5.6), (1, 10, 4.0), (512, 3, 40.25)]",
    ]
    logged = load(tmp_path, "\n".join(lines), "vllm_log")
    assert steps(logged) == {8: 350, 1: 10, 512: 3}
    medians = logged.times.medians("graph")
    assert medians[1] == (pytest.approx(4.0, rel=0.01), 10)
    assert medians[8] == (pytest.approx(5.6, rel=0.01), 350)
    assert any("padded" in note for note in logged.notes)


def test_a_restarted_process_counts_anew(tmp_path: Path) -> None:
    lines = [f"{STATS}[(8, 100, 5.5)]", f"{STATS}[(8, 20, 5.5)]"]
    assert steps(load(tmp_path, "\n".join(lines), "vllm_log")) == {8: 120}


def test_a_cut_off_line_of_statistics_is_malformed(tmp_path: Path) -> None:
    logged = load(tmp_path, f"{STATS}[(8, 100, 5.5)]\n{STATS}[(8, 100, 5.", "vllm_log")
    assert logged.num_malformed == 1 and steps(logged) == {8: 100}


def test_tables_win_over_batch_sizes_which_give_the_times(tmp_path: Path) -> None:
    logged = load(tmp_path, TABLE + f"{STATS}[(8, 100, 5.5)]\n", "vllm_log")
    assert steps(logged) == {3: 40, 8: 7}
    assert set(logged.times.medians("graph")) == {8}


def test_sglang_decode_lines_give_batches_kv_tokens_and_times(tmp_path: Path) -> None:
    lines = [
        DECODE.format(n=10, t=5000, more="cuda graph: True, ", r="2000.00"),
        DECODE.format(n=10, t=7000, more="cuda graph: True, ", r="2000.00"),
        DECODE.format(n=300, t=9000, more="cuda graph: False, ", r="10000.00"),
        "Decode batch. #running-req: 4, #token: 400, token usage: 0.01, gen throughput (token/s): 800.0, #queue-req: 0",
        DECODE.format(n=0, t=0, more="cuda graph: True, ", r="0.00"),
        "Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, #running-req: 3, #queue-req: 0",
    ]
    logged = load(tmp_path, "\n".join(lines), "sglang_log")
    assert steps(logged) == {10: 2, 300: 1, 4: 1}
    assert logged.windows(1)[0].context(10) == 600
    assert logged.times.medians("graph")[10] == (pytest.approx(5.0, rel=0.01), 2)
    assert logged.times.medians("graph")[4] == (pytest.approx(5.0, rel=0.01), 1)
    assert logged.times.medians("eager")[300] == (pytest.approx(30.0, rel=0.01), 1)


def test_accepted_tokens_count_towards_a_steps_time(tmp_path: Path) -> None:
    line = DECODE.format(
        n=10, t=5000, more="accept len: 2.50, accept rate: 0.6, cuda graph: True, ", r="2500.00"
    )
    assert load(tmp_path, line, "sglang_log").times.medians("graph")[10][0] == pytest.approx(10.0, rel=0.01)


def test_hybrid_sglang_lines_are_read(tmp_path: Path) -> None:
    line = (
        "Decode batch [123], #running-req: 2, #full token: 900, full token usage: 0.05, #swa token: 10, "
        "swa token usage: 0.1, cuda graph: True, gen throughput (token/s): 400.00, #queue-req: 0"
    )
    assert load(tmp_path, line, "sglang_log").windows(1)[0].context(2) == 450


def test_a_decode_line_without_its_numbers_is_malformed(tmp_path: Path) -> None:
    good = DECODE.format(n=10, t=5000, more="cuda graph: True, ", r="2000.00")
    logged = load(tmp_path, f"{good}\nDecode batch, #running-req: 7, #tok", "sglang_log")
    assert logged.num_malformed == 1 and logged.malformed_examples == ["Decode batch, #running-req: 7, #tok"]


def test_scraped_sglang_metrics_give_a_histogram_without_times(tmp_path: Path) -> None:
    scrapes = "\n".join(
        f'# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{{model_name="m"}} {value}'
        for value in ("4.0", "4.0", "0.0", "7.0", "oops")
    )
    logged = load(tmp_path, scrapes, "sglang_log")
    assert steps(logged) == {4: 2, 7: 1}
    assert logged.num_malformed == 1 and not logged.times.medians("graph")


def iteration(num_generation: int, num_context: int = 0, **more: object) -> dict[str, object]:
    return {
        "iter": 1,
        "iterLatencyMS": 12.5,
        "kvCacheStats": {"usedNumBlocks": 100, "tokensPerBlock": 64},
        "inflightBatchingStats": {"numContextRequests": num_context, "numGenRequests": num_generation},
        **more,
    }


@pytest.mark.parametrize("as_array", [False, True])
def test_tensorrt_llm_iterations_without_context_requests_are_decode_steps(
    tmp_path: Path, as_array: bool
) -> None:
    stats = [iteration(8), iteration(8, hostStepTimeMS=10.0), iteration(4, num_context=1), iteration(0)]
    text = json.dumps(stats) if as_array else "\n".join(map(json.dumps, stats))
    logged = load(tmp_path, text, "tensorrt_llm_stats")
    assert steps(logged) == {8: 2} and logged.num_other_steps == 2
    assert logged.windows(1)[0].context(8) == 800
    assert logged.times.medians("graph")[8][1] == 2


def test_broken_objects_are_counted_and_the_next_ones_read(tmp_path: Path) -> None:
    lines = [
        json.dumps(iteration(8)),
        '{"iter": 3, "broken',
        json.dumps({"iter": 4}),
        json.dumps(iteration(2)),
    ]
    logged = load(tmp_path, "\n".join(lines), "tensorrt_llm_stats")
    assert steps(logged) == {8: 1, 2: 1} and logged.num_malformed == 2


def test_tensorrt_llm_iteration_lines_are_read(tmp_path: Path) -> None:
    lines = [
        f"[TRT-LLM] [I] iter = {i}, global_rank = 0, rank = 0, num_scheduled_requests = 6, host_step_time = 9.5ms, "
        f"prev_device_step_time = 9.0ms, states = {{'num_ctx_requests': {context}, 'num_ctx_tokens': 0, "
        "'num_generation_tokens': 6}"
        for i, context in enumerate([0, 0, 1])
    ]
    logged = load(tmp_path, "\n".join([*lines, "iter = 9, host_step_time = "]), "tensorrt_llm_stats")
    assert steps(logged) == {6: 2}
    assert logged.num_other_steps == 1 and logged.num_malformed == 1


def test_a_packed_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(TABLE.encode()))
    assert steps(load_engine_log(path, "vllm_log")) == {3: 40, 8: 7}


def test_a_log_longer_than_a_block_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.workload.engine_logs._BLOCK_BYTES", 100)
    for text, format_name, expected in (
        (TABLE * 5, "vllm_log", {3: 200, 8: 35}),
        ("\n".join(json.dumps(iteration(8)) for _ in range(9)), "tensorrt_llm_stats", {8: 9}),
    ):
        logged = load(tmp_path, text, format_name)
        assert steps(logged) == expected and logged.num_malformed == 0


def test_a_file_without_a_decode_step_is_refused_with_what_was_malformed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no decode step"):
        load(tmp_path, "nothing here\n", "vllm_log")
    with pytest.raises(ConfigError, match="malformed: 'Decode batch"):
        load(tmp_path, "Decode batch, broken\n", "sglang_log")
    with pytest.raises(ConfigError, match="choose one of"):
        load(tmp_path, TABLE, "azure")
    with pytest.raises(ConfigError, match="No such file"):
        load_engine_log(tmp_path / "absent.log", "vllm_log")


def test_slices_are_merged_so_that_memory_stays_bounded() -> None:
    logged = LoggedBatches()
    for step in range(100_000):
        logged.add(1 + step // 50_000)
    assert len(logged.slices) <= 130
    early, late = logged.windows(2)
    assert early.num_steps[1] > 45_000 and late.num_steps[2] > 45_000


def test_medians_come_from_bins_a_percent_wide() -> None:
    times = StepTimeBins()
    for step_ms in (1.0, 2.0, 9.0):
        times.add(4, step_ms)
    times.add(4, 0.0)
    assert times.medians("graph") == {4: (pytest.approx(2.0, rel=0.01), 3)}
