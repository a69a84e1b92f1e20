from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from runners.model_runner import ModelRunner, RunnerConfig
from runners.models import packed_linear
from runners.models.packed_linear import PackedLinear, can_pack, pack_linears
from tests.runners.tiny_models import MAX_SEQ_LEN, paged_greedy, reference_greedy, tiny_model

pytestmark = pytest.mark.skipif(not can_pack(), reason="this CPU does not multiply packed bfloat16 weights")


def linear(num_inputs: int = 48, num_outputs: int = 32, bias: bool = False) -> nn.Linear:
    torch.manual_seed(num_outputs)
    return nn.Linear(num_inputs, num_outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (8,), (1, 5), (1, 130), (2, 3)])
def test_a_packed_layer_gives_what_the_plain_one_gives(shape: tuple[int, ...], bias: bool) -> None:
    plain = linear(bias=bias)
    x = torch.randn(*shape, 48, dtype=torch.bfloat16)
    torch.testing.assert_close(PackedLinear(plain)(x), plain(x))


def test_its_state_has_the_plain_weight() -> None:
    plain = linear(bias=True)
    state = PackedLinear(plain).state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


def test_layers_of_one_shape_share_a_compiled_graph() -> None:
    layers = [PackedLinear(linear()) for _ in range(12)]
    counter = CompileCounter()
    step = torch.compile(lambda layer, x: layer(x) * 2, backend=counter, fullgraph=True)
    x = torch.randn(1, 3, 48, dtype=torch.bfloat16)
    for layer in layers:
        assert torch.equal(step(layer, x), layer(x) * 2)
    assert counter.frame_count == 1


def test_a_packed_layer_that_is_gone_leaves_nothing() -> None:
    before = len(packed_linear._modules)
    layer = PackedLinear(linear())
    assert len(packed_linear._modules) == before + 1
    del layer
    gc.collect()
    assert len(packed_linear._modules) == before


def test_only_a_bfloat16_model_is_packed() -> None:
    def packed(dtype: str) -> list[nn.Module]:
        return [module for module in tiny_model(dtype=dtype).model.modules() if type(module) is PackedLinear]

    assert len(packed("bfloat16")) == 4 * 7 + 1
    assert not packed("float32") and not packed("float16")


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_stay_as_large_but_for_a_tied_head(tied: bool) -> None:
    plain, packed = (tiny_model(dtype=name, tie_word_embeddings=tied) for name in ("float16", "bfloat16"))
    table = plain.vocab_size * plain.hidden_size * 2
    assert packed.weight_bytes - plain.weight_bytes == (table if tied else 0)
    assert packed.decode_weight_bytes == plain.decode_weight_bytes
    assert packed.num_params == plain.num_params
    names = set(plain.model.state_dict()) - set(packed.model.state_dict())
    assert not names


def test_packing_frees_the_plain_weights() -> None:
    model = nn.Sequential(linear(), nn.ReLU())
    assert pack_linears(model) == 0
    assert not list(model.parameters())


def test_a_packed_model_decodes_as_transformers_does() -> None:
    loaded = tiny_model("qwen2", dtype="bfloat16")  # with biases
    prompts = [[5, 9, 3], list(range(20, 43))]
    config = RunnerConfig("cpu", max_batch_size=2, max_seq_len=MAX_SEQ_LEN, page_size=4, capture_sizes=(2,))
    with ModelRunner(loaded, config) as runner:
        ours = paged_greedy(runner, prompts, num_tokens=3, chunk=30)
    assert ours == reference_greedy(loaded.model, prompts, num_tokens=3)
