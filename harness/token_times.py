"""When the tokens of a replay could be read: what the gaps between them are counted from."""

from __future__ import annotations

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
        request_ids = self._yielding(step)
        gaps_ms = now_ms - self._last_ms[request_ids]
        self._last_ms[request_ids] = now_ms
        if step.phase == "prefill":
            is_first = np.isnan(gaps_ms)
            self.first_ms[request_ids[is_first]] = now_ms
            return len(request_ids), gaps_ms[~is_first]
        return len(request_ids), gaps_ms

    def _yielding(self, step: ScheduledStep) -> NDArray[np.int64]:
        if step.phase == "prefill":
            return np.array(step.request_ids, dtype=np.int64)[step.yields_token]
        if step.request_ids is not self._decoding:
            self._decoding = step.request_ids
            self._decoding_ids = np.array(step.request_ids, dtype=np.int64)
        return self._decoding_ids
