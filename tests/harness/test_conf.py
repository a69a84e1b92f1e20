"""Every choice of every group composes into a configuration that runs or that is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.compose import compose, config_folder, config_path, group_choices
from harness.help import described_choices
from harness.model_cache import is_fetched
from harness.schema import Config, check, load_config
from runners.capture_sizes import POLICIES

GROUPS = ("model", "attention", "runner", "capture", "padding", "compile", "workload", "measure", "tracking")
CHOICES = [(group, choice) for group in GROUPS for choice in group_choices(group)]
#: Choice → the field that must carry its name.
NAMED = {
    "model": "name",
    "attention": "backend",
    "runner": "kind",
    "capture": "policy",
    "padding": "strategy",
    "compile": "mode",
    "tracking": "mode",
}
#: What a choice cannot do without.
NEEDS = {
    "workload=trace": ["workload.path={trace}"],
}


def composed(*overrides: str) -> Config:
    config = load_config(compose(overrides))
    check(config)
    return config


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    return file


def test_the_default_job_composes() -> None:
    config = composed()
    assert (config.model.name, config.capture.policy, config.tracking.mode) == ("tiny", "vllm", "offline")


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{group}={choice}" for group, choice in CHOICES])
def test_every_choice_composes_and_carries_its_name(group: str, choice: str, trace: Path) -> None:
    needs = [text.format(trace=trace) for text in NEEDS.get(f"{group}={choice}", [])]
    config = load_config(compose([f"{group}={choice}", *needs]))
    if group in NAMED:
        assert getattr(getattr(config, group), NAMED[group]) == choice
    if f"{group}={choice}" in ("attention=flashinfer", "attention=triton"):
        return  # needs a GPU
    if f"{group}={choice}" == "capture=planned":
        return  # needs a plan: see test_capture_list
    if f"{group}={choice}" == "model=smollm2_135m" and not is_fetched(choice):
        return  # refused with the remedy: see test_real_weights
    check(config)


def test_every_choice_explains_itself_in_its_first_line() -> None:
    for group in (*GROUPS, "hydra/launcher", "hydra/sweeper", "experiment"):
        for choice, text in described_choices(group).items():
            assert text, f"conf/{group}/{choice}.yaml"


def test_every_engine_list_is_a_choice_and_the_other_way_round() -> None:
    assert set(group_choices("capture")) == {*POLICIES, "explicit", "planned"}


@pytest.mark.parametrize("name", group_choices("experiment"))
def test_every_experiment_composes_and_runs(name: str) -> None:
    composed(f"experiment={name}", *(["device=cpu"] if name.startswith("gpu_") else []))


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("smollm2_135m", 134_515_008),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_8b", 8_190_735_360),
        ("llama3_2_1b", 1_235_814_400),
        ("llama3_1_8b", 8_030_261_248),
        ("mistral_7b", 7_241_732_096),
    ],
)
def test_a_preset_has_the_parameters_of_the_published_model(name: str, num_params: int) -> None:
    shape = yaml.safe_load(config_folder().joinpath(f"model/{name}.yaml").read_text())["config"]
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    attention = 2 * hidden * head_dim * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    head_norms = 2 * head_dim if shape["model_type"] == "qwen3" else 0
    layer = attention + head_norms + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    embeddings = shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)
    assert embeddings + shape["num_hidden_layers"] * layer + hidden == num_params


def test_no_configuration_names_a_python_object() -> None:
    for file in Path(__file__).parents[2].joinpath("conf").rglob("*.yaml"):
        assert "_target_" not in file.read_text(), file


def test_the_groups_are_those_beside_the_code_whatever_is_installed() -> None:
    checkout = Path(__file__).parents[2]
    assert config_path() == str(checkout / "conf")
    assert Path(str(config_folder())) == checkout / "conf"
