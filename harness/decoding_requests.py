"""The scheduler's decoding requests, their numbers in arrays: a decode step is arithmetic on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.workload.base import Request


class RequestProgress:
    """How far a request has come; scheduled work counts as done.

    While it decodes, `DecodingRequests` counts its tokens and pages, and here they stand still.
    """

    __slots__ = ("capacity", "num_computed", "num_outputs", "prefill_len", "request", "request_id")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prefill_len = request.prompt_len
        self.num_computed = 0  # tokens in the KV cache
        self.num_outputs = 0  # tokens generated
        self.capacity = 0  # tokens that its pages hold


class DecodingRequests:
    """Requests that take part in each decode step, oldest first. Entry `i` of all that is here is one request's.

    A request's newest token is not in the cache yet: it has generated one more than what its cache holds
    beyond the prompt, and is done when that is its `output_len`.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._requests: list[RequestProgress] = []
        #: Request id, tokens in the cache, tokens there after the last step, tokens that the pages hold.
        self._numbers = np.zeros((4, max_batch_size), dtype=np.int64)
        #: Steps before which nobody is done.
        self._num_steps_left = 0
        self._look_over()

    def _look_over(self) -> None:
        """Set the views `[len(self)]` and make new lists: those given to earlier steps stay as they are."""
        num_requests = len(self._requests)
        request_ids, self._computed, self._final, self.capacity = self._numbers[:, :num_requests]
        self.request_ids: list[int] = request_ids.tolist()
        self.all_yield = [True] * num_requests
        self._lens: list[int] = self._computed.tolist()

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, progress: RequestProgress) -> None:
        """Add the youngest, with its first token, or the next one after a preemption, generated."""
        request = progress.request
        final = request.prompt_len + request.output_len - 1
        num_steps = final - progress.num_computed
        self._num_steps_left = min(self._num_steps_left, num_steps) if self._requests else num_steps
        column = (progress.request_id, progress.num_computed, final, progress.capacity)
        self._numbers[:, len(self)] = column
        self._requests.append(progress)
        self._look_over()

    def pop(self) -> RequestProgress:
        """Take the youngest out, its numbers brought up to date."""
        progress = self._take(len(self) - 1)
        self._look_over()
        return progress

    def starting_a_page(self) -> NDArray[np.int64]:
        """Return where those are whose next token has no page, `[n]`."""
        places: NDArray[np.int64] = (self._computed == self.capacity).nonzero()[0]
        return places

    def advance(self) -> tuple[list[int], list[int]]:
        """Count a token more for each; return the tokens in the cache before and after it."""
        self._computed += 1
        self._num_steps_left -= 1
        starts, self._lens = self._lens, self._computed.tolist()
        return starts, self._lens

    def take_done(self) -> list[RequestProgress]:
        """Take out those that need no further step, their numbers brought up to date."""
        if self._num_steps_left > 0:
            return []
        places: list[int] = (self._computed == self._final).nonzero()[0].tolist()
        done = [self._take(place) for place in reversed(places)][::-1]
        self._look_over()
        if self._requests:
            self._num_steps_left = int((self._final - self._computed).min())
        return done

    def _take(self, place: int) -> RequestProgress:
        progress = self._requests.pop(place)
        progress.num_computed = int(self._computed[place])
        progress.num_outputs = progress.num_computed - progress.request.prompt_len + 1
        progress.capacity = int(self.capacity[place])
        self._numbers[:, place : len(self)] = self._numbers[:, place + 1 : len(self) + 1]
        return progress
