"""The requests that an executor knows, a line of a table each: their tokens, and their rows of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: In place of the row of a request that holds none, as it was preempted.
NO_ROW = -1


class KnownRequests:
    """A request keeps its line from its first admission to its end, also while it is preempted.

    Room is made for `num_more` requests at a time, each of up to `max_tokens` tokens of prompt and output; a
    longer one would write into its neighbour. The lines of a batch are `[n]` int64.
    """

    def __init__(self, num_more: int, max_tokens: int) -> None:
        self._num_more = num_more
        self._lines: dict[int, int] = {}
        self._free: list[int] = []
        self._max_tokens = max_tokens
        #: `[num_lines * max_tokens]`, line after line: the prompt, and behind it what has been generated.
        self._tokens = np.empty(0, dtype=np.int64)
        #: `[num_lines]`: where in `_tokens` the next one goes.
        self._next = np.empty(0, dtype=np.int64)
        #: `[num_lines]`: rows of the request table; `NO_ROW` for none.
        self.rows = np.empty(0, dtype=np.int32)

    @property
    def num_lines(self) -> int:
        """Lines that there are, taken or free."""
        return len(self.rows)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._lines

    def add(self, request_id: int, prompt: NDArray[np.int64]) -> None:
        """Give a line to a request of the tokens `prompt`, `[prompt_len]`; it holds no row yet."""
        if not self._free:
            self._grow()
        line = self._lines[request_id] = self._free.pop()
        start = line * self._max_tokens
        self._next[line] = start + len(prompt)
        self._tokens[start : start + len(prompt)] = prompt
        self.rows[line] = NO_ROW

    def remove(self, request_id: int) -> None:
        """Forget a request. Its line is given to another one."""
        self._free.append(self._lines.pop(request_id))

    def line(self, request_id: int) -> int:
        """Return a request's line; KeyError if there is none."""
        return self._lines[request_id]

    def lines(self, request_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the line of each request, `[n]`."""
        return np.fromiter(map(self._lines.__getitem__, request_ids), np.int64, len(request_ids))

    def request_ids(self) -> list[int]:
        """Return all requests, the one admitted first in front."""
        return list(self._lines)

    def tokens(self, line: int, start: int, end: int | None = None) -> NDArray[np.int64]:
        """Return a view of the tokens from `start` to `end`, or to the newest."""
        first = line * self._max_tokens
        return self._tokens[first + start : self._next[line] if end is None else first + end]

    def newest(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the newest token of each line, `[n]`."""
        token_ids: NDArray[np.int64] = self._tokens[self._next[lines] - 1]
        return token_ids

    def append(self, lines: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Write the next token of each line, `[n]`; no line may come twice."""
        places = self._next[lines]
        self._tokens[places] = token_ids
        self._next[lines] = places + 1

    def _grow(self) -> None:
        self._free.extend(range(self.num_lines + self._num_more - 1, self.num_lines - 1, -1))
        self._tokens = _longer(self._tokens, self._num_more * self._max_tokens)
        self._next = _longer(self._next, self._num_more)
        self.rows = _longer(self.rows, self._num_more)


def _longer(array: NDArray[Any], num_more: int) -> NDArray[Any]:
    longer = np.empty(len(array) + num_more, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
