"""Which exit code a status gives: scripts and clusters rely on the table."""

from __future__ import annotations

import pytest

from harness.exit_codes import exit_code, sweep_exit_code
from harness.record import Status

CODES = {
    Status.OK: 0,
    Status.SKIPPED: 0,
    Status.INVALID_CONFIG: 2,
    Status.INTERRUPTED: 130,
    Status.RUNNING: 1,
    Status.FAILED: 1,
    Status.CAPTURE_OOM: 1,
    Status.PARITY_FAILED: 1,
    Status.TIMEOUT: 1,
    Status.KILLED: 1,
}


@pytest.mark.parametrize("status", Status)
def test_every_status_has_the_exit_code_of_the_table(status: Status) -> None:
    assert exit_code(status) == CODES[status]


@pytest.mark.parametrize("status", Status)
def test_a_sweep_ends_with_0_only_if_every_row_is_ok_or_skipped(status: Status) -> None:
    assert sweep_exit_code([Status.OK, status]) == (0 if CODES[status] == 0 else 1)
