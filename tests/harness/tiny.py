"""The default model, small enough for a test to build a runner in a second."""

from __future__ import annotations

import copy
import functools
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
_SHORT = {
    "model.config.num_hidden_layers": 2,
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


def tiny_yaml(overrides: dict[str, Any] | None = None) -> str:
    """Return a resolved configuration of the tiny model, cut short; `overrides` are dotted keys."""
    config = copy.deepcopy(_defaults())
    for key, value in (_SHORT | (overrides or {})).items():
        *groups, name = key.split(".")
        functools.reduce(lambda group, part: group.setdefault(part, {}), groups, config)[name] = value
    return yaml.safe_dump(config, sort_keys=False)


@functools.cache
def _defaults() -> dict[str, Any]:
    """The schema's defaults with the tiny model; not to be changed."""
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(Config))  # type: ignore[assignment]
    config["model"] |= yaml.safe_load((_CONF / "model/tiny.yaml").read_text())
    return config


def tiny_config(overrides: dict[str, Any] | None = None) -> Config:
    return load_config(tiny_yaml(overrides))


def tiny_runner(overrides: dict[str, Any] | None = None, device_name: str = "cpu") -> ModelRunner:
    """Return a runner of the tiny model with graphs of sizes 2 and 4, emulated on a CPU."""
    config, device = tiny_config(overrides), torch.device(device_name)
    return ModelRunner(load_model(model_spec(config), device), runner_config(config, device))
