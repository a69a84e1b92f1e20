"""The default model, small enough for a test to build a runner in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf

from harness.build import model_spec, runner_config
from harness.schema import Config, load_config
from runners.model_runner import ModelRunner
from runners.models.loader import load_model

_CONF = Path(__file__).parents[2] / "conf"


def tiny_yaml(overrides: dict[str, Any] | None = None) -> str:
    """Return a resolved configuration of the tiny model, cut short; `overrides` are dotted keys."""
    config = OmegaConf.structured(Config)
    config = OmegaConf.create(OmegaConf.to_container(config))
    config.model = OmegaConf.merge(config.model, yaml.safe_load((_CONF / "model/tiny.yaml").read_text()))
    shortened = {
        "runner.max_batch_size": 4,
        "capture.policy": "explicit",
        "capture.sizes": [2, 4],
        "measure.batch_sizes": [2, 3],
        "measure.context_lens": [24],
        "measure.prefill_tokens": [16],
        "measure.min_samples": 8,
        "measure.timeout_s": 0.05,
        "measure.num_warmup": 1,
        "workload.max_requests": 6,
        "workload.prompt_len": 12,
        "workload.output_len": 5,
        "tracking.mode": "disabled",
    }
    for key, value in (shortened | (overrides or {})).items():
        OmegaConf.update(config, key, value)
    return OmegaConf.to_yaml(config)


def tiny_config(overrides: dict[str, Any] | None = None) -> Config:
    return load_config(tiny_yaml(overrides))


def tiny_runner(overrides: dict[str, Any] | None = None, device_name: str = "cpu") -> ModelRunner:
    """Return a runner of the tiny model with graphs of sizes 2 and 4, emulated on a CPU."""
    config, device = tiny_config(overrides), torch.device(device_name)
    return ModelRunner(load_model(model_spec(config), device), runner_config(config, device))
