"""Publishes a recorded job folder to Weights & Biases.

Reads only the recorded files, so a job can be published by the process that ran it, or by another one
after a crash: `python -m harness.tracking JOB_DIR`. What goes wrong here never costs a result: it ends
as `wandb: {status: failed, reason: …}` in `result.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.record import JobRecord, RecordError
from harness.record_reader import read_result
from harness.scrub import scrub
from harness.wandb_key import has_key

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

#: Everything together may take this long before the job goes on without W&B.
TIMEOUT_S = {"offline": 60.0, "online": 300.0}
_MIN_FREE_BYTES = 16 * 1024**2
_MAX_TAG_LENGTH = 64
_INIT_S = 60.0
_FLUSH_S = 5.0
_TEARDOWN_S = 5.0


class PublishError(RuntimeError):
    """W&B cannot take the run; the message is the reason that the record keeps."""


def publish(job_dir: str | Path, timeout_s: float | None = None) -> dict[str, Any]:
    """Publish a finished job and return (and record) `{status, reason, dir, mode, run_id}`.

    `status` is `ok`, `disabled` or `failed`; `dir` is the folder of the W&B run. A job that is
    published already stays so: one run a job. Call it after the final status is recorded, as the
    run's exit code follows from it. Raises only RecordError, for a folder that holds no record.
    """
    job_dir = Path(job_dir).absolute()  # what is recorded must not depend on where this process stands
    result = read_result(job_dir)
    if (result["wandb"] or {}).get("status") == "ok":
        return dict(result["wandb"])
    tracking = (result["config"] or {}).get("tracking") or {}
    mode = str(tracking.get("mode", "offline"))
    outcome: dict[str, Any] = {
        "status": "disabled",
        "reason": None,
        "dir": None,
        "mode": mode,
        "run_id": None,
    }
    if mode != "disabled":
        limit_s = timeout_s or TIMEOUT_S.get(mode, TIMEOUT_S["online"])
        try:
            outcome |= _within(limit_s, lambda: _publish(job_dir, result, limit_s))
        except PublishError as error:
            outcome |= {"status": "failed", "reason": str(error)}
        except BaseException as error:
            reason = f"{type(error).__name__}; publish again with `{_command(str(job_dir))}`"
            _note(job_dir, outcome | {"status": "failed", "reason": reason})
            raise
    return _note(job_dir, outcome)


def _note(job_dir: str | Path, outcome: dict[str, Any]) -> dict[str, Any]:
    """Record how the publishing went, and return it."""
    try:
        JobRecord.attach(job_dir).update(wandb=outcome)
    except OSError as error:  # W&B may have filled the disk itself; the record stands as it was
        outcome |= {"status": "failed", "reason": f"cannot note it in result.json: {error.strerror}"}
    return dict(scrub(outcome))


def _within(limit_s: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` on a thread of its own, and give up after `limit_s` seconds: W&B may hang for good.

    Raises PublishError for all that goes wrong there; an interrupt of the caller passes through.
    """
    done: list[dict[str, Any]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # W&B raises errors of its own, OSError, SystemExit
            failed.append(error)

    thread = threading.Thread(target=run, name="wandb-publish", daemon=True)
    thread.start()
    try:
        thread.join(limit_s)
    except BaseException:  # an interrupt; the thread may still be in the middle of a run
        _abandon_wandb()
        raise
    if failed:
        raise PublishError(_reason(failed[0])) from failed[0]
    if not done:
        _abandon_wandb()
        raise PublishError(
            f"W&B did not finish within {limit_s:g} s; publish again with `{_command('JOB_DIR')}`"
        )
    return done[0]


def _abandon_wandb() -> None:
    """End a hung `wandb-core`, our child, and let W&B forget it: it would be waited for at exit, and
    asked again by the next job of this process."""
    for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):  # it has just ended by itself
                if Path(f"/proc/{pid}/comm").read_text().startswith("wandb-core"):
                    os.kill(int(pid), signal.SIGKILL)

    def forget() -> None:
        import wandb

        with contextlib.suppress(Exception, SystemExit):  # it speaks to what was just killed
            wandb.teardown()

    forgetting = threading.Thread(target=forget, name="wandb-teardown", daemon=True)
    forgetting.start()
    forgetting.join(_TEARDOWN_S)


