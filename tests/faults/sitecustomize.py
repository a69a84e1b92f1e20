"""Plants faults into the jobs of a test: Python imports this when its folder is on PYTHONPATH.

A job whose folder holds `script.py` runs that in the place of its experiment. In others, HARNESS_TEST_FAULTS, a JSON
object of seed → fault, says which jobs meet one when their size sweep begins. With HARNESS_TEST_LIGHT the fork server
imports torch only.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def _hang_deaf() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as in a call into a driver
    time.sleep(600)


def _fill_memory() -> None:
    held = bytearray(b"x") * (1 << 30)
    time.sleep(600)
    del held


def _crash() -> None:
    import ctypes

    ctypes.string_at(0)


def _raise() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered (planted)")


def _fault_cuda() -> None:
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    torch.cuda.synchronize()


FAULTS = {
    "exception": _raise,
    "crash": _crash,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
    "hang": lambda: time.sleep(600),
    "deaf": _hang_deaf,
    "memory": _fill_memory,
    "cuda": _fault_cuda,
}


def _plant(experiment: Any) -> None:
    planted = json.loads(os.environ.get("HARNESS_TEST_FAULTS", "{}"))
    run_job, size_sweep = experiment.run_job, experiment.Experiment.size_sweep

    def run_scripted(configuration: Any, job_dir: Any, *rest: Any) -> Any:
        script = Path(job_dir) / "script.py"
        if not script.exists():
            return run_job(configuration, job_dir, *rest)
        exec(script.read_text(), {"os": os, "sys": sys, "signal": signal, "time": time})
        sys.exit(0)

    def sweep_sizes(self: Any) -> None:
        fault = planted.get(str(self.config.seed))
        if fault is not None:
            FAULTS[fault]()
        size_sweep(self)

    experiment.run_job, experiment.Experiment.size_sweep = run_scripted, sweep_sizes


def _lighten(fork_server: Any) -> None:
    if "HARNESS_TEST_LIGHT" in os.environ:
        fork_server._MODULES = ("torch",)


PLANTS = {"harness.experiment": _plant, "harness.fork_server": _lighten}


class _Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a module as ever, then plants."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        self._loader.exec_module(module)
        PLANTS[self._name](module)


sys.meta_path[:0] = [_Planter(name) for name in PLANTS]
