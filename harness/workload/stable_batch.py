"""The batch sizes at which a load stays, by Little's law: what is asked for is what the steps serve."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.workload.base import arrival_rate

if TYPE_CHECKING:
    from harness.workload.base import Workload

#: Stable sizes nearer to each other than this factor are one: a stair of padding makes such pairs.
_SAME = 1.25


def stable_batches(
    workload: Workload,
    max_batch_size: int,
    decode_ms: Callable[[int], float],
    prefill_ms: float = 0.0,
) -> list[float]:
    """Return the mean batch sizes at which the workload's rate and its decode steps agree, ascending.

    `decode_ms(batch_size)` is the time of a decode step and `prefill_ms` that of a request's prefill,
    which yields its first token. A request stays for a step each further token, stretched by the share
    of time that prefill takes. A smaller batch serves less than arrives, and grows; a larger one serves
    more, and shrinks.

    There is more than one where a step gets dearer by a jump, as above the largest captured size: a burst
    lifts the batch over it, and the slower steps keep it there (sglang#33483). The last is the cap, of
    `max_batch_size` and `max_concurrency`, when the steps there cannot serve the rate either.
    """
    cap = min(max_batch_size, workload.max_concurrency or max_batch_size, len(workload))
    rate, _ = arrival_rate(workload.arrival_s)
    if rate is not None:  # a burst moves the load, it does not hold it
        rate *= 1 - workload.burst_size / len(workload)
    prefill_share = 0.0 if rate is None else rate * prefill_ms / 1e3
    if rate is None or prefill_share >= 1:
        return [float(cap)]
    tokens_per_ms = rate * float(workload.output_len.mean() - 1) / 1e3 / (1 - prefill_share)
    # Batch less what arrives in one of its steps: negative, it grows; positive, it shrinks.
    surplus = [batch_size - tokens_per_ms * decode_ms(max(batch_size, 1)) for batch_size in range(cap + 1)]
    stable = [
        batch_size - low / (high - low)
        for batch_size, (low, high) in enumerate(pairwise(surplus))
        if low < 0 <= high
    ]
    if surplus[-1] < 0:
        stable.append(float(cap))
    return [size for index, size in enumerate(stable) if not index or size > _SAME * stable[index - 1]]
