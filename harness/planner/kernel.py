"""The scheduler's policy as a compiled kernel: the same steps as `SchedulerPolicy`, a thousand times faster.

Work is done per event (an admission, an answer, a chunk of prefill, a preemption), not per request and
step: between events a decode batch repeats, so a run of equal steps is taken at once. A run ends where
the batch changes, where a request arrives, or where the step's cost changes (the next context cell, or
after the first step that follows a prefill). By how much the longest request exceeds the mean does not
change in a run.

All times are whole nanoseconds, so that a run of `n` steps takes exactly `n` times its step and the
clock equals that of stepping one by one. One step is in flight at a time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from harness.planner.kernel_answers import answer, count_gaps, is_steady, record, yield_token
from harness.planner.kernel_decoding import (
    look_over_decoding,
    pages_needed,
    secure_pages,
    start_decoding,
    stop_decoding,
)
from harness.planner.kernel_state import (
    ALL_GIVEN,
    CHUNK,
    COMPUTED,
    DECODE,
    DECODE_STEPS,
    DONE,
    FINISH,
    FREE_PAGES,
    KV_TOKENS,
    LAST_DECODE_END,
    LAST_PHASE,
    MAX_BATCH,
    MAX_CONCURRENCY,
    MAX_SHIFT,
    NEED_RECORDS,
    NEED_REQUESTS,
    NEXT_FINISH,
    NEXT_REQUEST,
    NEXT_TO_SEND,
    NOW,
    NUM_DECODING,
    NUM_NEW,
    NUM_OUTPUTS,
    NUM_PREEMPTED,
    NUM_RECORDS,
    NUM_REQUESTS,
    OUTPUT,
    PAGE_SIZE,
    PREFILL,
    PREFILL_LEN,
    PREFILL_NS,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    PREFILLING,
    RECORDING,
    SHIFT,
    WINDOW_NS,
    Kernel,
    njit,
    njit_kept,
)
from harness.planner.kernel_waiting import admit, may_prefill, next_sending, request_waits, send

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


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
    num_pairs = 0
    while budget:
        slot = s[PREFILLING]
        if slot < 0:
            slot = admit(k, s[NUM_DECODING] + num_finishing, arrival_ns, prompt_len, output_len)
            if slot < 0:
                break
        row = k.slots[slot]
        chunk = min(budget, row[PREFILL_LEN] - row[COMPUTED])
        num_pairs += chunk * row[COMPUTED]
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
                start_decoding(k, slot)
    if not num_parts:
        return False
    num_tokens = k.rules[CHUNK] - budget
    step_ns = k.prefill_ns[num_tokens] + _pairs_ns(k, num_pairs)
    record(k, PREFILL, num_parts, num_tokens, num_kv_tokens, 1, step_ns, 0)
    s[NOW] += step_ns
    s[PREFILL_STEPS] += 1
    s[PREFILL_TOKENS] += num_tokens
    s[PREFILL_NS] += step_ns
    s[LAST_PHASE] = PREFILL
    for i in range(first_new, s[NUM_DECODING]):
        yield_token(k, k.order[i])
    s[NUM_NEW] = s[NUM_DECODING] - first_new
    for i in range(num_finishing):
        yield_token(k, k.finishing[i])
        answer(k, k.finishing[i], k.slots[k.finishing[i], PREFILL_LEN])
    return True


@njit
def _pairs_ns(k: Kernel, num_pairs: int) -> int:
    """What it adds to a prefill step that its tokens attend to `num_pairs` cached ones, between measured points."""
    last = len(k.pairs) - 1
    if num_pairs >= k.pairs[last]:
        return int(k.pairs_ns[last])
    i = 0
    while k.pairs[i + 1] <= num_pairs:
        i += 1
    rise = (k.pairs_ns[i + 1] - k.pairs_ns[i]) * (num_pairs - k.pairs[i])
    return int(k.pairs_ns[i] + rise // (k.pairs[i + 1] - k.pairs[i]))


@njit
def _decode(k: Kernel, arrival_ns: NDArray[np.int64], prompt_len: NDArray[np.int64]) -> None:
    """Run decode steps of the same batch until something can change."""
    s = k.scalars
    cell = _cell(k, s[KV_TOKENS] + s[NUM_DECODING], s[NUM_DECODING])
    step_ns, first_ns = _decode_ns(k, cell)
    num_steps = 1
    if not may_prefill(k, arrival_ns, prompt_len):
        num_steps = _run_length(k, cell, step_ns, first_ns, arrival_ns)
    needed = pages_needed(k, num_steps)
    if needed > s[FREE_PAGES]:
        num_steps = 1
        needed = k.residues[s[DECODE_STEPS] % k.rules[PAGE_SIZE]]
    if needed > s[FREE_PAGES]:
        secure_pages(k)
        cell = _cell(k, s[KV_TOKENS] + s[NUM_DECODING], s[NUM_DECODING])
        step_ns, first_ns = _decode_ns(k, cell)
    else:
        s[FREE_PAGES] -= needed
    batch_size = s[NUM_DECODING]
    record(k, DECODE, batch_size, batch_size, s[KV_TOKENS] + batch_size, num_steps, step_ns, first_ns)
    count_gaps(k, step_ns, first_ns, num_steps)
    run_ns = first_ns + num_steps * step_ns
    s[NOW] += run_ns
    k.batch_steps[batch_size] += num_steps
    k.batch_ns[batch_size] += run_ns
    if is_steady(k, arrival_ns):
        window = min(s[NOW] // k.rules[WINDOW_NS], len(k.histogram) - 1)
        k.histogram[window, batch_size, cell] += num_steps
        k.excess_tokens[window, batch_size, cell] += num_steps * _excess(k)
        k.window_ns[window, batch_size] += run_ns
    s[DECODE_STEPS] += num_steps
    s[KV_TOKENS] += num_steps * batch_size
    s[LAST_PHASE] = DECODE
    s[LAST_DECODE_END] = s[NOW]
    if s[DECODE_STEPS] == s[NEXT_FINISH]:
        _answer_finished(k)


@njit
def _excess(k: Kernel) -> int:
    """The tokens of the longest request beyond the mean, times the batch size: the same all through a run."""
    s = k.scalars
    return int((s[DECODE_STEPS] + s[MAX_SHIFT]) * s[NUM_DECODING] - s[KV_TOKENS])


@njit
def _decode_ns(k: Kernel, cell: int) -> tuple[int, int]:
    """The time of each step of a run, and what the first one takes beside it, as it follows a prefill step."""
    s = k.scalars
    batch_size = s[NUM_DECODING]
    step_ns = k.decode_ns[batch_size, cell] + int(k.excess_ns[batch_size] * _excess(k))
    return step_ns, k.after_prefill_ns[batch_size] if s[LAST_PHASE] == PREFILL else 0


@njit
def _run_length(k: Kernel, cell: int, step_ns: int, first_ns: int, arrival_ns: NDArray[np.int64]) -> int:
    """Steps until a request ends, the cost changes, or a request arrives that nobody waits before."""
    s = k.scalars
    batch_size = s[NUM_DECODING]
    num_steps = s[NEXT_FINISH] - s[DECODE_STEPS]
    left = k.edges[cell + 1] * batch_size - (s[KV_TOKENS] + batch_size)
    num_steps = min(num_steps, max(1, (left + batch_size - 1) // batch_size))
    if not s[NUM_PREEMPTED] and not request_waits(k, arrival_ns):
        next_ns = next_sending(k, arrival_ns)
        if next_ns >= 0:
            until_ns = next_ns - s[NOW] - first_ns
            num_steps = min(num_steps, max(1, (until_ns + step_ns - 1) // step_ns))
    return int(num_steps)


@njit
def _answer_finished(k: Kernel) -> None:
    s = k.scalars
    num_left, num_decoding = 0, s[NUM_DECODING]
    for i in range(num_decoding):
        slot = k.order[i]
        if k.slots[slot, FINISH] == s[DECODE_STEPS]:
            num_tokens = s[DECODE_STEPS] + k.slots[slot, SHIFT]
            stop_decoding(k, slot, num_tokens)
            answer(k, slot, num_tokens)
        else:
            k.order[num_left] = slot
            num_left += 1
    s[NUM_DECODING] = num_left
    look_over_decoding(k)


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


def _sources() -> int:
    """A number that is another one whenever a file of the simulator changes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("kernel*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:4], "big")


def _compiled_advance(sources: int) -> Callable[..., int]:
    """`advance`, kept on disk once compiled.

    NOTE: numba looks for changes in this file only, and in what a function closes over. So the compiled
    function closes over the sources of all the files: a change in any of them compiles anew.
    """

    @njit_kept
    def advance(
        k: Kernel, arrival_ns: NDArray[np.int64], prompt_len: NDArray[np.int64], output_len: NDArray[np.int64]
    ) -> int:
        """Run until the requests given are used up (less a margin), the records are full, or all is answered."""
        s = k.scalars
        if sources < 0:
            return DONE
        margin = k.rules[MAX_BATCH] + k.rules[MAX_CONCURRENCY]
        while True:
            if not s[ALL_GIVEN] and s[NUM_REQUESTS] - max(s[NEXT_REQUEST], s[NEXT_TO_SEND]) <= margin:
                return NEED_REQUESTS
            if k.rules[RECORDING] and s[NUM_RECORDS] >= len(k.records):
                return NEED_RECORDS
            if k.rules[MAX_CONCURRENCY]:
                send(k, arrival_ns)
            if s[LAST_PHASE] == DECODE and _prefill(k, arrival_ns, prompt_len, output_len):
                continue
            if s[NUM_DECODING]:
                _decode(k, arrival_ns, prompt_len)
                continue
            if s[LAST_PHASE] == PREFILL and _prefill(k, arrival_ns, prompt_len, output_len):
                continue
            next_ns = next_sending(k, arrival_ns)
            if next_ns < 0:
                return DONE
            s[NOW] = max(s[NOW], next_ns)

    return advance


advance = _compiled_advance(_sources())
