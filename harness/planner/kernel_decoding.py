"""Of the compiled simulator: the requests that decode, their pages, and who gives way."""

from __future__ import annotations

from harness.planner.kernel_state import (
    COMPUTED,
    DECODE_STEPS,
    FINISH,
    FREE_PAGES,
    KV_TOKENS,
    LAST_DECODE_END,
    MAX_SHIFT,
    NEXT_FINISH,
    NUM_DECODING,
    NUM_NEW,
    NUM_OUTPUTS,
    NUM_PREEMPTED,
    NUM_PREEMPTIONS,
    OUTPUT,
    PAGE_SIZE,
    PREFILL_LEN,
    PREFILLING,
    SHIFT,
    TOKEN_NS,
    Kernel,
    njit,
)


@njit
def pages(k: Kernel, num_tokens: int) -> int:
    return int((num_tokens + k.rules[PAGE_SIZE] - 1) // k.rules[PAGE_SIZE])


@njit
def start_decoding(k: Kernel, slot: int) -> None:
    s, row = k.scalars, k.slots[slot]
    row[SHIFT] = row[COMPUTED] - s[DECODE_STEPS]
    row[FINISH] = s[DECODE_STEPS] + row[OUTPUT] - row[NUM_OUTPUTS]
    k.residues[-row[SHIFT] % k.rules[PAGE_SIZE]] += 1
    k.order[s[NUM_DECODING]] = slot
    is_first = s[NUM_DECODING] == 0
    s[NEXT_FINISH] = row[FINISH] if is_first else min(s[NEXT_FINISH], row[FINISH])
    s[MAX_SHIFT] = row[SHIFT] if is_first else max(s[MAX_SHIFT], row[SHIFT])
    s[NUM_DECODING] += 1
    s[KV_TOKENS] += row[COMPUTED]


@njit
def look_over_decoding(k: Kernel) -> None:
    """Find which decoding request ends first, and which has the most tokens."""
    s = k.scalars
    for i in range(s[NUM_DECODING]):
        row = k.slots[k.order[i]]
        s[NEXT_FINISH] = min(s[NEXT_FINISH], row[FINISH]) if i else row[FINISH]
        s[MAX_SHIFT] = max(s[MAX_SHIFT], row[SHIFT]) if i else row[SHIFT]


@njit
def stop_decoding(k: Kernel, slot: int, num_tokens: int) -> None:
    k.residues[-k.slots[slot, SHIFT] % k.rules[PAGE_SIZE]] -= 1
    k.scalars[KV_TOKENS] -= num_tokens


@njit
def pages_needed(k: Kernel, num_steps: int) -> int:
    s = k.scalars
    page_size = k.rules[PAGE_SIZE]
    needed = num_steps // page_size * s[NUM_DECODING]
    for i in range(num_steps % page_size):
        needed += k.residues[(s[DECODE_STEPS] + i) % page_size]
    return int(needed)


@njit
def secure_pages(k: Kernel) -> None:
    """`SchedulerPolicy._secure_pages`: a page to each request that needs one, oldest first, by preemption."""
    s = k.scalars
    page_size = k.rules[PAGE_SIZE]
    i = 0
    while i < s[NUM_DECODING]:
        if (s[DECODE_STEPS] + k.slots[k.order[i], SHIFT]) % page_size == 0:
            while not s[FREE_PAGES] and i < s[NUM_DECODING]:
                preempt_youngest(k)
            if i == s[NUM_DECODING]:  # it was itself the youngest
                break
            s[FREE_PAGES] -= 1
        i += 1
    look_over_decoding(k)


@njit
def preempt_youngest(k: Kernel) -> None:
    s = k.scalars
    slot = s[PREFILLING]
    if slot >= 0:
        s[PREFILLING] = -1
        num_tokens = k.slots[slot, PREFILL_LEN]
    else:
        s[NUM_DECODING] -= 1
        slot = k.order[s[NUM_DECODING]]
        num_tokens = s[DECODE_STEPS] + k.slots[slot, SHIFT]
        stop_decoding(k, slot, num_tokens)
        row = k.slots[slot]
        row[NUM_OUTPUTS] = row[OUTPUT] - (row[FINISH] - s[DECODE_STEPS])
        row[TOKEN_NS] = max(row[TOKEN_NS], s[LAST_DECODE_END])
        if s[NUM_NEW]:  # new ones are the youngest
            s[NUM_NEW] -= 1
    s[FREE_PAGES] += pages(k, num_tokens)
    k.preempted[s[NUM_PREEMPTED]] = slot
    s[NUM_PREEMPTED] += 1
    s[NUM_PREEMPTIONS] += 1
