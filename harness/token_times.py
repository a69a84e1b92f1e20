"""When the tokens of a replay could be read: what the gaps between them are counted from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.scheduler import ScheduledStep


class TokenTimes:
    """When each request's first and last token so far could be read, in ms, by request id; NaN for never."""

    def __init__(self, num_requests: int) -> None:
        self.first_ms = np.full(num_requests, np.nan)
        self._last_ms = np.full(num_requests, np.nan)
        #: Of the last decode step: most have the list of the one before.
        self._decoding: list[int] = []
        self._decoding_ids = np.empty(0, dtype=np.int64)

    def add(self, step: ScheduledStep, now_ms: float) -> tuple[int, NDArray[np.float64]]:
        """Note the tokens of `step`; return how many, and the gap to the one before for all but first ones."""
        if step.phase == "prefill":
            return self._add_prefill(step, now_ms)
        if step.request_ids is not self._decoding:
            self._decoding = step.request_ids
            self._decoding_ids = np.array(step.request_ids, dtype=np.int64)
        gaps_ms = now_ms - self._last_ms[self._decoding_ids]
        self._last_ms[self._decoding_ids] = now_ms
        return step.batch_size, gaps_ms

    def _add_prefill(self, step: ScheduledStep, now_ms: float) -> tuple[int, NDArray[np.float64]]:
        num_tokens, gaps_ms = 0, []
        for request_id, yields_token in zip(step.request_ids, step.yields_token, strict=True):
            if yields_token:
                num_tokens += 1
                gap_ms = now_ms - float(self._last_ms[request_id])
                if math.isnan(gap_ms):
                    self.first_ms[request_id] = now_ms
                else:
                    gaps_ms.append(gap_ms)
                self._last_ms[request_id] = now_ms
        return num_tokens, np.array(gaps_ms, dtype=np.float64)
