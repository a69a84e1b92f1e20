"""Settings of every test."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest

# The models of the tests are so small that a second thread only waits, most of all on a busy machine.
# Children inherit it; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The workers, and the children of many tests, import the same modules: they are compiled once, whatever the shell says.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False

# A shell that runs a script starts commands with `&` deaf to Ctrl-C, and the tests of interrupts with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Keep what the imports made out of the collections that each capture asks for: they take 0.2 s."""
    gc.collect()
    gc.freeze()
