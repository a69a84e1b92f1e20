"""What the compiled simulator reads and writes: its scalars, its tables, and the one struct that holds them.

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

    def njit_kept(function: _Function) -> _Function: ...

else:
    import numba

    # Compiled into whatever calls them; the one at the top is kept on disk.
    njit = numba.njit(nogil=True, error_model="numpy")
    njit_kept = numba.njit(nogil=True, error_model="numpy", cache=True)

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
    LAST_ANSWER_NS, NUM_RECORDS, TTFT_NS, TPOT_NS, E2EL_NS, NUM_TPOT, LAST_SENT_NS, MAX_SHIFT,
    NUM_SCALARS,
) = range(39)  # fmt: skip

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
LOG_GROWTH = float(np.log(LATENCY_GROWTH))
NUM_LATENCY_BINS = 2816

# Columns of a record, a run of equal steps: phase, batch size, tokens, KV tokens of the first step, steps, start ns (plus what the first takes longer), step ns
RECORD_COLUMNS = 7


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
    #: As in `StepTimes`.
    decode_ns: NDArray[np.int64]
    excess_ns: NDArray[np.float64]
    after_prefill_ns: NDArray[np.int64]
    prefill_ns: NDArray[np.int64]
    pairs: NDArray[np.int64]
    pairs_ns: NDArray[np.int64]
    #: `[num_cells + 1]` bounds of the context cells, in tokens a request.
    edges: NDArray[np.int64]
    #: `[num_windows, B + 1, num_cells]` decode steps, ramp and drain left out, and the sum over them of the
    #: tokens that each request has less than the longest one.
    histogram: NDArray[np.int64]
    excess_tokens: NDArray[np.int64]
    #: `[num_windows, B + 1]` ns of these steps.
    window_ns: NDArray[np.int64]
    #: `[B + 1]` all decode steps, and their time.
    batch_steps: NDArray[np.int64]
    batch_ns: NDArray[np.int64]
    #: `[4, NUM_LATENCY_BINS]`
    latencies: NDArray[np.int64]
    #: `[capacity, RECORD_COLUMNS]`
    records: NDArray[np.int64]
