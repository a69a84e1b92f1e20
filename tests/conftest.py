"""Settings of every test."""

from __future__ import annotations

import os

# The models of the tests are so small that a second thread only waits, most of all on a busy machine.
# Children inherit it; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
