"""Settings of every test."""

from __future__ import annotations

import os
import signal

# The models of the tests are so small that a second thread only waits, most of all on a busy machine.
# Children inherit it; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs a script starts commands with `&` deaf to Ctrl-C, and the tests of interrupts with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
