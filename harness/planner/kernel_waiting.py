"""Of the compiled simulator: requests that wait, and how they are admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.planner.kernel_decoding import pages
from harness.planner.kernel_state import (
    COMPUTED,
    FIRST_NS,
    FIRST_PLACE,
    FIRST_SENT,
    FIRST_SENT_NS,
    FREE_PAGES,
    LAST_SENT_NS,
    MAX_BATCH,
    MAX_CONCURRENCY,
    NEXT_REQUEST,
    NEXT_TO_SEND,
    NOW,
    NUM_DECODING,
    NUM_FREE_SLOTS,
    NUM_OUTPUTS,
    NUM_PLACES,
    NUM_PREEMPTED,
    NUM_REQUESTS,
    OUTPUT,
    PREFILL_LEN,
    PREFILLING,
    PROMPT,
    SENT_NS,
    TOKEN_NS,
    Kernel,
    njit,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@njit
def next_sending(k: Kernel, arrival_ns: NDArray[np.int64]) -> int:
    """When the next request will be sent; -1 if there is none, or no place for it."""
    s = k.scalars
    limit = k.rules[MAX_CONCURRENCY]
    index = s[NEXT_TO_SEND] if limit else s[NEXT_REQUEST]
    if index == s[NUM_REQUESTS]:
        return -1
    if not limit:
        return int(arrival_ns[index])
    return max(arrival_ns[index], k.places[s[FIRST_PLACE]]) if s[NUM_PLACES] else -1


@njit
def send(k: Kernel, arrival_ns: NDArray[np.int64]) -> None:
    """Under a concurrency limit: note when each request that has arrived by now was sent."""
    s = k.scalars
    limit = k.rules[MAX_CONCURRENCY]
    while True:
        sent_ns = next_sending(k, arrival_ns)
        if sent_ns < 0 or sent_ns > s[NOW]:
            return
        k.sent[(s[FIRST_SENT] + s[NEXT_TO_SEND] - s[NEXT_REQUEST]) % limit] = sent_ns
        s[NEXT_TO_SEND] += 1
        s[FIRST_PLACE] = (s[FIRST_PLACE] + 1) % limit
        s[NUM_PLACES] -= 1


@njit
def request_waits(k: Kernel, arrival_ns: NDArray[np.int64]) -> bool:
    """Whether a request that never held a row has been sent."""
    s = k.scalars
    if k.rules[MAX_CONCURRENCY]:
        return bool(s[NEXT_REQUEST] < s[NEXT_TO_SEND])
    return bool(s[NEXT_REQUEST] < s[NUM_REQUESTS] and arrival_ns[s[NEXT_REQUEST]] <= s[NOW])


@njit
def can_admit(k: Kernel, num_running: int, prefill_len: int) -> bool:
    """`SchedulerPolicy._admit`: a row, and pages beside one in reserve for each decoding request."""
    s = k.scalars
    return bool(num_running < k.rules[MAX_BATCH] and pages(k, prefill_len) + s[NUM_DECODING] <= s[FREE_PAGES])


@njit
def may_prefill(k: Kernel, arrival_ns: NDArray[np.int64], prompt_len: NDArray[np.int64]) -> bool:
    """Whether a prefill step could run now, were it its turn."""
    s = k.scalars
    if s[PREFILLING] >= 0:
        return True
    if s[NUM_PREEMPTED]:
        row = k.slots[k.preempted[s[NUM_PREEMPTED] - 1]]
        return can_admit(k, s[NUM_DECODING], row[PROMPT] + row[NUM_OUTPUTS])
    return request_waits(k, arrival_ns) and can_admit(k, s[NUM_DECODING], prompt_len[s[NEXT_REQUEST]])


@njit
def admit(
    k: Kernel,
    num_running: int,
    arrival_ns: NDArray[np.int64],
    prompt_len: NDArray[np.int64],
    output_len: NDArray[np.int64],
) -> int:
    """Take the oldest waiting request, preempted ones first, if it fits; return its slot or -1."""
    s = k.scalars
    if s[NUM_PREEMPTED]:
        slot = k.preempted[s[NUM_PREEMPTED] - 1]
        if not can_admit(k, num_running, k.slots[slot, PROMPT] + k.slots[slot, NUM_OUTPUTS]):
            return -1
        s[NUM_PREEMPTED] -= 1
    else:
        index = s[NEXT_REQUEST]
        if not request_waits(k, arrival_ns) or not can_admit(k, num_running, prompt_len[index]):
            return -1
        s[NUM_FREE_SLOTS] -= 1
        slot = k.free_slots[s[NUM_FREE_SLOTS]]
        open_slot(k, slot, arrival_ns[index], prompt_len[index], output_len[index])
    row = k.slots[slot]
    row[COMPUTED] = 0
    row[PREFILL_LEN] = row[PROMPT] + row[NUM_OUTPUTS]
    s[FREE_PAGES] -= pages(k, row[PREFILL_LEN])
    return int(slot)


@njit
def open_slot(k: Kernel, slot: int, arrival_ns: int, prompt_len: int, output_len: int) -> None:
    s = k.scalars
    sent_ns = arrival_ns
    if k.rules[MAX_CONCURRENCY]:
        sent_ns = k.sent[s[FIRST_SENT]]
        s[FIRST_SENT] = (s[FIRST_SENT] + 1) % k.rules[MAX_CONCURRENCY]
    s[NEXT_REQUEST] += 1
    if s[FIRST_SENT_NS] < 0:
        s[FIRST_SENT_NS] = sent_ns
    s[LAST_SENT_NS] = sent_ns
    row = k.slots[slot]
    row[PROMPT], row[OUTPUT], row[NUM_OUTPUTS] = prompt_len, output_len, 0
    row[SENT_NS], row[FIRST_NS], row[TOKEN_NS] = sent_ns, -1, -1
