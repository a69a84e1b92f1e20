"""The counters of torch.compile notice what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

from runners.compile_counts import CompileCounts
from runners.errors import CaptureError
from runners.models.loader import LoadedModel
from tests.runners.compiled_runner import (
    NUM_LAYERS,
    compiled_runner,
    counts,
    deep_model,
)
from tests.runners.tiny_runner import Requests, logits

_limits: Any = torch._dynamo.config


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("scope", ["model", "layer"])
def test_a_planted_recompile_is_counted_and_warned_about(scope: str) -> None:
    loaded = deep_model(num_hidden_layers=NUM_LAYERS if scope == "layer" else 2)
    with compiled_runner(loaded, compile_scope=scope, capture_sizes=(4,)) as runner:
        requests = Requests(runner)
        logits(runner, requests.first(4))
        assert counts(runner).num_recompiles == 0

        norm: Any = loaded.model.get_submodule("model.layers.1.input_layernorm")
        norm.variance_epsilon *= 2
        logits(runner, requests.first(4))
        assert counts(runner) == CompileCounts(num_graphs=1, num_recompiles=1)
        assert runner.graph_runner is not None
        (warning,) = runner.graph_runner.warnings
        assert "1 recompiles after warm-up" in warning and "TORCH_LOGS" in warning


def unlike_layers() -> LoadedModel:
    """Twelve layers that no two share a graph, as if each guarded on its index."""
    loaded = deep_model()
    for index in range(NUM_LAYERS):
        norm: Any = loaded.model.get_submodule(f"model.layers.{index}.input_layernorm")
        norm.variance_epsilon = 1e-6 * (1 + index)
    return loaded


@pytest.mark.usefixtures("traced_only")
def test_layers_left_uncompiled_by_the_recompile_limit_are_counted() -> None:
    settings = {"compile_scope": "layer", "compile_fullgraph": False, "capture_sizes": (4,)}
    with compiled_runner(unlike_layers(), **settings) as runner:
        admitted = int(_limits.recompile_limit)
        assert counts(runner).num_graphs == admitted < NUM_LAYERS
        assert counts(runner).num_recompile_limit_hits >= 1
        assert counts(runner).num_uncompiled_layers == NUM_LAYERS - admitted
        assert counts(runner).num_recompiles == counts(runner).num_graph_breaks == 0
        assert f"{NUM_LAYERS - admitted} layers left uncompiled" in (counts(runner).warning or "")


@pytest.mark.usefixtures("traced_only")
def test_a_graph_break_is_an_error_or_counted() -> None:
    loaded = deep_model(num_hidden_layers=2)
    block: Any = loaded.model.get_submodule("model.layers.1.mlp")
    forward = block.forward

    def breaking(states: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        out: torch.Tensor = forward(states)
        return out

    block.forward = breaking
    before = _limits.recompile_limit
    with pytest.raises(
        CaptureError, match=r"torch.compile failed at size 4: (.|\n)*compile\.fullgraph=false"
    ):
        compiled_runner(loaded, capture_sizes=(4,), compile_scope="layer")
    assert _limits.recompile_limit == before
    settings = {"compile_scope": "layer", "compile_fullgraph": False, "capture_sizes": (4,)}
    with compiled_runner(loaded, **settings) as runner:
        assert counts(runner).num_graph_breaks >= 1
        assert "graph breaks" in (counts(runner).warning or "")
