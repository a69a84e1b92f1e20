"""The fused decoder: what `rewrite` makes of a loaded transformers model.

A layer is five kernels at small batch: merged projection; head norms, rotary embedding, cache write and
attention; output projection; gate, up and SiLU; down projection. The weight of a norm is folded into
the projection behind it, so that only one number a row is left of the norm: the kernel that writes the
residual stream leaves its sums of squares, the next projection scales its output by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from runners.attention.base import AttentionBackend, AttentionLayer
from runners.forward_batch import ForwardBatch
from runners.models.context import current_context
from runners.models.fused.gemm_choice import GemmChoice
from runners.models.fused.qk_rope_cache import HeadInputs, QkvLayout, rotate_into
from runners.models.fused.recipe import VENDOR, Recipe, run_product
from runners.models.fused.rms_norm import embed
from runners.models.fused.skinny_gemm import Product, Rows, Targets


@runtime_checkable
class FusedDecode(Protocol):
    """A backend that takes the raw merged projection and does everything up to the output heads."""

    def attend_fused(
        self, qkv: torch.Tensor, inputs: HeadInputs, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor: ...


@runtime_checkable
class SeparateDecode(Protocol):
    """A backend that attends with rotated queries to keys and values that are in the cache already."""

    def attend_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor: ...


@dataclass
class FusedOutput:
    """What the model returns: the names of transformers' output, and the sampled ids."""

    #: `[1, num_kept, vocab_size]`.
    logits: torch.Tensor
    #: `[num_kept]` int64: greedy choice of each kept row; None where sampling is left to the runner.
    next_token_ids: torch.Tensor | None


@dataclass
class Step:
    """What all layers of one call share."""

    backend: AttentionBackend
    batch: ForwardBatch
    #: `[num_tokens]` int64.
    positions: torch.Tensor
    #: `[max_positions, head_dim]` float32.
    cos_sin: torch.Tensor
    choice: GemmChoice
    #: A decode step: prefill takes the vendor's GEMM, whose shapes vary too much to compile for each.
    decodes: bool
    pdl: bool

    def recipe(self, name: str, num_rows: int) -> Recipe:
        """The recipe of the product `name` for this many rows."""
        return self.choice.recipe(name, num_rows) if self.decodes else VENDOR

    def product(self, name: str, rows: Rows, product: Product, residual: torch.Tensor | None = None) -> Rows:
        """Compute a product by the recipe chosen for its name and this many rows."""
        recipe = self.recipe(name, rows.x.shape[0])
        return run_product(rows, product, recipe, residual=residual, pdl=self.pdl).rows


