"""What compiling ahead does with errors. That it compiles is a GPU test."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from runners.models.fused import gemm_choice, nvrtc
from runners.models.fused.gemm_choice import GemmChoice
from runners.models.fused.launch import compile_ahead, compile_beside, compiles_only, launch
from runners.models.fused.recipe import VENDOR
from runners.models.fused.skinny_gemm import Product


class AsyncCompileMode:
    """Triton's: a kernel that did not compile is an error at the block's end, unless errors are ignored."""

    def __init__(self, executor: Executor, *, ignore_errors: bool = False) -> None:
        self.ignore_errors = ignore_errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.ignore_errors:
            raise RuntimeError("a kernel did not compile")


class OlderMode:
    """That of a version which cannot ignore errors."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(params=[AsyncCompileMode, OlderMode, None])
def triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=request.param))


@pytest.mark.usefixtures("triton")
def test_what_does_not_compile_ahead_is_left_to_its_launch() -> None:
    asked: list[int] = []

    def refuse(number: int) -> None:
        asked.append(number)
        raise RuntimeError("no")

    with compile_ahead():
        compile_beside(refuse, 1)
        compile_beside(refuse, 1)
        compile_beside(refuse, 2)
    assert sorted(asked) == [1, 2]


@pytest.mark.usefixtures("triton")
def test_a_cuda_kernel_that_is_launched_while_compiling_ahead_is_only_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    source, options = (
        Path("kernel.cu"),
        {"grid": 1, "threads": 32, "shared_bytes": 0, "cluster": 1, "pdl": False},
    )
    with compile_ahead():
        for _ in range(2):
            nvrtc.launch_cuda(source, "kernel", {"ROWS": 8}, (), device=torch.device("cuda"), **options)
    assert asked == [(source, "sm_90", (("ROWS", 8),))]


@pytest.mark.usefixtures("triton")
def test_after_an_error_within_the_block_kernels_run_again_and_what_was_asked_for_is_forgotten() -> None:
    asked: list[int] = []
    for _ in range(2):
        with pytest.raises(ValueError, match="between"), compile_ahead():
            assert compiles_only()
            compile_beside(asked.append, 1)
            raise ValueError("between")
        assert not compiles_only()
    assert asked == [1, 1]
    launched: list[Any] = []
    launch({(2,): lambda *arguments, **options: launched.append((arguments, options))}, (2,), 7, PDL=True)
    assert launched == [((7,), {"PDL": True})]


class Kernel:
    """Triton's: what it compiles is ready when the test says so, at once, or never; a launcher is built of it once."""

    def __init__(self, signature: str, future: Future[Any] | None) -> None:
        self.src, self.metadata = SimpleNamespace(signature=signature), "metadata"
        if future is not None:
            self.future = future

    def warmup(self, *_: object, **__: object) -> Self:
        return self


@pytest.mark.usefixtures("triton")
def test_the_launcher_of_each_signature_is_built_once_when_its_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[tuple[str, object]] = []

    def build(src: Any, metadata: object) -> None:
        built.append((src.signature, threading.current_thread() is threading.main_thread()))
        if src.signature == "refused":
            raise RuntimeError("no C compiler")

    active = SimpleNamespace(active=SimpleNamespace(launcher_cls=build))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=active))
    early, late, failed = Future[Any](), Future[Any](), Future[Any]()
    early.set_result(Kernel("early", None))
    failed.set_exception(RuntimeError("does not compile"))
    kernels = [
        Kernel("at once", None), Kernel("at once", None), Kernel("refused", None),
        Kernel("", early), Kernel("", late), Kernel("", failed),
    ]  # fmt: skip
    with compile_ahead():
        for kernel in kernels * 3:  # once a layer
            launch(kernel, (1,))
        compiler = threading.Thread(target=late.set_result, args=[Kernel("late", None)])
        compiler.start()
        compiler.join()
    assert sorted(built) == [(name, False) for name in ("at once", "early", "late", "refused")]


@pytest.mark.usefixtures("triton")
def test_a_candidate_that_does_not_even_compile_is_a_row_of_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(gemm_choice, "run_product", refuse)
    monkeypatch.setattr(gemm_choice, "time_in_graph", lambda run: run())
    product = Product(torch.zeros(4096, 1024, dtype=torch.bfloat16), scaled=True)
    (record,) = GemmChoice().measure({"qkv": [product]}, 8, names=["qkv"], limit=2)
    assert record.recipe == str(VENDOR) and record.candidate_us == {}
    assert len(record.errors) == 4 and set(record.errors.values()) == {"RuntimeError: no such instruction"}
