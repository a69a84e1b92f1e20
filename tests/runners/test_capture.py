"""Contract 8, the errors: an out-of-memory names the size, the bytes missing and three remedies."""

from __future__ import annotations

import weakref

import pytest
import torch

from runners.capture import CaptureRecord, capture_error
from runners.errors import CaptureError, CaptureOutOfMemoryError, NullPageError

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which "
    "12.50 MiB is free. Process 1 has 139.70 GiB memory in use."
)


def test_out_of_memory_is_named_with_size_bytes_missing_and_three_remedies() -> None:
    error = capture_error(torch.OutOfMemoryError(CUDA_MESSAGE), 64)

    assert isinstance(error, CaptureOutOfMemoryError)
    assert error.capture_size == 64
    assert error.missing_bytes == round(7.5 * 2**20)
    for remedy in ("attention.num_pages", "runner.max_batch_size", "fewer sizes"):
        assert remedy in str(error)


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (MemoryError(), None),
        (torch.OutOfMemoryError("out of memory"), None),
    ],
)
def test_other_allocators_out_of_memory_is_recognised(error: Exception, missing: int | None) -> None:
    typed = capture_error(error, 8)

    assert isinstance(typed, CaptureOutOfMemoryError)
    assert typed.missing_bytes == missing


def test_another_failure_names_the_size_and_is_no_out_of_memory() -> None:
    error = capture_error(RuntimeError("operation not permitted when stream is capturing"), 4)

    assert type(error) is CaptureError
    assert "size 4 failed: operation not permitted" in str(error)


def test_a_typed_error_stays_itself() -> None:
    error = NullPageError("poisoned")

    assert capture_error(error, 4) is error


def test_the_record_has_the_columns_of_capture_csv_in_order() -> None:
    record = CaptureRecord(4, "emulated", False, None, 0.1, 0.2, None, None, None, None, None)

    assert list(record.as_row()) == [
        "capture_size",
        "graph_backend",
        "compiled",
        "compile_s",
        "warmup_s",
        "capture_s",
        "pool_bytes",
        "torch_bytes",
        "device_bytes",
        "pinned_bytes",
        "num_nodes",
    ]


def test_the_error_does_not_keep_the_memory_of_the_step_that_failed() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activation = torch.zeros(4)
        held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError(CUDA_MESSAGE)

    try:
        step()
    except torch.OutOfMemoryError as error:
        typed = capture_error(error, 8)
        typed.__cause__ = error

    assert held[0]() is None
