"""The hash of a configuration follows all that changes what is measured, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config_hash import config_hash
from tests.harness.job_folder import CONFIG, ENVIRONMENT


class TestConfigHash:
    def test_ignores_where_the_job_writes_publishes_and_belongs(self) -> None:
        other = CONFIG | {"output_dir": "elsewhere", "tracking": {}, "job": {}, "sweep": {"id": "other"}}
        assert config_hash(CONFIG, ENVIRONMENT) == config_hash(other, ENVIRONMENT)

    @pytest.mark.parametrize(
        "environment",
        [ENVIRONMENT | {"device_name": "NVIDIA H200"}, ENVIRONMENT | {"versions": {"torch": "2.11.0"}}],
    )
    def test_follows_the_gpu_and_the_packages(self, environment: dict[str, object]) -> None:
        assert config_hash(CONFIG, ENVIRONMENT) != config_hash(CONFIG, environment)

    def test_follows_the_configuration_and_the_hub_commit(self) -> None:
        assert config_hash(CONFIG, ENVIRONMENT) != config_hash(CONFIG | {"seed": 1}, ENVIRONMENT)
        assert config_hash(CONFIG, ENVIRONMENT) != config_hash(CONFIG, ENVIRONMENT, hub_commit="abc")

    @pytest.mark.parametrize(
        "field",
        ["workload.path", "capture.plan_path", "padding.costs_path", "workload.costs_path", "model.path"],
    )
    def test_follows_the_content_of_the_files_named(self, tmp_path: Path, field: str) -> None:
        group, name = field.split(".")
        file = tmp_path / "file"
        config = CONFIG | {group: CONFIG[group] | {name: str(file)}}
        file.write_text("one")
        before = config_hash(config, ENVIRONMENT)
        file.write_text("another")
        assert config_hash(config, ENVIRONMENT) != before

    def test_follows_the_weights_in_a_model_folder_and_nothing_else_there(self, tmp_path: Path) -> None:
        config = CONFIG | {"model": CONFIG["model"] | {"path": str(tmp_path)}}
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        before = config_hash(config, ENVIRONMENT)
        (tmp_path / "README.md").write_text("words")
        assert config_hash(config, ENVIRONMENT) == before
        (tmp_path / "model.safetensors").write_bytes(b"other weights")
        assert config_hash(config, ENVIRONMENT) != before
