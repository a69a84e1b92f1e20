"""The scheduler's policy as a compiled kernel: the same steps as `SchedulerPolicy`, a thousand times faster.

Work is done per event (an admission, an answer, a chunk of prefill, a preemption), not per request and
step: between events a decode batch repeats, so a run of equal steps is taken at once. A run ends where
the batch changes, where a request arrives, or where the step's cost changes (the next context cell).

All times are whole nanoseconds, so that a run of `n` steps takes exactly `n` times its step and the
clock equals that of stepping one by one. One step is in flight at a time.

A decoding request needs no bookkeeping between its events, because every decode step advances all of
them: with `D` decode steps done, its tokens in the cache are `D + SHIFT`, its last token comes at
`D = FINISH`, and it needs a page whenever `D + SHIFT` is a multiple of the page size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    _Function = TypeVar("_Function", bound=Callable[..., Any])

    def njit(function: _Function) -> _Function: ...

else:
    import numba

    # NOTE: a compiled function is cached by the stamp of its own file only. What these functions share must
    # stay in this file, or a change elsewhere would run with what was compiled before it.
    njit = numba.njit(cache=True, nogil=True)

# Why `advance` returned.
DONE, NEED_REQUESTS, NEED_RECORDS = 0, 1, 2
# Phases, as in `ScheduledStep.phase`.
PREFILL, DECODE = 0, 1

# Scalars of the state.
(
    NOW, NUM_STEPS, DECODE_STEPS, LAST_PHASE, NUM_DECODING, PREFILLING, NUM_PREEMPTED, NUM_FREE_SLOTS,
    FREE_PAGES, KV_TOKENS, NEXT_FINISH, NEXT_REQUEST, NEXT_TO_SEND, NUM_REQUESTS, ALL_GIVEN, NUM_PLACES,
    FIRST_PLACE, FIRST_SENT, NUM_ANSWERED, NUM_PREEMPTIONS, RAMP_TARGET, NUM_NEW, LAST_DECODE_END,
    PREFILL_STEPS, PREFILL_TOKENS, PREFILL_NS, NUM_GOOD, OUTPUT_TOKENS, INPUT_TOKENS, FIRST_SENT_NS,
    LAST_ANSWER_NS, NUM_RECORDS, TTFT_NS, TPOT_NS, E2EL_NS, NUM_TPOT, LAST_SENT_NS,
    NUM_SCALARS,
) = range(38)  # fmt: skip

# Fields of a slot: a request that holds a row, or held one before it was preempted.
(
    PROMPT, OUTPUT, NUM_OUTPUTS, COMPUTED, PREFILL_LEN, SHIFT, FINISH, SENT_NS, FIRST_NS, TOKEN_NS,
    NUM_FIELDS,
) = range(11)  # fmt: skip

# Rules: what `SchedulerLimits` and the caller set.
(
    MAX_BATCH, PAGE_SIZE, CHUNK, MAX_CONCURRENCY, WINDOW_NS, TTFT_LIMIT, TPOT_LIMIT, E2EL_LIMIT, RECORDING,
    NUM_RULES,
) = range(10)  # fmt: skip

# Rows of the latency histograms.
TTFT, TPOT, ITL, E2EL = 0, 1, 2, 3
#: Bins grow by 1%, from 1 µs to more than ten days.
LATENCY_GROWTH = 1.01
_LOG_GROWTH = float(np.log(LATENCY_GROWTH))
NUM_LATENCY_BINS = 2816

# Columns of a record: a run of equal steps.
RECORD_COLUMNS = 7  # phase, batch size, tokens, KV tokens of the first step, steps, start ns, step ns


class Kernel(NamedTuple):
    """Everything that the kernel reads and writes. int64 throughout; `B` is the largest batch."""

    #: `[NUM_RULES]`
    rules: NDArray[np.int64]
    #: `[NUM_SCALARS]`
    scalars: NDArray[np.int64]
    #: `[B, NUM_FIELDS]`
    slots: NDArray[np.int64]
    #: `[B]` slots that decode, oldest first; and three stacks of slots.
    order: NDArray[np.int64]
    free_slots: NDArray[np.int64]
    preempted: NDArray[np.int64]
    finishing: NDArray[np.int64]
    #: `[page_size]` decoding requests by the decode step, modulo the page size, at which they need a page.
    residues: NDArray[np.int64]
    #: `[max_concurrency]` rings: when a place became free, and when a request was sent.
    places: NDArray[np.int64]
    sent: NDArray[np.int64]
    #: `[B + 1, num_cells]` ns of a decode step, `[chunk + 1]` ns of a prefill step.
    decode_ns: NDArray[np.int64]
    prefill_ns: NDArray[np.int64]
    #: `[num_cells + 1]` bounds of the context cells, in tokens a request.
    edges: NDArray[np.int64]
    #: `[num_windows, B + 1, num_cells]` decode steps, ramp and drain left out.
    histogram: NDArray[np.int64]
    #: `[B + 1]` all decode steps, and their time.
    batch_steps: NDArray[np.int64]
    batch_ns: NDArray[np.int64]
    #: `[4, NUM_LATENCY_BINS]`
    latencies: NDArray[np.int64]
    #: `[capacity, RECORD_COLUMNS]`
    records: NDArray[np.int64]


@njit
def advance(
    k: Kernel, arrival_ns: NDArray[np.int64], prompt_len: NDArray[np.int64], output_len: NDArray[np.int64]
) -> int:
    """Run until the requests given are used up (less a margin), the records are full, or all is answered."""
    s = k.scalars
    margin = k.rules[MAX_BATCH] + k.rules[MAX_CONCURRENCY]
    while True:
        if not s[ALL_GIVEN] and s[NUM_REQUESTS] - max(s[NEXT_REQUEST], s[NEXT_TO_SEND]) <= margin:
            return NEED_REQUESTS
        if k.rules[RECORDING] and s[NUM_RECORDS] >= len(k.records):
            return NEED_RECORDS
        if k.rules[MAX_CONCURRENCY]:
            _send(k, arrival_ns)
        if s[LAST_PHASE] == DECODE and _prefill(k, arrival_ns, prompt_len, output_len):
            continue
        if s[NUM_DECODING]:
            _decode(k, arrival_ns, prompt_len)
            continue
        if s[LAST_PHASE] == PREFILL and _prefill(k, arrival_ns, prompt_len, output_len):
            continue
        next_ns = _next_sending(k, arrival_ns)
        if next_ns < 0:
            return DONE
        s[NOW] = max(s[NOW], next_ns)


@njit
def _next_sending(k: Kernel, arrival_ns: NDArray[np.int64]) -> int:
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
def _send(k: Kernel, arrival_ns: NDArray[np.int64]) -> None:
    """Under a concurrency limit: note when each request that has arrived by now was sent."""
    s = k.scalars
    limit = k.rules[MAX_CONCURRENCY]
    while True:
        sent_ns = _next_sending(k, arrival_ns)
        if sent_ns < 0 or sent_ns > s[NOW]:
            return
        k.sent[(s[FIRST_SENT] + s[NEXT_TO_SEND] - s[NEXT_REQUEST]) % limit] = sent_ns
        s[NEXT_TO_SEND] += 1
        s[FIRST_PLACE] = (s[FIRST_PLACE] + 1) % limit
        s[NUM_PLACES] -= 1


@njit
def _request_waits(k: Kernel, arrival_ns: NDArray[np.int64]) -> bool:
    """Whether a request that never held a row has been sent."""
    s = k.scalars
    if k.rules[MAX_CONCURRENCY]:
        return bool(s[NEXT_REQUEST] < s[NEXT_TO_SEND])
    return bool(s[NEXT_REQUEST] < s[NUM_REQUESTS] and arrival_ns[s[NEXT_REQUEST]] <= s[NOW])


@njit
def _pages(k: Kernel, num_tokens: int) -> int:
    return int((num_tokens + k.rules[PAGE_SIZE] - 1) // k.rules[PAGE_SIZE])


@njit
def _can_admit(k: Kernel, num_running: int, prefill_len: int) -> bool:
    """`SchedulerPolicy._admit`: a row, and pages beside one in reserve for each decoding request."""
    s = k.scalars
    return bool(
        num_running < k.rules[MAX_BATCH] and _pages(k, prefill_len) + s[NUM_DECODING] <= s[FREE_PAGES]
    )


@njit
def _admit(
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
        if not _can_admit(k, num_running, k.slots[slot, PROMPT] + k.slots[slot, NUM_OUTPUTS]):
            return -1
        s[NUM_PREEMPTED] -= 1
    else:
        index = s[NEXT_REQUEST]
        if not _request_waits(k, arrival_ns) or not _can_admit(k, num_running, prompt_len[index]):
            return -1
        s[NUM_FREE_SLOTS] -= 1
        slot = k.free_slots[s[NUM_FREE_SLOTS]]
        _open_slot(k, slot, arrival_ns[index], prompt_len[index], output_len[index])
    row = k.slots[slot]
    row[COMPUTED] = 0
    row[PREFILL_LEN] = row[PROMPT] + row[NUM_OUTPUTS]
    s[FREE_PAGES] -= _pages(k, row[PREFILL_LEN])
    return int(slot)


@njit
def _open_slot(k: Kernel, slot: int, arrival_ns: int, prompt_len: int, output_len: int) -> None:
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


@njit
def _prefill(
    k: Kernel,
    arrival_ns: NDArray[np.int64],
    prompt_len: NDArray[np.int64],
    output_len: NDArray[np.int64],
) -> bool:
    """Run one chunk over one or more prompts; False, and nothing changed, if no prompt can run."""
    s = k.scalars
    budget = k.rules[CHUNK]
    num_parts, num_kv_tokens, num_finishing, first_new = 0, 0, 0, s[NUM_DECODING]
    while budget:
        slot = s[PREFILLING]
        if slot < 0:
            slot = _admit(k, s[NUM_DECODING] + num_finishing, arrival_ns, prompt_len, output_len)
            if slot < 0:
                break
        row = k.slots[slot]
        chunk = min(budget, row[PREFILL_LEN] - row[COMPUTED])
        row[COMPUTED] += chunk
        budget -= chunk
        num_parts += 1
        num_kv_tokens += row[COMPUTED]
        s[PREFILLING] = slot
        if row[COMPUTED] == row[PREFILL_LEN]:
            s[PREFILLING] = -1
            row[NUM_OUTPUTS] += 1
            if row[NUM_OUTPUTS] == row[OUTPUT]:
                k.finishing[num_finishing] = slot
                num_finishing += 1
            else:
                _start_decoding(k, slot)
    if not num_parts:
        return False
    num_tokens = k.rules[CHUNK] - budget
    _record(k, PREFILL, num_parts, num_tokens, num_kv_tokens, 1, k.prefill_ns[num_tokens])
    s[NOW] += k.prefill_ns[num_tokens]
    s[PREFILL_STEPS] += 1
    s[PREFILL_TOKENS] += num_tokens
    s[PREFILL_NS] += k.prefill_ns[num_tokens]
    s[LAST_PHASE] = PREFILL
    for i in range(first_new, s[NUM_DECODING]):
        _yield_token(k, k.order[i])
    s[NUM_NEW] = s[NUM_DECODING] - first_new
    for i in range(num_finishing):
        _yield_token(k, k.finishing[i])
        _answer(k, k.finishing[i], k.slots[k.finishing[i], PREFILL_LEN])
    return True


@njit
def _start_decoding(k: Kernel, slot: int) -> None:
    s, row = k.scalars, k.slots[slot]
    row[SHIFT] = row[COMPUTED] - s[DECODE_STEPS]
    row[FINISH] = s[DECODE_STEPS] + row[OUTPUT] - row[NUM_OUTPUTS]
    k.residues[-row[SHIFT] % k.rules[PAGE_SIZE]] += 1
    k.order[s[NUM_DECODING]] = slot
    s[NEXT_FINISH] = min(s[NEXT_FINISH], row[FINISH]) if s[NUM_DECODING] else row[FINISH]
    s[NUM_DECODING] += 1
    s[KV_TOKENS] += row[COMPUTED]


@njit
def _yield_token(k: Kernel, slot: int) -> None:
    """The prefill that ends now gave a token: a request's first, or the next one after a preemption."""
    s, row = k.scalars, k.slots[slot]
    if row[FIRST_NS] < 0:
        row[FIRST_NS] = s[NOW]
    else:
        _count_latency(k, ITL, s[NOW] - row[TOKEN_NS], 1)
    row[TOKEN_NS] = s[NOW]


