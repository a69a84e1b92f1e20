from __future__ import annotations

import numpy as np
import pytest

from harness.known_requests import NO_ROW, KnownRequests


def known(*prompts: list[int]) -> KnownRequests:
    """Requests from number 10 on, in a table that makes room for two at a time."""
    requests = KnownRequests(2, 6)
    for request_id, prompt in enumerate(prompts, 10):
        requests.add(request_id, np.array(prompt))
    return requests


def test_tokens_are_written_behind_the_prompts_of_a_batch() -> None:
    requests = known([1, 2, 3], [4])
    lines = requests.lines([11, 10])
    requests.append(lines, np.array([5, 6]))
    requests.append(lines[:1], np.array([7]))
    assert requests.tokens(requests.line(10), 0).tolist() == [1, 2, 3, 6]
    assert requests.tokens(requests.line(11), 1).tolist() == [5, 7]
    assert requests.newest(lines).tolist() == [7, 6]
    assert requests.tokens(requests.line(10), 1, 3).tolist() == [2, 3]


def test_a_table_that_grows_keeps_what_is_in_it() -> None:
    requests = known([1], [2])
    lines = requests.lines([10, 11])
    requests.rows[lines] = [7, 8]
    requests.append(lines, np.array([3, 4]))
    requests.add(12, np.array([5, 6]))
    assert requests.num_lines == 4
    assert requests.rows[requests.lines([10, 11, 12])].tolist() == [7, 8, NO_ROW]
    assert [requests.tokens(requests.line(i), 0).tolist() for i in (10, 11, 12)] == [[1, 3], [2, 4], [5, 6]]


def test_the_line_of_a_request_that_ended_is_given_again_without_its_row() -> None:
    requests = known([1, 2, 3], [4])
    line = requests.line(10)
    requests.rows[line] = 5
    requests.remove(10)
    requests.add(12, np.array([9]))
    assert requests.line(12) == line and requests.num_lines == 2
    assert requests.rows[line] == NO_ROW and requests.tokens(line, 0).tolist() == [9]
    assert requests.request_ids() == [11, 12] and 10 not in requests
    with pytest.raises(KeyError):
        requests.line(10)