def _publish(job_dir: Path, result: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Write the W&B run; returns what the record notes about it."""
    tracking = (result["config"] or {}).get("tracking") or {}
    mode = tracking.get("mode", "offline")
    root = Path(tracking.get("dir") or job_dir)
    _check_folder(root)
    run = _start_run(job_dir, result, tracking, root, limit_s)
    folder = Path(run.dir).parent
    try:
        from harness.tracking_content import GOOD, write_content

        write_content(run, job_dir, result)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish(exit_code=0 if result["status"] in GOOD else 1)
    if mode == "offline":
        _check_complete(folder)
    return {"status": "ok", "dir": str(folder), "run_id": run.id}


def _check_folder(root: Path) -> None:
    """Refuse a folder that W&B would quietly swap for a temporary one, or fill up and then hang on."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".wandb-write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise PublishError(
            f"cannot write to {root}: {error.strerror}; set tracking.dir to another folder"
        ) from None
    free = shutil.disk_usage(root).free
    if free < _MIN_FREE_BYTES:
        raise PublishError(
            f"disk full: {free / 1024**2:.1f} MiB free in {root}, W&B needs {_MIN_FREE_BYTES / 1024**2:.0f}; "
            "free some space, or set tracking.dir to another disk"
        )


def _start_run(
    job_dir: Path, result: Mapping[str, Any], tracking: Mapping[str, Any], root: Path, limit_s: float
) -> Run:
    import wandb

    if tracking.get("mode") == "online" and not has_key():
        raise PublishError("no W&B key on this machine; run `wandb login`, or use tracking.mode=offline")
    config = result["config"] or {}
    return wandb.init(
        project=tracking.get("project"),
        entity=tracking.get("entity"),
        dir=str(root),
        id=run_id(job_dir, result),
        name=job_dir.resolve().name,
        config=scrub({**config, "environment": result["environment"]}),
        group=run_group(config),
        job_type=_short("+".join(recorded_phases(job_dir, result)) or None),
        tags=run_tags(result),
        mode=tracking.get("mode", "offline"),
        reinit="finish_previous",
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=min(limit_s / 2, _INIT_S),
            finish_timeout=limit_s / 2,
            finish_timeout_raises=True,
            # The record has all this already, and W&B would take the command line as it is typed.
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
        ),
    )


def run_id(job_dir: Path, result: Mapping[str, Any]) -> str:
    """Return the job's run id: the same at every attempt to publish it, so that W&B has it once."""
    identity = f"{job_dir.resolve()}|{result['started_at']}|{result['config_hash']}"
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def run_group(config: Mapping[str, Any]) -> str | None:
    """Return the group of a job's run: the one it was given, or else its sweep."""
    given = (config.get("tracking") or {}).get("group")
    return _short(given or (config.get("sweep") or {}).get("id"))


def recorded_phases(job_dir: Path, result: Mapping[str, Any]) -> list[str]:
    """Return the phases that left something in the record, in order."""
    from harness.record_reader import read_table

    traces = {
        "capture": bool(result["capture"]) or read_table(job_dir, "capture").num_rows > 0,
        "parity": bool(result["parity"]),
        "size_sweep": bool(result["size_sweep"]) or read_table(job_dir, "sizes").num_rows > 0,
        "workload": bool(result["summary"]) or read_table(job_dir, "steps").num_rows > 0,
    }
    return [phase for phase, is_there in traces.items() if is_there]


def run_tags(result: Mapping[str, Any]) -> list[str]:
    """Return the tags: the choice of each group, the graph backend, doubts, and the user's own."""
    config = result["config"] or {}
    choices = {
        "model": "name",
        "attention": "backend",
        "runner": "kind",
        "capture": "policy",
        "padding": "strategy",
        "compile": "mode",
        "workload": "kind",
    }
    tags = [
        f"{group}={config[group][key]}" for group, key in choices.items() if key in (config.get(group) or {})
    ]
    if result["graph_backend"]:
        tags.append(str(result["graph_backend"]))
    if result["parity"] and not result["parity"].get("verified"):
        tags.append("unverified")
    tags += (config.get("tracking") or {}).get("tags") or []
    return list(dict.fromkeys(str(_short(tag)) for tag in tags))


def _short(text: str | None) -> str | None:
    """W&B refuses tags, groups and job types of more than 64 characters."""
    return text[:_MAX_TAG_LENGTH] if text else None


def _check_complete(folder: Path) -> None:
    """Wait until the run's exit record is in its file, and fail if it does not come.

    NOTE: W&B (0.31) reports no write that failed, and `finish` may return before the file is whole.
    """
    from harness.offline_run import is_complete

    deadline_s = time.monotonic() + _FLUSH_S
    while not any(is_complete(path) for path in folder.glob("*.wandb")):
        if time.monotonic() > deadline_s:
            raise PublishError(f"W&B wrote only a part of the run to {folder}; is the disk full?")
        time.sleep(0.02)


def _reason(error: BaseException) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, PublishError) else f"{type(error).__name__}: {text}"


def _command(job_dir: str) -> str:
    return f"python -m harness.tracking {job_dir}"


def main(arguments: list[str]) -> int:
    """Publish the folders given; 0 if all are published, 1 if not, 2 for a wrong use."""
    if not arguments or arguments[0].startswith("-"):
        print(
            f"usage: {_command('JOB_DIR ...')}\n\nPublish recorded jobs to W&B, as their tracking.mode says."
        )
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    exit_code = 0
    for folder in arguments:
        try:
            outcome = publish(folder)
        except RecordError as error:
            print(f"error: {error}", file=sys.stderr)
            exit_code = 2
            continue
        print(f"{folder}: {outcome['status']} {outcome['reason'] or outcome['dir'] or ''}".rstrip())
        exit_code = exit_code or int(outcome["status"] == "failed")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
