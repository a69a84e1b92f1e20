"""The command to try after a job, chosen by what its record shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.record import Status
from harness.workload_shares import mode_shares, padding_waste

if TYPE_CHECKING:
    import pandas as pd

_MUCH_WASTE = 0.15
_FOLDERS = ("output_dir=", "hydra.", "sweep.", "tracking.dir=")
_OVERRIDE = re.compile(r"[+~]*[\w./@-]+=")


def next_command(result: Mapping[str, Any], steps: pd.DataFrame) -> tuple[str, str]:
    """Return a command line and, in a few words, why to try it."""
    changes, reason = _after_failure(result) or _after_success(result, steps)
    if changes == ["doctor"]:
        return "python -m harness doctor", reason
    before = _overrides(result)
    is_overlaid = any(word.startswith("experiment=") for word in before)
    if (
        is_overlaid
        and _field(result, "capture.sizes")
        and any(word.startswith("capture=") for word in changes)
    ):
        changes = [*changes, "capture.sizes=[]"]  # the overlay's list would stay, and goes with explicit only
    return shlex.join(["python", "-m", "harness", *_merged(before, changes)]), reason


def _after_failure(result: Mapping[str, Any]) -> tuple[list[str], str] | None:
    match result["status"]:
        case Status.OK | Status.SKIPPED | Status.RUNNING:
            return None
        case Status.CAPTURE_OOM:
            half = max(
                1, (_field(result, "capture.max_size") or _field(result, "runner.max_batch_size") or 2) // 2
            )
            return [f"capture.max_size={half}"], "capture half as far, which takes less memory"
        case Status.INTERRUPTED:
            return [], "run it again"
        case Status.PARITY_FAILED:
            return ["parity.on_failure=warn"], "measure all the same; every output will say UNVERIFIED"
        case Status.TIMEOUT:
            return ["measure=quick"], "measure fewer points in the same time"
        case _:
            return ["doctor"], "see what this machine can run"


def _after_success(result: Mapping[str, Any], steps: pd.DataFrame) -> tuple[list[str], str]:
    reasons = {share.reason: share.share for share in mode_shares(steps)}
    policy = _field(result, "capture.policy")
    if reasons.get("above_max"):
        largest = int(steps.loc[steps["phase"] == "decode", "batch_size"].max())
        change = f"capture.max_size={largest}" if policy != "explicit" else "capture=all"
        return [change], f"{reasons['above_max']:.0%} of the decode steps were above the largest capture size"
    waste = padding_waste(steps)
    if waste is not None and waste > _MUCH_WASTE and policy != "all":
        return ["capture=all"], f"{waste:.0%} of the replayed rows were padding"
    if _field(result, "workload.kind") != "trace":
        trace = ["workload=trace", "workload.path=YOUR_TRACE.csv", "workload.format=azure"]
        return trace, "replay your own traffic"
    return ["-m", "capture=vllm,sglang,all"], "compare the engines' capture lists on this traffic"


def _field(result: Mapping[str, Any], key: str) -> Any:
    group, name = key.split(".")
    return ((result["config"] or {}).get(group) or {}).get(name)


def _overrides(result: Mapping[str, Any]) -> list[str]:
    """The overrides that the job was started with, less where it wrote: the next job has its own folder."""
    command = (result["environment"] or {}).get("command") or []
    return [word for word in command[1:] if _OVERRIDE.match(word) and not word.startswith(_FOLDERS)]


def _merged(before: list[str], changes: list[str]) -> list[str]:
    """Replace what the changes set. Values below a group go with the choice they were meant for."""
    changed = {change.partition("=")[0] for change in changes}
    groups = tuple(f"{key}." for key in changed if "." not in key and not key.startswith("-"))
    kept = [
        word
        for word in before
        if (key := word.partition("=")[0].lstrip("+~")) not in changed and not key.startswith(groups)
    ]
    return kept + changes
