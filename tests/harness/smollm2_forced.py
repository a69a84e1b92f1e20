"""The real weights along a given text: what transformers makes of each position, and what a runner does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runners.model_runner import ModelRunner
from tests.runners.tiny_models import decode_batch, extend_batch


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of transformers in float32, and the logits that each was the largest of."""

    #: One line a prompt, all of one length.
    tokens: list[list[int]]
    #: `[num_prompts, num_tokens, vocab_size]` in float32.
    exact: torch.Tensor
    #: The same by transformers in bfloat16, over the same text.
    narrow: torch.Tensor

    def clear(self) -> torch.Tensor:
        """Where the two largest logits are further apart than three times the error of bfloat16."""
        noise = (self.narrow - self.exact).abs().amax(-1)
        top2 = self.exact.topk(2, dim=-1).values
        return top2[..., 0] - top2[..., 1] > 3 * noise

    def relative_error(self, logits: torch.Tensor) -> float:
        """Norm of the difference over the norm of the exact logits."""
        return float((logits - self.exact).double().norm() / self.exact.double().norm())


def make_reference(folder: Path, prompts: list[list[int]], num_tokens: int, device: str) -> Reference:
    """Decode in float32, then run the text in both types, one unpadded prompt at a time, with eager attention."""
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device)
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        line = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        tokens.append(line.tolist())
    exact = _along(model, prompts, tokens)
    return Reference(tokens, exact, _along(model.bfloat16(), prompts, tokens))


@torch.no_grad()
def _along(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    lines = []
    for prompt, line in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + line[:-1]], device=model.device)
        lines.append(model(ids, use_cache=False, logits_to_keep=len(line)).logits[0].float().cpu())
    return torch.stack(lines)


def paged_logits(runner: ModelRunner, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    """The runner's logits along the same text, all prompts in one batch: `[num_prompts, num_tokens, vocab_size]`."""
    rows = [runner.kv.add_request() for _ in prompts]
    first = [
        runner.forward(extend_batch(runner, row, 0, prompt)).next_token_logits.float().cpu().clone()
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    steps, lengths = [torch.cat(first)], np.array([len(prompt) for prompt in prompts])
    for index in range(len(tokens[0]) - 1):
        lengths += 1
        batch = decode_batch(runner, rows, lengths, [line[index] for line in tokens])
        steps.append(runner.forward(batch).next_token_logits.float().cpu().clone())
    for row in rows:
        runner.kv.release(row)
    return torch.stack(steps, dim=1)