class FusedAttention(nn.Module):
    """Merged projection, attention and output projection. The runner binds the caches and the group."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    group_id: int

    def __init__(
        self,
        layout: QkvLayout,
        qkv: Product,
        output: Product,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.qkv, self.output = qkv, output
        _register(self, qkv=qkv, output=output)
        self.q_norm = _frozen(q_norm)
        self.k_norm = _frozen(k_norm)

    def forward(self, stream: Rows, step: Step) -> Rows:
        merged = step.product("qkv", stream, self.qkv)
        inputs = HeadInputs(self.layout, self.q_norm, self.k_norm, step.cos_sin, step.positions)
        heads = self._attend(merged.x, inputs, step).flatten(1)
        return step.product("output", Rows(heads), self.output, residual=stream.x)

    def _attend(self, qkv: torch.Tensor, inputs: HeadInputs, step: Step) -> torch.Tensor:
        layer = AttentionLayer(self.group_id, self.k_cache, self.v_cache)
        batch, backend = step.batch, step.backend
        if not batch.forward_mode.is_extend():
            if isinstance(backend, FusedDecode):
                return backend.attend_fused(qkv, inputs, layer, batch)
            if isinstance(backend, SeparateDecode):
                slots = batch.out_cache_loc
                q = rotate_into(qkv, inputs, layer.k_cache, layer.v_cache, slots, pdl=step.pdl)
                return backend.attend_decode(q, layer, batch)
        shape = (qkv.shape[0], self.layout.num_kv_heads, self.layout.head_dim)
        k, v = qkv.new_empty(shape), qkv.new_empty(shape)
        q = rotate_into(qkv, inputs, k, v, None, pdl=step.pdl)
        if batch.forward_mode.is_extend():
            return backend.forward_extend(q, k, v, layer, batch)
        return backend.forward_decode(q, k, v, layer, batch)


class FusedLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, attention: FusedAttention, gate_up: Product, down: Product) -> None:
        super().__init__()
        self.attention = attention
        self.gate_up, self.down = gate_up, down
        _register(self, gate_up=gate_up, down=down)

    def forward(self, stream: Rows, step: Step) -> Rows:
        stream = self.attention(stream, step)
        active = step.product("gate_up", stream, self.gate_up)
        return step.product("down", active, self.down, residual=stream.x)


class FusedDecoder(nn.Module):
    """The whole model, called as the transformers model it was made from.

    `choice` says which recipe each product uses; the runner has it measured before the capture.

    Args:
        embedding: `[vocab_size, hidden_size]`.
        layers: the decoder layers.
        head: final norm and LM head, with `argmax`.
        cos_sin: `[max_positions, head_dim]` float32 rotary table.
    """

    def __init__(
        self, embedding: torch.Tensor, layers: list[FusedLayer], head: Product, cos_sin: torch.Tensor
    ) -> None:
        super().__init__()
        self.cos_sin: torch.Tensor
        self.embedding, self.head = nn.Parameter(embedding, requires_grad=False), head
        _register(self, head=head)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.layers = nn.ModuleList(layers)
        self.choice = GemmChoice()
        #: Programmatic dependent launch of our kernels in decode steps.
        self.pdl = False
        #: `[num_kept, vocab_size]`: where the logits go of calls that fit it; None for a tensor of their own.
        self.logits_out: torch.Tensor | None = None

    def products(self) -> dict[str, list[Product]]:
        """The products of the model by name, one a layer (the head: one)."""
        layers = [layer for layer in self.layers if isinstance(layer, FusedLayer)]
        return {
            "qkv": [layer.attention.qkv for layer in layers],
            "output": [layer.attention.output for layer in layers],
            "gate_up": [layer.gate_up for layer in layers],
            "down": [layer.down for layer in layers],
            "head": [self.head],
        }

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> FusedOutput:
        """Run the tokens `[1, num_tokens]` of the step in progress; ids of its `token_source` are fed here.

        `logits_to_keep` as in transformers: 0 keeps all rows, n the last n, a tensor those rows.
        """
        context = current_context()
        decodes = not context.batch.forward_mode.is_extend()
        step = Step(
            context.backend, context.batch, position_ids.view(-1), self.cos_sin, self.choice,
            decodes, self.pdl and decodes,
        )  # fmt: skip
        source, sampled = context.batch.token_source, context.token_ids
        fed = None if source is None or sampled is None else (source, sampled)
        stream = Rows(*embed(input_ids.view(-1), self.embedding, fed=fed, pdl=step.pdl))
        for layer in self.layers:
            stream = layer(stream, step)
        stream = _keep(stream, logits_to_keep)
        return self._head(stream, step, context.token_ids if context.greedy else None)

    def _head(self, stream: Rows, step: Step, token_ids: torch.Tensor | None) -> FusedOutput:
        """Logits, and in `token_ids`, if given, the largest of each row."""
        num_rows, product = stream.x.shape[0], self.head
        targets = Targets(token_ids=None if token_ids is None else token_ids[:num_rows])
        out = self.logits_out
        if out is not None and (out.shape, out.dtype) == ((num_rows, product.num_outputs), stream.x.dtype):
            targets = replace(targets, rows=out)
        if token_ids is None:
            product = replace(product, argmax=False)
        recipe = step.recipe("head", num_rows)
        head = run_product(stream, product, recipe, targets=targets, pdl=step.pdl)
        return FusedOutput(head.rows.x.unsqueeze(0), head.token_ids)


def _frozen(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


def _register(module: nn.Module, **products: Product) -> None:
    """Make the tensors of the products parameters of the module: the same storage, for counting."""
    for name, product in products.items():
        for part in ("weight", "bias", "norm"):
            module.register_parameter(f"{name}_{part}", _frozen(getattr(product, part)))


def _keep(stream: Rows, logits_to_keep: int | torch.Tensor) -> Rows:
    if isinstance(logits_to_keep, int):
        return stream if logits_to_keep == 0 else Rows(stream.x[-logits_to_keep:])
    return Rows(stream.x[logits_to_keep])
