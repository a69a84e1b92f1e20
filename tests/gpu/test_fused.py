"""The fused layers on a GPU: against transformers, and against themselves launched otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.clock import FixedClock
from harness.executor import ModelExecutor
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import StepHandle, run_loop
from harness.workload.base import Workload
from runners.attention.triton_backend import TritonAttentionBackend
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.fused.launch import compile_ahead
from runners.models.fused.recipe import VENDOR
from runners.models.loader import LoadedModel, ModelSpec, load_model
from runners.padding import StepPlan
from runners.sampling import Sampling
from tests.gpu.test_flashinfer_runner import close, logits
from tests.runners.test_sampling import decode as sampled_tokens
from tests.runners.tiny_runner import Requests

MAX_BATCH, MAX_SEQ_LEN = 64, 128
SIZES = (1, 2, 8, 32, 64)
LENGTHS = [(3, 16, 17, 31, 1, 64, 33, 100)[i % 8] + i // 8 for i in range(MAX_BATCH)]
#: One layer's sizes are those of Qwen3 0.6B, which the shipped table knows; the vocabulary is not.
CONFIG: dict[str, object] = {
    **{"model_type": "qwen3", "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072},
    **{"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
#: Of the requests that are served with one step or two in flight.
PROMPT_LENS = np.array([5, 31, 17, 2, 40], dtype=np.int32)
OUTPUT_LENS = np.array([40, 25, 1, 33, 12], dtype=np.int32)
SPEC = ModelSpec("random", dtype="bfloat16", seed=3, max_seq_len=MAX_SEQ_LEN, config=dict(CONFIG))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(replace(SPEC, implementation="fused"), "cuda")


@pytest.fixture(scope="module")
def runner(loaded: LoadedModel) -> Iterator[ModelRunner]:
    config = RunnerConfig("cuda", MAX_BATCH, MAX_SEQ_LEN, SIZES, poison_padding=True)
    with ModelRunner(loaded, config) as runner:
        yield runner


@pytest.fixture(scope="module")
def narrow() -> LoadedModel:
    """transformers' own layers in bfloat16."""
    loaded = load_model(SPEC, "cuda")
    loaded.model.set_attn_implementation("eager")
    return loaded


@pytest.fixture(scope="module")
def exact() -> LoadedModel:
    """The same weights in float32."""
    loaded = load_model(SPEC, "cuda")
    loaded.model.set_attn_implementation("eager")
    loaded.model.float()
    return loaded


@pytest.fixture(scope="module")
def requests(runner: ModelRunner) -> Requests:
    return Requests(runner, LENGTHS)


def test_auto_takes_our_own_attention_and_dependent_launch(runner: ModelRunner) -> None:
    assert isinstance(runner.attn_backend, TritonAttentionBackend) and runner.tuning is not None
    modern = torch.cuda.get_device_capability() >= (9, 0)
    assert runner.attn_backend.pdl == modern == runner.tuning.dependent_launch
    assert {choice.source for choice in runner.tuning.choices} <= {
        "table",
        "measured",
        "neighbour",
        "default",
    }


def test_every_batch_size_replays_what_eager_computes(runner: ModelRunner, requests: Requests) -> None:
    for n in range(MAX_BATCH, 0, -1):
        batch = requests.first(n)
        replayed = logits(runner, batch)
        assert runner.outcome is not None and runner.outcome.mode == "graph"
        assert torch.equal(replayed, logits(runner, batch, StepPlan("eager", runner.outcome.sizes))), n
        assert close(replayed, logits(runner, batch, StepPlan("eager"))), n


def test_the_token_ids_are_the_largest_logits(runner: ModelRunner, requests: Requests) -> None:
    for n in (1, 5, 33, 64):
        output = runner.forward(requests.first(n))
        assert output.next_token_ids is not None
        assert torch.equal(output.next_token_ids, output.next_token_logits.float().argmax(-1))


