"""Preparing a bundle for an offline GPU machine, and installing it, with a wheel made on the spot."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
KERNEL = "batch_decode_bf16"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()
) -> Path:
    """Write a minimal wheel of `name` with these files."""
    stem = name.replace("-", "_")
    wheel = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a stand-in for FlashInfer and one kernel."""
    folder = tmp_path / "bundle"
    make_wheel(folder / "wheels", "flashinfer-python", "0.7.4", {"flashinfer/__init__.py": ""})
    make_wheel(folder / "wheels", "apache-tvm-ffi", "0.1.15.post2", {"tvm_ffi/__init__.py": ""})
    library = folder / "kernels" / KERNEL / f"{KERNEL}.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"machine code")
    built_with = {"arch": "9.0a", "flashinfer-python": "0.7.4", "apache-tvm-ffi": "0.1.15.post2"}
    manifest = {"built_with": built_with, "seconds": {KERNEL: 15.0}}
    (folder / "kernels" / "manifest.json").write_text(json.dumps(manifest))
    return folder


def install(bundle: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "install_offline.py"), str(bundle), "--target", str(target)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_bundle_installs_without_a_network_and_its_kernels_lie_where_flashinfer_looks(
    bundle: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    result = install(bundle, site)
    assert result.returncode == 0, result.stderr
    placed = site / "flashinfer" / "data" / "aot" / KERNEL / f"{KERNEL}.so"
    assert placed.read_bytes() == b"machine code"
    assert f"export PYTHONPATH={site}" in result.stdout


def test_kernels_of_another_version_are_refused(bundle: Path, tmp_path: Path) -> None:
    manifest = bundle / "kernels" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"0.7.4"', '"0.7.3"'))
    result = install(bundle, tmp_path / "site")
    assert result.returncode == 1
    assert "built with flashinfer-python 0.7.3, but 0.7.4 is installed" in result.stderr


def test_the_manifest_refuses_kernels_for_another_architecture(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_kernels = load("build_kernels")
    versions = {"flashinfer-python": "0.7.4", "apache-tvm-ffi": "0.1.15.post2"}
    monkeypatch.setattr(build_kernels.importlib.metadata, "version", versions.__getitem__)
    build_kernels.write_manifest(bundle / "kernels", "9.0a", {"another": 1.0})
    seconds = json.loads((bundle / "kernels" / "manifest.json").read_text())["seconds"]
    assert seconds == {KERNEL: 15.0, "another": 1.0}
    with pytest.raises(SystemExit, match=r"built with .*'arch': '9\.0a'.*'arch': '8\.0'"):
        build_kernels.write_manifest(bundle / "kernels", "8.0", {})


def test_requirements_are_followed_through_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = load("prepare_wheels")
    needs = {
        "first": ("second>=1", "present", "torch>=2", "linux-only; sys_platform == 'linux'"),
        "second": ("first", "windows-only; sys_platform == 'win32'", "optional; extra == 'gpu'"),
        "linux-only": (),
    }
    fetched = []

    def fetch(requirement, target, wheels: Path) -> Path:
        fetched.append(str(requirement))
        return make_wheel(wheels, requirement.name, "1", {}, needs[requirement.name])

    monkeypatch.setattr(prepare, "fetch", fetch)
    target, pin = prepare.Target("3.12", 28), prepare.Requirement("second==1.5")
    prepare.collect(prepare.Requirement("first"), target, tmp_path, {"present"}, {"second": pin})
    assert fetched == ["first", "second==1.5", 'linux-only; sys_platform == "linux"']


def test_what_comes_with_the_machine_is_never_fetched() -> None:
    prepare = load("prepare_wheels")
    for name in ("torch", "triton", "nvidia-cublas", "cuda-python", "nccl4py"):
        assert prepare.NEVER_FETCHED.fullmatch(name)
    for name in ("nvidia-ml-py", "transformers", "apache-tvm-ffi"):
        assert not prepare.NEVER_FETCHED.fullmatch(name)


def test_a_freeze_list_is_read_by_name(tmp_path: Path) -> None:
    listed = tmp_path / "present.txt"
    listed.write_text("PyYAML==6.0.3\nhuggingface_hub==1.33.0\nmine @ file:///somewhere\n\n")
    assert load("prepare_wheels").read_present(listed) == {"pyyaml", "huggingface-hub", "mine"}


def test_a_wheel_without_sources_keeps_what_python_reads(tmp_path: Path) -> None:
    kept = ["flashinfer/decode.py", "flashinfer/data/csrc/batch_decode_customize_config.jinja"]
    dropped = ["flashinfer/data/cutlass/a.h", "flashinfer/data/csrc/deep/kernel.cu"]
    wheel = make_wheel(tmp_path, "flashinfer-python", "0.7.4", dict.fromkeys(kept + dropped, ""))
    load("prepare_wheels").drop_sources(wheel)
    names = zipfile.ZipFile(wheel).namelist()
    assert set(kept) <= set(names) and not set(dropped) & set(names)