@njit
def _decode(k: Kernel, arrival_ns: NDArray[np.int64], prompt_len: NDArray[np.int64]) -> None:
    """Run decode steps of the same batch until something can change."""
    s = k.scalars
    page_size = k.rules[PAGE_SIZE]
    cell = _cell(k, s[KV_TOKENS] + s[NUM_DECODING], s[NUM_DECODING])
    num_steps = 1 if _may_prefill(k, arrival_ns, prompt_len) else _run_length(k, cell, arrival_ns)
    needed = _pages_needed(k, num_steps)
    if needed > s[FREE_PAGES]:
        num_steps = 1
        needed = k.residues[s[DECODE_STEPS] % page_size]
    if needed > s[FREE_PAGES]:
        _secure_pages(k)
        cell = _cell(k, s[KV_TOKENS] + s[NUM_DECODING], s[NUM_DECODING])
    else:
        s[FREE_PAGES] -= needed
    batch_size = s[NUM_DECODING]
    step_ns = k.decode_ns[batch_size, cell]
    _record(k, DECODE, batch_size, batch_size, s[KV_TOKENS] + batch_size, num_steps, step_ns)
    _count_gaps(k, step_ns, num_steps)
    s[NOW] += num_steps * step_ns
    s[DECODE_STEPS] += num_steps
    s[KV_TOKENS] += num_steps * batch_size
    s[LAST_PHASE] = DECODE
    s[LAST_DECODE_END] = s[NOW]
    k.batch_steps[batch_size] += num_steps
    k.batch_ns[batch_size] += num_steps * step_ns
    if _is_steady(k, arrival_ns):
        window = min(s[NOW] // k.rules[WINDOW_NS], len(k.histogram) - 1)
        k.histogram[window, batch_size, cell] += num_steps
    if s[DECODE_STEPS] == s[NEXT_FINISH]:
        _answer_finished(k)


@njit
def _may_prefill(k: Kernel, arrival_ns: NDArray[np.int64], prompt_len: NDArray[np.int64]) -> bool:
    """Whether a prefill step could run now, were it its turn."""
    s = k.scalars
    if s[PREFILLING] >= 0:
        return True
    if s[NUM_PREEMPTED]:
        row = k.slots[k.preempted[s[NUM_PREEMPTED] - 1]]
        return _can_admit(k, s[NUM_DECODING], row[PROMPT] + row[NUM_OUTPUTS])
    return _request_waits(k, arrival_ns) and _can_admit(k, s[NUM_DECODING], prompt_len[s[NEXT_REQUEST]])


@njit
def _run_length(k: Kernel, cell: int, arrival_ns: NDArray[np.int64]) -> int:
    """Steps until a request ends, the cost changes, or a request arrives that nobody waits before."""
    s = k.scalars
    batch_size = s[NUM_DECODING]
    num_steps = s[NEXT_FINISH] - s[DECODE_STEPS]
    left = k.edges[cell + 1] * batch_size - (s[KV_TOKENS] + batch_size)
    num_steps = min(num_steps, max(1, (left + batch_size - 1) // batch_size))
    if not s[NUM_PREEMPTED] and not _request_waits(k, arrival_ns):
        next_ns = _next_sending(k, arrival_ns)
        if next_ns >= 0:
            step_ns = k.decode_ns[batch_size, cell]
            num_steps = min(num_steps, max(1, (next_ns - s[NOW] + step_ns - 1) // step_ns))
    return int(num_steps)


@njit
def _pages_needed(k: Kernel, num_steps: int) -> int:
    s = k.scalars
    page_size = k.rules[PAGE_SIZE]
    needed = num_steps // page_size * s[NUM_DECODING]
    for i in range(num_steps % page_size):
        needed += k.residues[(s[DECODE_STEPS] + i) % page_size]
    return int(needed)


@njit
def _secure_pages(k: Kernel) -> None:
    """`SchedulerPolicy._secure_pages`: a page to each request that needs one, oldest first, by preemption."""
    s = k.scalars
    page_size = k.rules[PAGE_SIZE]
    i = 0
    while i < s[NUM_DECODING]:
        if (s[DECODE_STEPS] + k.slots[k.order[i], SHIFT]) % page_size == 0:
            while not s[FREE_PAGES] and i < s[NUM_DECODING]:
                _preempt_youngest(k)
            if i == s[NUM_DECODING]:  # it was itself the youngest
                break
            s[FREE_PAGES] -= 1
        i += 1
    _find_next_finish(k)


@njit
def _preempt_youngest(k: Kernel) -> None:
    s = k.scalars
    slot = s[PREFILLING]
    if slot >= 0:
        s[PREFILLING] = -1
        num_tokens = k.slots[slot, PREFILL_LEN]
    else:
        s[NUM_DECODING] -= 1
        slot = k.order[s[NUM_DECODING]]
        num_tokens = s[DECODE_STEPS] + k.slots[slot, SHIFT]
        _stop_decoding(k, slot, num_tokens)
        row = k.slots[slot]
        row[NUM_OUTPUTS] = row[OUTPUT] - (row[FINISH] - s[DECODE_STEPS])
        row[TOKEN_NS] = max(row[TOKEN_NS], s[LAST_DECODE_END])
        if s[NUM_NEW]:  # new ones are the youngest
            s[NUM_NEW] -= 1
    s[FREE_PAGES] += _pages(k, num_tokens)
    k.preempted[s[NUM_PREEMPTED]] = slot
    s[NUM_PREEMPTED] += 1
    s[NUM_PREEMPTIONS] += 1


@njit
def _stop_decoding(k: Kernel, slot: int, num_tokens: int) -> None:
    k.residues[-k.slots[slot, SHIFT] % k.rules[PAGE_SIZE]] -= 1
    k.scalars[KV_TOKENS] -= num_tokens


@njit
def _answer_finished(k: Kernel) -> None:
    s = k.scalars
    num_left, num_decoding = 0, s[NUM_DECODING]
    for i in range(num_decoding):
        slot = k.order[i]
        if k.slots[slot, FINISH] == s[DECODE_STEPS]:
            num_tokens = s[DECODE_STEPS] + k.slots[slot, SHIFT]
            _stop_decoding(k, slot, num_tokens)
            _answer(k, slot, num_tokens)
        else:
            k.order[num_left] = slot
            num_left += 1
    s[NUM_DECODING] = num_left
    _find_next_finish(k)


@njit
def _find_next_finish(k: Kernel) -> None:
    s = k.scalars
    for i in range(s[NUM_DECODING]):
        finish = k.slots[k.order[i], FINISH]
        s[NEXT_FINISH] = min(s[NEXT_FINISH], finish) if i else finish


@njit
def _answer(k: Kernel, slot: int, num_tokens: int) -> None:
    """Give back the pages, row and place of a request whose last token came now, and count its latencies."""
    s, row = k.scalars, k.slots[slot]
    s[FREE_PAGES] += _pages(k, num_tokens)
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
        _count_latency(k, TPOT, tpot_ns, 1)
        s[TPOT_NS] += tpot_ns
        s[NUM_TPOT] += 1
    _count_latency(k, TTFT, ttft_ns, 1)
    _count_latency(k, E2EL, e2el_ns, 1)
    s[TTFT_NS] += ttft_ns
    s[E2EL_NS] += e2el_ns
    within = ttft_ns <= k.rules[TTFT_LIMIT] and tpot_ns <= k.rules[TPOT_LIMIT]
    s[NUM_GOOD] += within and e2el_ns <= k.rules[E2EL_LIMIT]


@njit
def _is_steady(k: Kernel, arrival_ns: NDArray[np.int64]) -> bool:
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
def _count_gaps(k: Kernel, step_ns: int, num_steps: int) -> None:
    """Count the gaps before the tokens of a run: those of requests that decoded before, and of new ones."""
    s = k.scalars
    num_old = s[NUM_DECODING] - s[NUM_NEW]
    if num_old:
        _count_latency(k, ITL, s[NOW] + step_ns - s[LAST_DECODE_END], num_old)
    num_even = s[NUM_NEW] + (num_steps - 1) * s[NUM_DECODING]
    if num_even:
        _count_latency(k, ITL, step_ns, num_even)
    s[NUM_NEW] = 0


@njit
def _count_latency(k: Kernel, kind: int, latency_ns: int, count: int) -> None:
    bin_index = int(np.log(max(latency_ns, 1) * 1e-3) / _LOG_GROWTH)
    k.latencies[kind, min(max(bin_index, 0), NUM_LATENCY_BINS - 1)] += count


@njit
def _cell(k: Kernel, num_kv_tokens: int, batch_size: int) -> int:
    """The cell of a step's mean context: the largest one whose lower edge it reaches."""
    low, high = 0, len(k.edges) - 2
    while low < high:
        middle = (low + high + 1) // 2
        if k.edges[middle] * batch_size <= num_kv_tokens:
            low = middle
        else:
            high = middle - 1
    return low


@njit
def _record(
    k: Kernel, phase: int, batch_size: int, num_tokens: int, num_kv_tokens: int, num_steps: int, step_ns: int
) -> None:
    s = k.scalars
    s[NUM_STEPS] += num_steps
    if k.rules[RECORDING]:
        row = k.records[s[NUM_RECORDS]]
        row[0], row[1], row[2], row[3] = phase, batch_size, num_tokens, num_kv_tokens
        row[4], row[5], row[6] = num_steps, s[NOW], step_ns
        s[NUM_RECORDS] += 1
