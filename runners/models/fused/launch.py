"""Launches Triton kernels, or only has them compiled, several at a time, and others beside them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_MAX_THREADS = 16
#: Of `compile_ahead`, within it.
_pool: ThreadPoolExecutor | None = None
#: What has been asked for beside it since: by `compile_beside`, and launchers by the signature of their kernels.
_asked: set[tuple[Hashable, ...]] = set()


def launch_options(pdl: bool, **options: int) -> dict[str, int | bool]:
    """`options`, and the launch attribute when `pdl`: the interpreter does not know it."""
    return {**options, "launch_pdl": True} if pdl else dict(options)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Queue `kernel` on the current stream; within `compile_ahead` only compile it."""
    if _pool is not None:
        _build_launcher_of(kernel.warmup(*arguments, grid=grid, **options))
    else:
        kernel[grid](*arguments, **options)


def compiles_only() -> bool:
    """Whether a kernel that is asked for should be compiled and not run: see `compile_ahead`."""
    return _pool is not None


def compile_beside(compiler: Callable[..., object], *arguments: Hashable) -> None:
    """Within `compile_ahead`: have a thread call `compiler(*arguments)`, once, whose results are kept by itself.

    An error is left to the launch, which calls it again.
    """
    assert _pool is not None
    if (compiler, *arguments) not in _asked:
        _asked.add((compiler, *arguments))
        _pool.submit(compiler, *arguments)


def _build_launcher_of(kernel: Any) -> None:
    """Have the C code by which Triton launches a kernel compiled, too: the first launch would wait for it, 0.3 s."""
    assert _pool is not None
    if kernel is None or ("launcher of", id(kernel)) in _asked:
        return
    _asked.add(("launcher of", id(kernel)))
    compiling = getattr(kernel, "future", None)
    if compiling is None:
        _pool.submit(_build_launcher, lambda: kernel)
    elif compiling.done():
        _pool.submit(_build_launcher, compiling.result)
    else:  # in the thread that compiles it
        compiling.add_done_callback(lambda done: _build_launcher(done.result))


def _build_launcher(compiled: Callable[[], Any]) -> None:
    with suppress(Exception):  # whatever goes wrong here, the launch says
        kernel = compiled()
        signature = ("launcher", repr(kernel.src.signature))
        if signature not in _asked:
            _asked.add(signature)
            from triton.runtime import driver

            driver.active.launcher_cls(kernel.src, kernel.metadata)  # goes to Triton's cache


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Within the block no kernel of ours runs: each is compiled, and the block's end waits for all.

    So a step may be called for its launches alone; what it returns is garbage. NVRTC, where it can Triton, and
    the C compiler that Triton calls, compile in threads, which spend their time outside of Python. What does not
    compile there is left to its launch.
    """
    global _pool
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    with ExitStack() as stack:
        # Last: what is compiled after the block notes what it has asked for, too.
        stack.callback(_asked.clear)
        pool = stack.enter_context(ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)))
        if mode is not None:
            # Older versions do not know it, and raise at the block's end.
            known = "ignore_errors" in inspect.signature(mode).parameters
            stack.enter_context(mode(pool, ignore_errors=True) if known else mode(pool))
        _pool = pool
        try:
            yield
        finally:
            _pool = None
