"""torch.compile of a model's decode steps, size by size, outside of every capture."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._inductor
import torch.fx.experimental._config
from torch import nn

from runners.compile_counts import CompileCounts, CompileWatch
from runners.errors import RunnerError
from runners.recompile_limit import RecompileLimit

if TYPE_CHECKING:
    from runners.models.loader import LoadedModel
    from runners.runner_config import RunnerConfig

_dynamo: Any = torch._dynamo
_shape_config: Any = torch.fx.experimental._config

#: `compile_mode` → the mode of torch.compile whose options it takes.
MODES = {
    "default": "default",
    "max_autotune": "max-autotune-no-cudagraphs",
    "reduce_overhead": "reduce-overhead",
}
#: Graphs beyond the expected ones that dynamo may compile before it gives a function up: they are
#: counted as recompiles, which says more than a function that quietly runs in Python.
_SPARE_GRAPHS = 8


class CompiledModel:
    """A model whose steps run compiled code. Call it like the model; the model itself stays eager.

    Scope `model` compiles the whole call, once a size. Scope `layer` compiles one function that every
    decoder layer shares, once a size and attention group; what surrounds the layers stays eager.
    With dynamic shapes one graph serves all sizes but 1, which dynamo always compiles apart.

    Args:
        loaded: the model, its cache bound.
        config: the compile settings.
        num_sizes: batch sizes that will be compiled.
    """

    def __init__(self, loaded: LoadedModel, config: RunnerConfig, num_sizes: int) -> None:
        if loaded.implementation == "fused":
            raise RunnerError(
                "torch.compile takes transformers' layers, not fused ones: set compile_mode=none."
            )
        self._model = loaded.model
        self._config = config
        self._watch = CompileWatch()
        self._limit = RecompileLimit(num_sizes * len(loaded.groups) + _SPARE_GRAPHS)
        #: Inductor puts the compiled code into CUDA graphs of its own.
        self.makes_graphs = config.compile_mode == "reduce_overhead"
        self._layers: list[tuple[nn.Module, Callable[..., Any]]] = []
        if config.compile_scope == "layer":
            call = self._compile(_call_layer)
            self._layers = [(layer, partial(call, layer)) for layer in decoder_layers(loaded)]
            self._call: Callable[..., Any] = self._call_with_compiled_layers
        else:
            self._call = partial(self._compile(_call_model), self._model)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Dynamo keeps what it compiled at the code object. With one of its own, a runner neither meets
        # the graphs of an earlier one nor leaves its graphs behind.
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        self._code = own.__code__
        compiled: Callable[..., Any] = torch.compile(
            own,
            fullgraph=self._config.compile_fullgraph,
            dynamic=self._config.compile_dynamic,
            **code_generator(self._config.compile_mode),
        )
        return compiled

    @property
    def counts(self) -> CompileCounts:
        """What was compiled, and what went wrong with it, so far."""
        return self._watch.counts

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """In the block, a first call with a new shape is expected to compile."""
        # NOTE: two inputs that happen to have one size would be compiled as if they always had; the
        # largest batch has as many rows as the offset of its positions in the packed inputs.
        with _shape_config.patch(use_duck_shape=False), self._watch.warm_up():
            yield

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        """Return what the model returns for `[1, num_tokens]` ids and positions (`logits` and more).

        With `makes_graphs` the logits are valid until the next call.
        """
        if self.makes_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self._watch.step():
            # `.data` is no view: dynamo would guard on the packed buffer that the inputs are views of.
            return self._call(input_ids=input_ids.data, position_ids=position_ids.data, **options)

    def _call_with_compiled_layers(self, **inputs: Any) -> Any:
        for layer, call in self._layers:
            layer._compiled_call_impl = call
        try:
            return self._model(**inputs)
        finally:
            for layer, _ in self._layers:
                layer._compiled_call_impl = None

    def close(self) -> None:
        """Drop the compiled code, with the graphs that Inductor made of it, and give dynamo's limits back."""
        self._limit.release()
        if self._call is _closed:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a graph of Inductor's may be running
        _dynamo.reset_code(self._code)
        self._layers.clear()
        self._call = _closed
        gc.collect()  # what dynamo keeps of a function holds itself


def _call_model(model: Any, **inputs: Any) -> Any:
    return model(**inputs)


def _call_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer.forward(*args, **kwargs)


def _closed(**inputs: Any) -> Any:
    raise AssertionError("the compiled model was closed")


def decoder_layers(loaded: LoadedModel) -> list[nn.Module]:
    """Return the modules that hold the attention modules: the decoder's layers, in order."""
    names = {module: name for name, module in loaded.model.named_modules()}
    return [
        loaded.model.get_submodule(names[module].rpartition(".")[0]) for module in loaded.attention_modules
    ]


def code_generator(mode: str) -> dict[str, Any]:
    """Return the arguments of torch.compile for `compile_mode`: Inductor, and its options.

    Its own CUDA graphs are on in `reduce_overhead` and off elsewhere, whatever the environment says:
    inside our capture they would be graphs within a graph.
    """
    options: dict[str, Any] = torch._inductor.list_mode_options(MODES[mode])
    return {"backend": "inductor", "options": {**options, "triton.cudagraphs": mode == "reduce_overhead"}}
