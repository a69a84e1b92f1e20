"""Where weights come from, through the front door: packaged, hub and GGUF models, or the remedy."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from harness.__main__ import main
from harness.compose import compose
from harness.config_hash import config_hash
from harness.experiment import run_job
from harness.progress import Progress
from harness.record import Status
from harness.record_reader import read_result
from harness.schema import load_config
from runners.models.loader import ModelSpec, load_model
from tests.harness.tiny import tiny_yaml
from tests.runners.gguf_file import write_gguf
from tests.runners.tiny_models import tiny_model

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
ONLY_BUILD = {"model.max_seq_len": 64, "measure.enabled": False, "workload.enabled": False}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs write under the current folder, and Hydra replaces the root logger's handlers."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache as after a download of `org/tiny`, branch main, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    tiny_model(seed=9).model.save_pretrained(repository / "snapshots" / COMMIT)
    return tmp_path


def run_here(**changes: Any) -> dict[str, Any]:
    """Run a job that only builds, captures and proves parity, and return its result."""
    fields = {f"model.{key}": value for key, value in changes.items()}
    run_job(tiny_yaml({**ONLY_BUILD, "model.config": {}, **fields}), "job", Progress(quiet=True))
    result: dict[str, Any] = read_result("job")
    return result


def test_smollm2_without_its_weights_stops_with_2_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDAGRAPH_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "harness.experiment.run_job", lambda *_: pytest.fail("the job went on without weights")
    )
    assert main(["model=smollm2_135m"]) == 2
    printed = capsys.readouterr().err
    assert "the weights were not fetched yet: run make smollm2" in printed
    assert printed.count("\n") == 1


def test_the_record_names_the_commit_that_a_branch_stood_for(hub_cache: Path) -> None:
    result = run_here(source="pretrained", path="org/tiny", revision="main")
    assert result["status"] == Status.OK
    assert result["model"]["revision"] == COMMIT
    assert result["config"]["model"]["revision"] == "main"


def test_the_hash_of_a_job_follows_the_commit(hub_cache: Path) -> None:
    first = run_here(source="pretrained", path="org/tiny")
    repository, other = hub_cache / "models--org--tiny", COMMIT[::-1]
    (repository / "snapshots" / COMMIT).rename(repository / "snapshots" / other)
    (repository / "refs" / "main").write_text(other)
    (Path("job") / "result.json").rename("first.json")
    second = run_here(source="pretrained", path="org/tiny")
    assert (first["model"]["revision"], second["model"]["revision"]) == (COMMIT, other)
    assert first["config_hash"] != second["config_hash"]


def test_a_hub_id_out_of_reach_is_an_invalid_configuration_with_the_remedy(hub_cache: Path) -> None:
    result = run_here(source="pretrained", path="org/other")
    assert result["status"] == Status.INVALID_CONFIG
    assert "hf download org/other" in result["error"]["message"]


def test_a_gguf_file_runs_and_its_content_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(seed=9, head_dim=128))
    result = run_here(source="gguf", path=str(path))
    assert result["status"] == Status.OK, result["error"]
    assert result["parity"]["verified"] is True
    assert (result["model"]["source"], result["model"]["dtype"]) == ("gguf", "float32")
    assert len(result["model"]["fingerprint"]) == 64


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.source=gguf"], "model.path=null: model.source=gguf needs a file"),
        (["model.source=gguf", "model.path=none.gguf"], "model.path=none.gguf: no such file"),
        (["model.source=gguf", "model.path=."], "model.path=.: model.source=gguf needs a file"),
    ],
)
def test_a_gguf_source_without_a_file_is_refused(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("source", ["random", "gguf"])
def test_a_revision_without_a_hub_id_is_refused(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"model.source={source}", "model.revision=main"]) == 2
    assert f"model.revision=main: unused with model.source={source}" in capsys.readouterr().err


def test_gguf_without_its_packages_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "harness.rules.find_spec", lambda name: None if name == "accelerate" else find_spec(name)
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["model.source=gguf", "model.path=model.gguf"]) == 2
    printed = capsys.readouterr().err
    assert "accelerate is not installed: pip install 'cudagraph-harness[gguf]'" in printed


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    tiny_model().model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')\n")
    loaded = load_model(ModelSpec("pretrained", path=str(folder), max_seq_len=64), "cpu")
    assert type(loaded.model).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model.source=gguf", "model.path=/data/Llama-3.2.Q4.gguf"], "Llama-3.2.Q4"),
        (["model.source=pretrained", "model.path=/data/my_model/"], "my_model"),
        (["model=qwen3_0_6b", "model.source=pretrained", "model.path=Qwen/Qwen3-1.7B"], "Qwen3-1.7B"),
        (["model.source=pretrained", "model.path=org/x", "model.name=mine"], "mine"),
        (["model=smollm2_135m"], "smollm2_135m"),
        (["model=smollm2_135m", "model.path=/data/other"], "other"),
    ],
)
def test_a_checkpoint_has_its_own_name_and_no_shape_of_a_preset(overrides: list[str], name: str) -> None:
    model = load_config(compose(overrides)).model
    assert (model.name, model.config) == (name, {})


def test_random_weights_keep_the_name_and_the_shape_of_their_preset() -> None:
    model = load_config(compose(["model=qwen3_0_6b"])).model
    assert (model.name, model.config["hidden_size"]) == ("qwen3_0_6b", 1024)


def test_the_content_of_weights_below_the_home_folder_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    hashes = set()
    for content in (b"one", b"two"):
        (tmp_path / "model.gguf").write_bytes(content)
        config = {"model": {"source": "gguf", "path": "~/model.gguf"}}
        hashes.add(config_hash(config, {"versions": {"torch": "2"}}))
    assert len(hashes) == 2
