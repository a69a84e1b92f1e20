"""torch.compile by size: what is compiled, when, how steps run then, and what cannot be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo

from runners import compilation
from runners.compile_counts import CompileCounts
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner
from runners.models.context import num_eager_layers
from runners.padding import StepPlan
from runners.recompile_limit import RecompileLimit
from tests.runners.compiled_runner import (
    NUM_LAYERS,
    SIZES,
    Events,
    compiled_runner,
    counts,
    deep_model,
    run_steps,
    twelve_layers,
)
from tests.runners.tiny_runner import Requests, logits, tiny_config, tiny_model

_limits: Any = torch._dynamo.config


# --- compiled by Inductor ----------------------------------------------------------------------


@dataclass
class Compiled:
    runner: ModelRunner
    events: Events


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    events = Events()
    with compiled_runner(deep_model(), events, compile_scope="layer") as runner:
        yield Compiled(runner, events)


def test_every_size_is_compiled_before_the_first_capture_largest_first(compiled: Compiled) -> None:
    assert compiled.events.names == [
        *(("compile", size) for size in (4, 2, 1)),
        *(("capture", size) for size in (4, 2, 1)),
    ]


def test_the_records_say_what_was_compiled_and_how_long_it_took(compiled: Compiled) -> None:
    graphs = compiled.runner.graph_runner
    assert graphs is not None
    assert (graphs.enable_torch_compile, graphs.torch_compile_max_bs, graphs.compile_bs) == (
        True,
        4,
        [1, 2, 4],
    )
    for record in graphs.capture_records:
        assert record.compiled and record.graph_backend == "emulated"
        assert record.compile_s is not None and record.compile_s > record.capture_s


def test_twelve_layers_and_three_sizes_compile_three_graphs_and_nothing_afterwards(
    compiled: Compiled,
) -> None:
    run_steps(compiled.runner)
    assert counts(compiled.runner) == CompileCounts(num_graphs=3)
    assert counts(compiled.runner).warning is None


def test_a_replay_equals_the_compiled_function_without_the_graph_bit_for_bit(compiled: Compiled) -> None:
    runner, requests = compiled.runner, Requests(compiled.runner)
    for n in (4, 3, 1):
        batch = requests.first(n)
        replayed = logits(runner, batch)
        assert runner.outcome is not None and runner.outcome.mode == "graph"
        same_shape = logits(runner, batch, StepPlan("eager", runner.outcome.sizes))
        assert runner.outcome.mode == "compiled" and runner.outcome.num_graphs == 0
        assert torch.equal(replayed, same_shape)
    requests.release()


def test_prompts_and_unpadded_eager_steps_run_uncompiled_code(compiled: Compiled) -> None:
    runner, requests = compiled.runner, Requests(compiled.runner, [5, 4, 3])
    batch = requests.first(3)
    row = int(requests.rows[0])
    for step, plan, eager_layers in (
        (requests.prefill(row, 0, 4), None, NUM_LAYERS),
        (batch, StepPlan("eager"), NUM_LAYERS),
        (batch, StepPlan("eager", (3,)), NUM_LAYERS),
        (batch, StepPlan("eager", (4,)), 0),
        (batch, None, 0),
    ):
        before = num_eager_layers()
        runner.forward(step, plan)
        assert num_eager_layers() - before == eager_layers
    requests.release()


def test_is_compiled_says_which_steps_run_compiled_code(compiled: Compiled) -> None:
    runner = compiled.runner
    for mode, sizes in (("graph", (4,)), ("split", (2, 1)), ("eager", (4,)), ("compiled", (1,))):
        assert runner.is_compiled(StepPlan(mode, sizes))  # type: ignore[arg-type]
    assert not runner.is_compiled(StepPlan("eager"))
    assert not runner.is_compiled(StepPlan("eager", (3,)))


def test_compiled_layers_write_the_cache_in_place(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, requests = compiled.runner, Requests(compiled.runner)
    written: list[int] = []
    backend = type(runner.attn_backend)
    decode = backend.forward_decode

    def spy(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: ForwardBatch) -> torch.Tensor:
        written.extend((layer.k_cache.data_ptr(), layer.v_cache.data_ptr()))
        return decode(self, q, k, v, layer, batch)

    monkeypatch.setattr(backend, "forward_decode", spy)
    runner.forward(requests.first(4))
    caches = zip(runner.kv.k_cache, runner.kv.v_cache, strict=True)
    assert written == [cache.data_ptr() for pair in caches for cache in pair]
    requests.release()


def test_max_autotune_compiles_dynamic_layers() -> None:
    settings = {"compile_mode": "max_autotune", "compile_scope": "layer", "compile_dynamic": True}
    with compiled_runner(capture_sizes=(2, 4), **settings) as runner:
        run_steps(runner)
        assert counts(runner) == CompileCounts(num_graphs=1)


def test_inductor_makes_no_graphs_of_its_own_inside_ours() -> None:
    for mode, makes_graphs in (("default", False), ("max_autotune", False), ("reduce_overhead", True)):
        options = compilation.code_generator(mode)["options"]
        assert options["triton.cudagraphs"] is makes_graphs
    assert compilation.code_generator("max_autotune")["options"]["max_autotune"] is True


# --- what the sizes share ----------------------------------------------------------------------


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    ("dynamic", "scope"),
    [
        (True, "model"),
        (True, "layer"),
        (False, "layer"),
        pytest.param(False, "model", marks=pytest.mark.long),
    ],
)
def test_dynamic_shapes_compile_once_for_all_sizes_but_one(scope: str, dynamic: bool) -> None:
    # The largest size is also the offset of the positions in the packed inputs: one must not stand for the other.
    loaded = tiny_model() if dynamic and scope == "model" else twelve_layers()
    with compiled_runner(loaded, compile_scope=scope, compile_dynamic=dynamic) as runner:
        run_steps(runner)
        assert counts(runner) == CompileCounts(num_graphs=2 if dynamic else 3)


@pytest.mark.usefixtures("traced_only")
def test_layers_of_unlike_groups_compile_once_a_group() -> None:
    kinds = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    loaded = deep_model(model_type="gemma3_text", layer_types=kinds, sliding_window=6, pad_token_id=0)
    with compiled_runner(loaded, compile_scope="layer") as runner:
        run_steps(runner)
        assert counts(runner) == CompileCounts(num_graphs=6)


@pytest.mark.usefixtures("traced_only")
def test_sizes_above_the_limit_are_captured_uncompiled() -> None:
    with compiled_runner(compile_scope="layer", compile_max_bs=2) as runner:
        graphs = runner.graph_runner
        assert graphs is not None and graphs.compile_bs == [1, 2] and graphs.capture_bs == [1, 2, 4]
        assert [(r.capture_size, r.compiled, r.compile_s is None) for r in graphs.capture_records] == [
            (4, False, True),
            (2, True, False),
            (1, True, False),
        ]
        run_steps(runner)
        assert runner.is_compiled(StepPlan("graph", (2,))) and not runner.is_compiled(StepPlan("graph", (4,)))
        assert not runner.is_compiled(StepPlan("split", (4, 2)))
        logits(runner, Requests(runner, [5]).first(1), StepPlan("eager", (4,)))
        assert runner.outcome is not None and runner.outcome.mode == "eager"


@pytest.mark.usefixtures("traced_only")
def test_a_second_runner_compiles_its_own_code_and_a_closed_one_leaves_nothing() -> None:
    before = (_limits.recompile_limit, _limits.accumulated_recompile_limit)
    with compiled_runner(tiny_model(), compile_scope="layer") as runner:
        key_cache = weakref.ref(runner.kv.k_cache[0])
        assert counts(runner).num_graphs == 3
    with compiled_runner(tiny_model(), max_batch_size=8, compile_scope="layer") as second:
        run_steps(second)
        assert counts(second) == CompileCounts(num_graphs=3)
    del runner, second
    gc.collect()
    assert key_cache() is None
    assert (_limits.recompile_limit, _limits.accumulated_recompile_limit) == before


@pytest.mark.usefixtures("traced_only")
def test_a_capture_can_be_repeated_without_compiling_again() -> None:
    with compiled_runner(tiny_model(), compile_scope="layer") as runner:
        assert runner.graph_runner is not None
        runner.graph_runner.capture()
        run_steps(runner)
        assert counts(runner) == CompileCounts(num_graphs=3)


def test_the_recompile_limit_is_raised_for_the_largest_holder_and_put_back_by_the_last() -> None:
    before = _limits.recompile_limit
    small, large = RecompileLimit(before + 10), RecompileLimit(before + 1000)
    assert (_limits.recompile_limit, _limits.accumulated_recompile_limit) == (before + 1000, before + 1000)
    large.release()
    assert _limits.recompile_limit == before + 10
    small.release()
    small.release()
    assert _limits.recompile_limit == before


# --- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"compile_mode": "fastest"}, "choose none, default, max_autotune, reduce_overhead"),
        ({"compile_scope": "block"}, "model or layer"),
        ({"kind": "eager"}, "set kind=cuda_graph"),
        ({"capture_sizes": (2, 4), "compile_max_bs": 1}, "below the smallest capture size, 2"),
        ({"compile_mode": "reduce_overhead", "compile_max_bs": 2}, "set it to 4, or drop"),
        ({"compile_mode": "reduce_overhead", "padding": "split"}, "choose another, or compile_mode=default"),
        (
            {"compile_mode": "reduce_overhead", "above_max": "split"},
            "choose another, or compile_mode=default",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**{"compile_mode": "default", "capture_sizes": SIZES, **overrides})


def test_without_a_compiler_a_cpu_is_refused_and_a_gpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"no C\+\+ compiler \(g\+\+\): install one .*or set none"):
        tiny_config(compile_mode="default")
    assert tiny_config(compile_mode="default", device="cuda:0").compile_sizes == (1, 2, 4, 8)
