"""What is true of the whole process while a graph is being captured: the flag and the quiet collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Python 3.12 starts with 375 frozen objects of its own. A program that freezes has thousands.
_MAX_FROZEN_BY_PYTHON = 1000

_is_capture_mode = False
_freeze_depth = 0


def is_capture_mode() -> bool:
    """Return True while a capture (its warm-up included) is in progress."""
    return _is_capture_mode


@contextmanager
def model_capture_mode() -> Iterator[None]:
    """Set the capture flag for the block; the previous value comes back, also on an exception."""
    global _is_capture_mode
    previous, _is_capture_mode = _is_capture_mode, True
    try:
        yield
    finally:
        _is_capture_mode = previous


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Collect, then keep the garbage collector still for the block.

    A collection inside a capture may free device memory that the graph is using, and walking a whole
    engine's objects each time makes captures slow (vllm#24128). Survivors are frozen for the block and
    thawed afterwards, also on an exception; the collector's enabled state comes back.

    If the caller had frozen objects already, or inside another `freeze_gc`, nothing is frozen and
    nothing thawed: thawing would release objects that are not ours.
    """
    global _freeze_depth
    was_enabled = gc.isenabled()
    outermost = _freeze_depth == 0
    # NOTE: an inner block must not collect: the outer one may be in the middle of a capture.
    if outermost:
        gc.collect()
    gc.disable()
    freezes = outermost and gc.get_freeze_count() <= _MAX_FROZEN_BY_PYTHON
    if freezes:
        gc.freeze()
    _freeze_depth += 1
    try:
        yield
    finally:
        _freeze_depth -= 1
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
        if outermost:
            gc.collect()
