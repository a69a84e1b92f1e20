from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from runners.errors import UnsupportedModelError
from runners.models.families import REFUSED, SUPPORTED, check_family
from runners.models.loader import LOAD_STAGES, LoadedModel, ModelSpec, check_model, load_model
from runners.models.sources import ModelSourceError
from tests.runners.gguf_file import write_gguf
from tests.runners.tiny_models import MAX_SEQ_LEN, tiny_config, tiny_model, tiny_spec

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return dict(loaded.model.state_dict())


# --- random ------------------------------------------------------------------------------------


def test_the_seed_alone_decides_random_weights() -> None:
    torch.manual_seed(111)
    first = weights(tiny_model(seed=5))
    torch.manual_seed(222)
    second, other = weights(tiny_model(seed=5)), weights(tiny_model(seed=6))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_loading_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tiny_model()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "auto"])
def test_weights_come_in_the_dtype_asked_for(dtype: str) -> None:
    loaded = tiny_model(dtype=dtype)
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected} == {loaded.dtype}


def test_the_stages_of_a_load_are_reported_in_order() -> None:
    stages: list[str] = []
    load_model(tiny_spec(), "cpu", stages.append)
    assert tuple(stages) == LOAD_STAGES


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"model\.config\.model_type=None: is missing"),
        (
            tiny_config(num_hidden_layer=2),
            r"model\.config\.num_hidden_layer=2: Qwen3Config has no such field",
        ),
        (tiny_config(num_key_value_heads=3), r"num_key_value_heads=3: does not divide"),
        (tiny_config(hidden_size="wide"), r"'hidden_size' expected int"),
    ],
)
def test_a_wrong_field_of_a_random_config_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelSourceError, match=message):
        check_model(ModelSpec("random", config=config, max_seq_len=8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_len": 129}, "model.max_seq_len=129: model.config has 128 positions"),
        ({"source": "onnx"}, "model.source=onnx"),
        ({"implementation": "vllm"}, "model.implementation=vllm"),
        ({"source": "pretrained"}, "model.path=None"),
    ],
)
def test_a_wrong_model_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        check_model(replace(tiny_spec(), **change))
    assert str(caught.value).startswith(message)
    assert caught.value.remedy in str(caught.value)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype=int4: choose one of auto, float32"):
        tiny_model(dtype="int4")


# --- sizes -------------------------------------------------------------------------------------


def test_tied_weights_count_once_and_are_read_whole_in_a_step() -> None:
    tied, untied = tiny_model(tie_word_embeddings=True), tiny_model(tie_word_embeddings=False)
    table = untied.vocab_size * untied.hidden_size
    assert untied.num_params - tied.num_params == table
    assert untied.weight_bytes - tied.weight_bytes == table * 4
    assert tied.decode_weight_bytes == tied.weight_bytes
    assert untied.decode_weight_bytes == untied.weight_bytes - table * 4


def test_a_window_that_no_request_outgrows_is_full_attention() -> None:
    assert tiny_model("mistral", sliding_window=MAX_SEQ_LEN).groups[0].sliding_window is None
    assert tiny_model("mistral", sliding_window=MAX_SEQ_LEN - 1).groups[0].sliding_window == MAX_SEQ_LEN - 1


# --- refusals ----------------------------------------------------------------------------------


