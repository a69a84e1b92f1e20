"""Of the compiled simulator: tokens, answers, and what is counted of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.planner.kernel_decoding import pages
from harness.planner.kernel_state import (
    ALL_GIVEN,
    E2EL,
    E2EL_LIMIT,
    E2EL_NS,
    FIRST_NS,
    FIRST_PLACE,
    FREE_PAGES,
    INPUT_TOKENS,
    ITL,
    LAST_ANSWER_NS,
    LAST_DECODE_END,
    LOG_GROWTH,
    MAX_BATCH,
    MAX_CONCURRENCY,
    NEXT_REQUEST,
    NEXT_TO_SEND,
    NOW,
    NUM_ANSWERED,
    NUM_DECODING,
    NUM_FREE_SLOTS,
    NUM_GOOD,
    NUM_LATENCY_BINS,
    NUM_NEW,
    NUM_PLACES,
    NUM_RECORDS,
    NUM_REQUESTS,
    NUM_STEPS,
    NUM_TPOT,
    OUTPUT,
    OUTPUT_TOKENS,
    PROMPT,
    RAMP_TARGET,
    RECORDING,
    SENT_NS,
    TOKEN_NS,
    TPOT,
    TPOT_LIMIT,
    TPOT_NS,
    TTFT,
    TTFT_LIMIT,
    TTFT_NS,
    Kernel,
    njit,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


@njit
def yield_token(k: Kernel, slot: int) -> None:
    """The prefill that ends now gave a token: a request's first, or the next one after a preemption."""
    s, row = k.scalars, k.slots[slot]
    if row[FIRST_NS] < 0:
        row[FIRST_NS] = s[NOW]
    else:
        count_latency(k, ITL, s[NOW] - row[TOKEN_NS], 1)
    row[TOKEN_NS] = s[NOW]


@njit
def answer(k: Kernel, slot: int, num_tokens: int) -> None:
    """Give back the pages, row and place of a request whose last token came now, and count its latencies."""
    s, row = k.scalars, k.slots[slot]
    s[FREE_PAGES] += pages(k, num_tokens)
    k.free_slots[s[NUM_FREE_SLOTS]] = slot
    s[NUM_FREE_SLOTS] += 1
    if k.rules[MAX_CONCURRENCY]:
        k.places[(s[FIRST_PLACE] + s[NUM_PLACES]) % k.rules[MAX_CONCURRENCY]] = s[NOW]
        s[NUM_PLACES] += 1
    if not s[NUM_ANSWERED]:
        s[RAMP_TARGET] = k.rules[MAX_BATCH] - s[NUM_FREE_SLOTS] + 1
    s[NUM_ANSWERED] += 1
    s[LAST_ANSWER_NS] = s[NOW]
    s[INPUT_TOKENS] += row[PROMPT]
    s[OUTPUT_TOKENS] += row[OUTPUT]
    ttft_ns, e2el_ns, tpot_ns = row[FIRST_NS] - row[SENT_NS], s[NOW] - row[SENT_NS], 0
    if row[OUTPUT] > 1:
        tpot_ns = (s[NOW] - row[FIRST_NS]) // (row[OUTPUT] - 1)
        count_latency(k, TPOT, tpot_ns, 1)
        s[TPOT_NS] += tpot_ns
        s[NUM_TPOT] += 1
    count_latency(k, TTFT, ttft_ns, 1)
    count_latency(k, E2EL, e2el_ns, 1)
    s[TTFT_NS] += ttft_ns
    s[E2EL_NS] += e2el_ns
    within = ttft_ns <= k.rules[TTFT_LIMIT] and tpot_ns <= k.rules[TPOT_LIMIT]
    s[NUM_GOOD] += within and e2el_ns <= k.rules[E2EL_LIMIT]


@njit
def is_steady(k: Kernel, arrival_ns: NDArray[np.int64]) -> bool:
    """Whether the ramp is over (the first generation of requests is answered) and the drain not begun."""
    s = k.scalars
    if not s[NUM_ANSWERED] or s[NUM_ANSWERED] < s[RAMP_TARGET]:
        return False
    if not s[ALL_GIVEN]:
        return True
    if k.rules[MAX_CONCURRENCY]:
        return bool(s[NEXT_TO_SEND] < s[NUM_REQUESTS])
    return bool(s[NEXT_REQUEST] < s[NUM_REQUESTS] and arrival_ns[s[NUM_REQUESTS] - 1] > s[NOW])


@njit
def count_gaps(k: Kernel, step_ns: int, first_ns: int, num_steps: int) -> None:
    """Count the gaps before the tokens of a run, whose first step takes `first_ns` longer.

    Requests that decoded before had to wait since their last token, new ones since their prefill.
    """
    s = k.scalars
    num_old = s[NUM_DECODING] - s[NUM_NEW]
    if num_old:
        count_latency(k, ITL, s[NOW] + first_ns + step_ns - s[LAST_DECODE_END], num_old)
    if s[NUM_NEW]:
        count_latency(k, ITL, first_ns + step_ns, s[NUM_NEW])
    num_even = (num_steps - 1) * s[NUM_DECODING]
    if num_even:
        count_latency(k, ITL, step_ns, num_even)
    s[NUM_NEW] = 0


@njit
def count_latency(k: Kernel, kind: int, latency_ns: int, count: int) -> None:
    bin_index = int(np.log(max(latency_ns, 1) * 1e-3) / LOG_GROWTH)
    k.latencies[kind, min(max(bin_index, 0), NUM_LATENCY_BINS - 1)] += count


@njit
def record(
    k: Kernel,
    phase: int,
    batch_size: int,
    num_tokens: int,
    num_kv_tokens: int,
    num_steps: int,
    step_ns: int,
    first_ns: int,
) -> None:
    s = k.scalars
    s[NUM_STEPS] += num_steps
    if k.rules[RECORDING]:
        row = k.records[s[NUM_RECORDS]]
        row[0], row[1], row[2], row[3] = phase, batch_size, num_tokens, num_kv_tokens
        row[4], row[5], row[6] = num_steps, s[NOW] + first_ns, step_ns
        s[NUM_RECORDS] += 1
