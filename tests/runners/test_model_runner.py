"""The model runner: what it builds, where it sends a batch, and what it refuses to be built with."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from runners.errors import RunnerError
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner
from runners.padding import StepPlan
from tests.runners.tiny_runner import MAX_SEQ_LEN, Requests, tiny_config, tiny_model, tiny_runner


def test_the_pool_holds_every_request_at_full_length_unless_told_otherwise() -> None:
    with tiny_runner(max_batch_size=3, capture_sizes=(3,)) as runner:
        rows = [runner.kv.add_request() for _ in range(3)]
        assert all(runner.kv.extend(row, MAX_SEQ_LEN) for row in rows)
        assert runner.kv.num_free_pages == 0
    with tiny_runner(num_pages=5) as runner:
        assert runner.kv.num_pages == 5


def test_the_cache_has_the_model_s_dtype_or_the_one_asked_for() -> None:
    with tiny_runner() as runner:
        assert runner.kv.dtype == torch.float32
    with tiny_runner(kv_cache_dtype="bfloat16") as runner:
        batch = Requests(runner).first(3)
        assert runner.kv.dtype == torch.bfloat16
        assert runner.forward(batch).next_token_logits.dtype == torch.float32


def test_prefill_in_chunks_gives_the_same_next_token_as_in_one_piece() -> None:
    with tiny_runner() as runner:
        whole = Requests(runner, [11]).first(1)
        expected = runner.forward(whole).next_token_logits.clone()

        chunked = Requests(runner, [4])
        chunked.prompts = Requests(runner, [11]).prompts  # the same seed, the same prompt
        row = int(chunked.rows[0])
        assert runner.kv.extend(row, 11)
        runner.forward(chunked.prefill(row, 0, 4))
        runner.forward(chunked.prefill(row, 4, 10))
        chunked.lengths[0] = 11

        torch.testing.assert_close(runner.forward(chunked.batch()).next_token_logits, expected)


def test_a_prefill_step_returns_one_row_a_request_and_says_prefill() -> None:
    with tiny_runner() as runner:
        requests = Requests(runner, [6])
        output = runner.forward(requests.prefill(int(requests.rows[0]), 0, 5))

        assert output.next_token_logits.shape == (1, runner.vocab_size)
        outcome = runner.outcome
        assert outcome is not None
        assert (outcome.mode, outcome.reason, outcome.num_graphs) == ("eager", "prefill", 0)


def test_decode_steps_go_to_the_graphs_and_their_outcome_is_the_runner_s() -> None:
    with tiny_runner() as runner:
        runner.forward(Requests(runner).first(3))
        assert runner.graph_runner is not None
        assert runner.outcome is runner.graph_runner.outcome
        assert runner.graph_backend == "emulated"


def test_an_eager_runner_has_no_graphs_and_says_so() -> None:
    with tiny_runner(kind="eager", capture_sizes=()) as runner:
        requests = Requests(runner)
        output = runner.forward(requests.first(3)).next_token_logits

        assert runner.graph_runner is None and runner.graph_backend == "none"
        assert output.shape == (3, runner.vocab_size)
        assert runner.outcome is not None
        assert (runner.outcome.mode, runner.outcome.reason) == ("eager", "no_graphs")
        padded = runner.forward(requests.first(3), StepPlan("eager", (5,))).next_token_logits
        torch.testing.assert_close(padded, output)
        assert runner.outcome.padded_batch_size == 5
        assert runner.forward(ForwardBatch.idle()).next_token_logits.shape == (0, runner.vocab_size)
        with pytest.raises(RunnerError, match="needs graphs"):
            runner.forward(requests.first(3), StepPlan("graph", (4,)))


def test_the_stopwatch_marks_the_device_region_of_every_kind_of_step() -> None:
    class Marks:
        def __init__(self) -> None:
            self.seen = ""

        def start(self) -> None:
            self.seen += "<"

        def stop(self) -> None:
            self.seen += ">"

        def elapsed_ms(self) -> float:
            return 0.0

    with tiny_runner() as runner:
        requests = Requests(runner)
        plans = [None, StepPlan("eager"), StepPlan("eager", (4,)), StepPlan("split", (2, 1))]
        for plan in plans:
            runner.stopwatch = marks = Marks()
            runner.forward(requests.first(3), plan)
            assert marks.seen.startswith("<") and marks.seen.endswith(">")
            assert marks.seen.count("<") == 1


def test_close_frees_the_cache_and_may_be_called_again() -> None:
    runner = tiny_runner()
    cache = weakref.ref(runner.kv.k_cache[0])
    runner.close()
    runner.close()

    assert cache() is None


def test_closing_a_runner_leaves_the_cache_of_a_later_one_bound() -> None:
    first, second = tiny_runner(), tiny_runner()
    first.close()

    assert tiny_model().attention_modules[0].k_cache is second.kv.k_cache[0]
    assert second.forward(Requests(second).first(2)).next_token_logits.isfinite().all()
    second.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: must be at least 1"),
        ({"num_warmup_steps": 0}, "num_warmup_steps=0: must be at least 1"),
        ({"capture_sizes": ()}, "must be distinct batch sizes"),
        ({"capture_sizes": (0, 8)}, "must be distinct batch sizes"),
        ({"capture_sizes": (8, 8)}, "must be distinct batch sizes"),
        ({"capture_sizes": (8, 16)}, "ends at 16, above max_batch_size=8"),
        ({"padding": "exact", "on_miss": "error"}, "capture all sizes .capture=all., or set on_miss=eager"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype=int4: choose auto or one of float32"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_the_remedy(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**overrides)


def test_exact_padding_may_refuse_misses_when_every_size_is_captured() -> None:
    assert tiny_config(padding="exact", on_miss="error", capture_sizes=(3, 1, 2)).padding == "exact"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_with_the_remedy() -> None:
    with pytest.raises(RunnerError, match="device=cuda:0: this torch sees no CUDA device. Use device=cpu"):
        tiny_runner(device="cuda:0")


def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(
        RunnerError, match=r"the current device is cuda:0. Call torch.cuda.set_device\(1\) first"
    ):
        ModelRunner(tiny_model(), tiny_config(device="cuda:1"))
