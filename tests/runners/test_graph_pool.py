"""One pool for all runners, gone with its last user."""

from __future__ import annotations

import pytest

from runners.cuda_graph_runner import get_global_graph_memory_pool, set_global_graph_memory_pool
from runners.graph_pool import acquire_graph_pool, release_graph_pool


class User:
    pass


@pytest.fixture(autouse=True)
def no_pool() -> None:
    set_global_graph_memory_pool(None)


def test_users_share_one_handle_and_the_last_one_drops_it() -> None:
    first, second = User(), User()

    assert acquire_graph_pool(first, "emulated") == acquire_graph_pool(second, "emulated")
    release_graph_pool(first)
    assert get_global_graph_memory_pool() is not None
    release_graph_pool(second)
    assert get_global_graph_memory_pool() is None


def test_a_handle_set_by_the_caller_is_used() -> None:
    donor = User()
    pool = acquire_graph_pool(donor, "emulated")
    release_graph_pool(donor)
    set_global_graph_memory_pool(pool)

    user = User()
    assert acquire_graph_pool(user, "emulated") == pool
    release_graph_pool(user)


def test_a_new_handle_follows_a_dropped_one() -> None:
    first = User()
    old = acquire_graph_pool(first, "emulated")
    release_graph_pool(first)

    second = User()
    assert acquire_graph_pool(second, "emulated") != old
    release_graph_pool(second)


def test_releasing_twice_does_not_drop_the_handle_of_others() -> None:
    first, second = User(), User()
    acquire_graph_pool(first, "emulated")
    acquire_graph_pool(second, "emulated")

    release_graph_pool(first)
    release_graph_pool(first)

    assert get_global_graph_memory_pool() is not None
    release_graph_pool(second)
