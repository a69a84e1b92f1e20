"""What to do about a job that did not end ok: one sentence by how it ended, for the table of failed jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.record import Status

_LOWER = "lower runner.max_batch_size, model.max_seq_len or attention.num_pages"
#: By the kind of the error, where that tells more than the status.
_BY_KIND = {
    "MemoryGuard": f"{_LOWER}, measure with fewer requests, or raise job.max_memory_mib",
    "SIGKILL": "most often the kernel, for want of memory (see dmesg): set job.max_memory_mib, or run fewer jobs at once",
    "SIGSEGV": "a crash in native code: see the end of the log; try attention=torch or compile=none to find whose",
    "SIGABRT": "a library gave up: see the end of the log; try attention=torch or compile=none to find whose",
    "SIGBUS": "the disk or /dev/shm is full, or a mapped file was cut: free some space and resume",
    "OutOfMemoryError": f"the GPU's memory is full: {_LOWER}, or end what else uses it (nvidia-smi)",
    "MemoryError": f"the host's memory is full: {_LOWER}",
    "AcceleratorError": "a CUDA fault: run the point alone with CUDA_LAUNCH_BLOCKING=1, then with attention=torch",
    "OSError": "free some space, or give another output_dir, and resume",
}
_BY_STATUS = {
    Status.FAILED: "see the traceback at the end of the log; then resume: what is finished is kept",
    Status.CAPTURE_OOM: "lower capture.max_size, take a shorter list (capture=powers_of_two), or " + _LOWER,
    Status.PARITY_FAILED: "replay differs from eager: see parity in result.json; parity.on_failure=warn measures all the same",
    Status.TIMEOUT: "raise job.timeout_s, or measure less: measure=quick, workload.max_requests",
    Status.KILLED: "ended from outside: the same line with sweep.resume=true runs it again",
    Status.INTERRUPTED: "the same line with sweep.resume=true runs it again",
    Status.RUNNING: "no process says that it runs: resume once it has ended",
}


def remedy(row: Mapping[str, Any]) -> str | None:
    """Return what to do about the job of a row of `sweep.csv`; None where the error's own message says it."""
    status, kind, message = Status(row["status"]), row["error_kind"], str(row["error_message"] or "")
    if status is Status.INVALID_CONFIG:
        return None
    if "CUDA error" in message:
        kind = "AcceleratorError"
    return _BY_KIND.get(str(kind)) or _BY_STATUS.get(status)
