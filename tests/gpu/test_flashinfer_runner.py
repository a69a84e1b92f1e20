"""A real decoder on FlashInfer through the graph runner: every batch size, against eager and transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from runners.attention.flashinfer_adapter import MissingKernelError, is_installed
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import LoadedModel, ModelSpec, load_model
from runners.padding import StepPlan
from tests.runners.tiny_runner import Requests

MAX_BATCH = 64
MAX_SEQ_LEN = 128
SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
#: Unlike lengths before, on and after the edges of pages of 16.
LENGTHS = [(3, 16, 17, 31, 1, 64, 33, 100)[i % 8] + i // 8 for i in range(MAX_BATCH)]
CONFIG: dict[str, object] = {
    **{"model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512},
    **{"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    spec = ModelSpec("random", dtype="bfloat16", seed=3, max_seq_len=MAX_SEQ_LEN, config=dict(CONFIG))
    return load_model(spec, "cuda")


@pytest.fixture(scope="module")
def runner(loaded: LoadedModel) -> Iterator[ModelRunner]:
    if not is_installed():
        pytest.skip("FlashInfer is not installed")
    config = RunnerConfig(
        device="cuda",
        max_batch_size=MAX_BATCH,
        max_seq_len=MAX_SEQ_LEN,
        capture_sizes=SIZES,
        attention_backend="flashinfer",
        poison_padding=True,
    )
    try:
        runner = ModelRunner(loaded, config)
    except MissingKernelError as error:
        if os.environ.get("FLASHINFER_DISABLE_JIT") is None:
            raise
        pytest.skip(str(error))
    with runner:
        yield runner


@pytest.fixture(scope="module")
def requests(runner: ModelRunner) -> Requests:
    return Requests(runner, LENGTHS)


def logits(runner: ModelRunner, batch: ForwardBatch, plan: StepPlan | None = None) -> torch.Tensor:
    return runner.forward(batch, plan).next_token_logits.clone()


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.03) -> bool:
    error = (got.float() - expected.float()).abs().max()
    return bool(error <= tolerance * expected.float().abs().max())


def test_every_batch_size_replays_what_eager_computes_large_then_small(
    runner: ModelRunner, requests: Requests
) -> None:
    for n in range(MAX_BATCH, 0, -1):
        batch = requests.first(n)
        replayed = logits(runner, batch)
        assert runner.outcome is not None and runner.outcome.mode == "graph"
        assert torch.equal(replayed, logits(runner, batch, StepPlan("eager", runner.outcome.sizes))), n
        assert close(replayed, logits(runner, batch, StepPlan("eager"))), n


def test_small_batches_after_large_ones_and_back(runner: ModelRunner, requests: Requests) -> None:
    alone = {n: logits(runner, requests.first(n)) for n in (1, 7, 64)}
    for n in (64, 1, 64, 7, 1, 64):
        assert torch.equal(logits(runner, requests.first(n)), alone[n])


def test_a_split_equals_its_parts(runner: ModelRunner, requests: Requests) -> None:
    batch = requests.first(50)
    split = logits(runner, batch, StepPlan("split", (48, 2)))
    first, second = logits(runner, batch.part(0, 48)), logits(runner, batch.part(48, 50))
    assert torch.equal(split, torch.cat([first, second]))


def test_every_batch_size_agrees_with_transformers_own_attention(
    runner: ModelRunner, requests: Requests, loaded: LoadedModel
) -> None:
    reference = transformers_model(loaded)
    expected = torch.cat([last_logits(reference, prompt) for prompt in requests.prompts])
    for n in range(1, MAX_BATCH + 1):
        assert close(logits(runner, requests.first(n)), expected[:n], tolerance=0.06), n


def transformers_model(loaded: LoadedModel) -> nn.Module:
    """The same weights in float32, attending as transformers does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    config = AutoConfig.for_model("qwen3", **fields)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).to("cuda")
    weights = {name: value for name, value in loaded.model.state_dict().items() if "_cache" not in name}
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def last_logits(model: nn.Module, prompt: object) -> torch.Tensor:
    ids = torch.as_tensor(prompt, device="cuda").unsqueeze(0)
    return model(input_ids=ids).logits[:, -1]


def test_planning_and_launching_never_wait_for_the_device(runner: ModelRunner, requests: Requests) -> None:
    assert runner.graph_runner is not None
    batches = [requests.first(n) for n in (64, 3, 17, 1, 33)]
    runner.graph_runner.poison_padding = False
    runner.forward(batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(50):
            runner.forward(batches[step % 5])
            assert runner.outcome is not None and runner.outcome.mode == "graph"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.graph_runner.poison_padding = True


def test_the_record_names_the_backend_and_what_it_holds(runner: ModelRunner) -> None:
    described = runner.attn_backend.describe()
    assert described["backend"] == "flashinfer" and described["fallback_reason"] is None
    assert isinstance(described["int_workspace_bytes"], int) and isinstance(described["pinned_bytes"], int)


def test_auto_takes_torch_with_a_reason_where_flashinfer_cannot_serve_the_model() -> None:
    config = {**CONFIG, "head_dim": 32}
    small = load_model(ModelSpec("random", dtype="bfloat16", max_seq_len=64, config=config), "cuda")
    settings = RunnerConfig(device="cuda", max_batch_size=2, max_seq_len=64, kind="eager")
    with (
        pytest.warns(RuntimeWarning, match="runs torch and not FlashInfer"),
        ModelRunner(small, settings) as r,
    ):
        assert r.attn_backend.name == "torch"
        assert "head_dim=32" in str(r.attn_backend.fallback_reason)