def write_config(folder: Path, **fields: Any) -> ModelSpec:
    """A folder with a config only: enough to be refused, and proof that no weight is read."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(b"never read")
    return ModelSpec("pretrained", path=str(folder), max_seq_len=16)


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_families_outside_the_list_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' is not supported") as caught:
        check_model(write_config(tmp_path, model_type=model_type))
    assert REFUSED[model_type] in str(caught.value)


def test_an_unknown_family_is_refused_with_the_list(tmp_path: Path) -> None:
    spec = write_config(tmp_path, model_type="my_own", auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(UnsupportedModelError, match="'my_own'.*not in the list.*llama, qwen2"):
        check_model(spec)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"num_local_experts": 8}, "experts"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"alibi": True}, "ALiBi"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "M-RoPE"),
        ({"vision_config": {"depth": 1}}, "more than text"),
    ],
)
def test_a_supported_type_with_a_foreign_feature_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_model(write_config(tmp_path, **tiny_config("llama"), **fields))


def test_linear_layers_in_a_supported_type_are_refused() -> None:
    config = check_model(tiny_spec())
    config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        check_family(config, "here")


def test_no_family_is_both_supported_and_refused() -> None:
    assert not set(SUPPORTED) & set(REFUSED)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_scaling_by_batch_length_is_refused_above_its_switch(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config("llama", rope_parameters={**rope, **factors})
    spec = ModelSpec("random", config=config, max_seq_len=32)
    check_model(spec)
    with pytest.raises(UnsupportedModelError, match=r"model\.max_seq_len=32 or less"):
        check_model(replace(spec, max_seq_len=33))


# --- a folder ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(seed=9).model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def spec_of(path: Path | str, **fields: Any) -> ModelSpec:
    return ModelSpec("pretrained", path=str(path), dtype="float32", max_seq_len=MAX_SEQ_LEN, **fields)


def test_a_folder_loads_to_the_same_weights(folder: Path) -> None:
    ours, saved_weights = load_model(spec_of(folder), "cpu"), weights(tiny_model(seed=9))
    assert all(torch.equal(tensor, saved_weights[name]) for name, tensor in weights(ours).items())
    assert ours.revision is None


def test_the_fingerprint_follows_the_content_not_the_place(folder: Path, tmp_path: Path) -> None:
    before = load_model(spec_of(folder), "cpu").fingerprint
    moved = folder.rename(tmp_path / "elsewhere")
    assert load_model(spec_of(moved), "cpu").fingerprint == before
    tensors = load_file(moved / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    assert load_model(spec_of(moved), "cpu").fingerprint != before


def test_sharded_weights_load(folder: Path, tmp_path: Path) -> None:
    model = load_model(spec_of(folder), "cpu").model
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    sharded = load_model(spec_of(tmp_path / "shards"), "cpu")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights(sharded).items())
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(ModelSourceError, match="the weights are incomplete: model-0.*is missing"):
        check_model(spec_of(tmp_path / "shards"))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def one_weight_short(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of_another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (only_pickles, "holds pickled weights only .pytorch_model.bin."),
        (no_weights, "holds neither model.safetensors nor"),
        (no_config, "there is no config.json"),
        (broken_config, "is not JSON"),
        (cut_weights, "a weight file is damaged"),
        (weights_of_another_width, "12 weights do not fit.*mismatched: "),
        (one_weight_short, "1 weights do not fit.*missing: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_folder_that_cannot_be_loaded_says_why(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(ModelSourceError, match=message):
        load_model(spec_of(folder), "cpu")


def test_a_folder_has_no_revisions(folder: Path) -> None:
    with pytest.raises(ModelSourceError, match="model.revision=main"):
        check_model(spec_of(folder, revision="main"))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(path: str) -> None:
    with pytest.raises(ModelSourceError, match="there is no such folder"):
        check_model(spec_of(path))


# --- the hub -----------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cache_repository(cache: Path, saved: Path) -> Path:
    """Lay out `org/tiny` as the hub client does after a download of its branch main."""
    repository = cache / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(saved, repository / "snapshots" / COMMIT))


def test_a_hub_id_that_cannot_be_reached_says_how_to_get_it(hub_cache: Path) -> None:
    with pytest.raises(ModelSourceError, match="hub cannot be reached.*hf download org/tiny"):
        check_model(spec_of("org/tiny"))


def test_a_misspelt_hub_id_is_refused(hub_cache: Path) -> None:
    with pytest.raises(ModelSourceError, match="neither a folder here nor a model on the hub"):
        check_model(spec_of("not a model"))


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_revision_is_resolved_to_its_commit(hub_cache: Path, saved: Path, revision: str | None) -> None:
    cache_repository(hub_cache, saved)
    loaded = load_model(spec_of("org/tiny", revision=revision), "cpu")
    assert (loaded.revision, loaded.fingerprint) == (COMMIT, None)
    expected = weights(tiny_model(seed=9))["lm_head.weight"]
    assert torch.equal(weights(loaded)["lm_head.weight"], expected)


def test_a_cached_repository_of_pickles_is_refused(hub_cache: Path, saved: Path) -> None:
    only_pickles(cache_repository(hub_cache, saved))
    with pytest.raises(ModelSourceError, match="holds pickled weights only"):
        check_model(spec_of("org/tiny"))


# --- GGUF --------------------------------------------------------------------------------------


def test_a_gguf_file_loads_to_the_weights_it_holds(tmp_path: Path) -> None:
    original = tiny_model(seed=9, head_dim=128)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original)
    loaded = load_model(ModelSpec("gguf", path=str(path), dtype="float32", max_seq_len=MAX_SEQ_LEN), "cpu")
    assert loaded.groups == original.groups and loaded.fingerprint is not None
    expected = weights(original)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(loaded).items())


def test_a_gguf_source_wants_a_gguf_file(folder: Path) -> None:
    with pytest.raises(ModelSourceError, match="is not a .gguf file"):
        check_model(ModelSpec("gguf", path=str(folder)))


def test_a_gguf_file_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match="model.revision=main: .* only a hub id has revisions"):
        check_model(ModelSpec("gguf", path=str(tmp_path / "model.gguf"), revision="main"))


@pytest.mark.parametrize("keep", [4, 200, -4])
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(head_dim=128))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelSourceError, match="cannot be read as a GGUF file"):
        load_model(ModelSpec("gguf", path=str(path), max_seq_len=MAX_SEQ_LEN), "cpu")


@pytest.mark.parametrize(
    ("architecture", "reason"), [("mamba", "recurrent state"), ("qwen3moe", "mixture of experts")]
)
def test_a_gguf_file_of_a_family_outside_the_list_is_refused(
    tmp_path: Path, architecture: str, reason: str
) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=reason):
        check_model(ModelSpec("gguf", path=str(path)))


def test_a_folder_with_a_gguf_file_says_how_to_load_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match=r"model.source=gguf model.path=.*model.gguf"):
        check_model(spec_of(tmp_path))
