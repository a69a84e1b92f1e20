"""Chooses the next token from the logits, within the captured step: no look at the host, no copy of the ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the default is greedy. Raises ValueError for values that mean nothing."""

    #: The logits are divided by it; 0 takes the largest one.
    temperature: float = 0.0
    #: Only the `top_k` most likely tokens; 0 for all.
    top_k: int = 0
    #: Of those the fewest, most likely first, that hold this share of the probability.
    top_p: float = 1.0
    #: Of the generator.
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be at least 0, and finite.")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1.")
        if self.is_greedy and (self.top_k or self.top_p < 1):
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p} with temperature=0, which takes the largest logit: "
                "raise temperature, or leave them out."
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """Samples rows of logits with a generator of its own, on the device of the logits.

    A CUDA graph that is captured with the generator registered draws new numbers in each replay, and the
    numbers that as many eager steps of the same shape would have drawn. The same seed gives the same tokens.

    HAZARD: FlashInfer's samplers read the generator on the host, so that a graph would replay the numbers
    of its capture for ever. Hence torch's operators: drawing the largest `p / e` with exponential `e` is
    drawing by `p` (the exponential race), without the synchronisation of `torch.multinomial`.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        #: None where nothing is drawn.
        self.generator = None if sampling.is_greedy else torch.Generator(device)
        self.reset()

    def reset(self, seed: int | None = None) -> None:
        """Begin the sequence of random numbers again, that of `seed` if one is given."""
        if self.generator is not None:
            self.generator.manual_seed(self.sampling.seed if seed is None else seed)

    def sample(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Write a token of each row of `logits` `[num_rows, vocab_size]` to `out` `[num_rows]` int64.

        A row of NaN gives a valid id, which one is not said.
        """
        if self.generator is None:
            # On a CPU the argmax of bfloat16 takes 3.5 times as long as a float32 copy and the argmax of that.
            torch.argmax(logits if logits.is_cuda else logits.float(), dim=-1, out=out)
            return
        scores, ids = self._candidates(logits.float() / self.sampling.temperature)
        weights = self._nucleus(scores.softmax(dim=-1))
        noise = torch.empty_like(weights).exponential_(generator=self.generator)
        # 0 / 0 would be NaN, and NaN the largest.
        choice = (weights / noise.clamp_(min=torch.finfo(noise.dtype).tiny)).argmax(dim=-1, keepdim=True)
        out.copy_((choice if ids is None else ids.gather(-1, choice)).squeeze(-1))

    def _candidates(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores that are in the race and their tokens, the best first; None for all, as they stand."""
        top_k, vocab_size = self.sampling.top_k, scores.shape[-1]
        if 0 < top_k < vocab_size:
            found = scores.topk(top_k, dim=-1)
            return found.values, found.indices
        if self.sampling.top_p < 1:
            return scores.sort(dim=-1, descending=True, stable=True)
        return scores, None

    def _nucleus(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Of probabilities in falling order, those before which less than `top_p` lies; 0 for the others."""
        if self.sampling.top_p == 1:
            return probabilities
        before = probabilities.cumsum(dim=-1) - probabilities
        # What is first has nothing before it, but for rounding.
        before[:, 0] = 0.0
        return probabilities.masked_fill(before >= self.sampling.top_p, 0.0)