def test_the_error_is_that_of_bfloat16(
    narrow: LoadedModel, exact: LoadedModel, runner: ModelRunner, requests: Requests
) -> None:
    """At most 1.5 times the error of transformers' own bfloat16, both against float32."""
    theirs, right = (
        torch.cat([_logits(loaded, prompt) for prompt in requests.prompts]) for loaded in (narrow, exact)
    )
    for n in SIZES:
        ours = _relative(logits(runner, requests.first(n)), right[:n])
        error = max(_relative(theirs, right), _relative(theirs[:n], right[:n]))
        assert ours <= 1.5 * error, (n, ours, error)


def test_dependent_launch_changes_no_bit(
    loaded: LoadedModel, runner: ModelRunner, requests: Requests
) -> None:
    backend, model = runner.attn_backend, loaded.model
    assert isinstance(backend, TritonAttentionBackend)

    def steps(pdl: bool) -> list[torch.Tensor]:
        backend.pdl = model.pdl = pdl  # type: ignore[assignment]
        return [logits(runner, requests.first(n), StepPlan("eager", (n,))) for n in SIZES]

    before = backend.pdl
    try:
        with compile_ahead():  # the kernels that the fixture did not need, side by side
            steps(pdl=False)
        without = steps(pdl=False)
        for n, one, other in zip(SIZES, without, steps(before), strict=True):
            assert torch.equal(one, other), n
    finally:
        backend.pdl = model.pdl = before  # type: ignore[assignment]


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_a_layer_is_five_to_nine_kernels(runner: ModelRunner, requests: Requests, batch_size: int) -> None:
    runner.forward(requests.first(batch_size))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        runner.forward(requests.first(batch_size), StepPlan("graph", (batch_size,)))
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in names if not name.startswith(("Mem", "mem"))]
    # Around the layers: embedding, head, arg max, what poison mode fills, the copies to the outputs.
    of_layers = [
        k for k in kernels if any(w in k for w in ("gemv", "gemm", "attention", "nvjet", "silu", "rms"))
    ]
    assert 5 * 3 <= len(of_layers) <= 9 * 3 + 3, kernels


def test_a_replay_copies_nothing_on_the_device(runner: ModelRunner, requests: Requests) -> None:
    """The head writes to the output, the arg max to the token ids."""
    graphs, choice = runner.graph_runner, runner.loaded.model.choice
    assert graphs is not None
    for n in SIZES:
        if VENDOR in (choice.recipe("output", n), choice.recipe("down", n)):
            continue  # torch copies the residual for cuBLAS to add to
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graphs.graphs[n].replay()
            torch.cuda.synchronize()
        names = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert names and not [k for k in names if "memcpy" in k.lower() or "copy_kernel" in k.lower()], names


@pytest.mark.parametrize(
    ("implementation", "sampling"),
    [
        ("fused", Sampling(0.8, seed=5)),
        ("fused", Sampling(1.5, top_k=20, seed=5)),
        ("fused", Sampling(1.5, top_p=0.9, seed=5)),
        ("transformers", Sampling(1.5, top_p=0.9, seed=5)),
    ],
)
def test_replay_samples_what_eager_does_from_the_same_seed(
    loaded: LoadedModel, implementation: str, sampling: Sampling
) -> None:
    model = loaded if implementation == "fused" else load_model(SPEC, "cuda")
    with ModelRunner(model, RunnerConfig("cuda", 8, MAX_SEQ_LEN, (8,), sampling=sampling)) as runner:
        replayed = sampled_tokens(runner, None)
        assert sampled_tokens(runner, StepPlan("eager", (8,))) == replayed == sampled_tokens(runner, None)
        assert len({tuple(step) for step in replayed}) > 1, "every replay drew the same numbers"


