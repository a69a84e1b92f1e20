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

    Requests of up to `max_tokens` tokens; room is made for `num_more` at a time. The lines of a batch are
    `[n]` int64.
    """

    def __init__(self, num_more: int, max_tokens: int) -> None:
        self._num_more = num_more
        self._lines: dict[int, int] = {}
        self._free: list[int] = []
        #: `[num_lines, max_tokens]`: the prompt, and behind it what has been generated.
        self._tokens = np.empty((0, max_tokens), dtype=np.int64)
        #: `[num_lines]`: how many tokens that is.
        self._num_tokens = np.empty(0, dtype=np.int64)
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
        self._tokens[line, : len(prompt)] = prompt
        self._num_tokens[line] = len(prompt)
        self.rows[line] = NO_ROW

    def remove(self, request_id: int) -> None:
        """Forget a request. Its line is given to another one."""
        self._free.append(self._lines.pop(request_id))

    def line(self, request_id: int) -> int:
        return self._lines[request_id]

    def lines(self, request_ids: Sequence[int]) -> NDArray[np.int64]:
        return np.fromiter(map(self._lines.__getitem__, request_ids), np.int64, len(request_ids))

    def request_ids(self) -> list[int]:
        return list(self._lines)

    def tokens(self, line: int, start: int, end: int | None = None) -> NDArray[np.int64]:
        """Return a view of the tokens from `start` to `end`, or to the newest."""
        return self._tokens[line, start : self._num_tokens[line] if end is None else end]

    def newest(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the newest token of each line, `[n]`."""
        token_ids: NDArray[np.int64] = self._tokens[lines, self._num_tokens[lines] - 1]
        return token_ids

    def append(self, lines: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Write the next token of each line, `[n]`; no line may come twice."""
        ends = self._num_tokens[lines]
        self._tokens[lines, ends] = token_ids
        self._num_tokens[lines] = ends + 1

    def _grow(self) -> None:
        self._free.extend(range(self.num_lines + self._num_more - 1, self.num_lines - 1, -1))
        self._tokens, self._num_tokens, self.rows = (
            _longer(array, self._num_more) for array in (self._tokens, self._num_tokens, self.rows)
        )


def _longer(array: NDArray[Any], num_more: int) -> NDArray[Any]:
    longer = np.empty((len(array) + num_more, *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