class _Remembering(ModelExecutor):
    """Keeps the whole text of each request. If it is late, the device rests before each step."""

    def __init__(self, runner: ModelRunner, max_in_flight: int, is_late: bool) -> None:
        super().__init__(runner, 3, max_in_flight)
        self.texts: dict[int, list[int]] = {}
        self._is_late = is_late

    def launch(self, step: ScheduledStep) -> StepHandle:
        if self._is_late:
            torch.cuda._sleep(
                1_000_000
            )  # half a millisecond, in which the host writes what is copied after it
        return super().launch(step)

    def finish(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self.texts[request_id] = self.generated(request_id, prompt_len=0).tolist()
        super().finish(request_ids)


def serve(runner: ModelRunner, max_in_flight: int, is_late: bool = False) -> dict[int, list[int]]:
    """The prompt and answer of each request, served by the scheduler's loop over a pool of 8 pages."""
    policy = SchedulerPolicy(SchedulerLimits(4, 8, 16, 24, MAX_SEQ_LEN))
    executor = _Remembering(runner, max_in_flight, is_late)
    workload = Workload(np.zeros(len(PROMPT_LENS)), PROMPT_LENS, OUTPUT_LENS)
    run_loop(policy, executor, FixedClock(1.0), workload, [].append, [].append, max_in_flight)
    return executor.texts


def test_overlap_changes_no_token(loaded: LoadedModel) -> None:
    """With one captured size a row is computed the same way in whatever step it is: so any difference is a race."""
    with ModelRunner(loaded, RunnerConfig("cuda", 4, MAX_SEQ_LEN, (4,), num_pages=9)) as runner:
        one = serve(runner, max_in_flight=1)
        assert [len(one[i]) for i in range(5)] == (PROMPT_LENS + OUTPUT_LENS).tolist()
        assert serve(runner, max_in_flight=2) == one
        assert serve(runner, max_in_flight=2, is_late=True) == one


def test_overlap_of_steps_that_are_split_changes_no_token(loaded: LoadedModel) -> None:
    """Each part brings its own inputs, and ids that the step before has left on the device."""
    config = RunnerConfig("cuda", 4, MAX_SEQ_LEN, (2,), num_pages=9, above_max="split")
    with ModelRunner(loaded, config) as runner:
        one = serve(runner, max_in_flight=1)
        assert runner.graph_runner is not None
        assert any(mode == "split" for mode, _ in runner.graph_runner.outcome_counts)
        assert serve(runner, max_in_flight=2) == one
        assert serve(runner, max_in_flight=2, is_late=True) == one


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_page_that_reaches_the_device_after_its_step_changes_no_token(
    loaded: LoadedModel, max_in_flight: int
) -> None:
    with ModelRunner(loaded, RunnerConfig("cuda", 4, MAX_SEQ_LEN, (4,), num_pages=9)) as runner:
        assert runner.attn_backend.looks_up_past_only
        late = serve(runner, max_in_flight)
        runner.attn_backend.looks_up_past_only = False
        assert serve(runner, max_in_flight) == late


def test_overlap_over_several_sizes_changes_no_more_than_rounding(
    loaded: LoadedModel, narrow: LoadedModel, exact: LoadedModel
) -> None:
    """A request's step may have another size with two in flight, and a near tie may fall the other way there."""
    with ModelRunner(loaded, RunnerConfig("cuda", 4, MAX_SEQ_LEN, (1, 2, 4), num_pages=9)) as runner:
        one, two = serve(runner, max_in_flight=1), serve(runner, max_in_flight=2)
        assert serve(runner, max_in_flight=2, is_late=True) == two
    for texts in (one, two):
        for request_id, text in texts.items():
            regret = _largest_regret(text, int(PROMPT_LENS[request_id]), narrow, exact)
            assert regret <= 3, (request_id, regret, one[request_id], two[request_id])


def _largest_regret(text: list[int], prompt_len: int, narrow: LoadedModel, exact: LoadedModel) -> float:
    """By how much an answer's token is not the largest logit along its own text, in errors of bfloat16 there."""
    answer = torch.tensor(text[prompt_len:]).cuda()
    logits, rough = (_logits(loaded, np.array(text[:-1]), len(answer)).float() for loaded in (exact, narrow))
    noise = (rough - logits).abs().amax(-1)
    regret = logits.amax(-1) - logits.gather(1, answer[:, None])[:, 0]
    return float((regret / noise).max())


def _logits(loaded: LoadedModel, tokens: np.ndarray, num_kept: int = 1) -> torch.Tensor:
    """Of the last `num_kept` tokens, by transformers alone."""
    with torch.no_grad():
        ids = torch.from_numpy(tokens)[None].cuda()
        return loaded.model(ids, use_cache=False, logits_to_keep=num_kept).logits[0]


def _relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())
