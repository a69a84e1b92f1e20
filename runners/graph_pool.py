"""The private memory pool that the graphs of all runners share, and who is using it."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

PoolHandle = tuple[int, int]

_EMULATED = -1
_emulated_ids = itertools.count(1)
_pool: PoolHandle | None = None
_users: weakref.WeakSet[Any] = weakref.WeakSet()


def get_global_graph_memory_pool() -> PoolHandle | None:
    """Return the handle that all runners capture into, or None if nobody has one."""
    return _pool


def set_global_graph_memory_pool(pool: PoolHandle | None) -> None:
    """Set the handle that later runners capture into. Graphs already captured keep theirs."""
    global _pool
    _pool = pool


def acquire_graph_pool(user: object, graph_backend: str) -> PoolHandle:
    """Return the shared handle for `user`, made on first use. `release_graph_pool` ends the use."""
    global _pool
    if _pool is None or (not _users and _is_emulated(_pool) != (graph_backend == "emulated")):
        _pool = _new_pool(graph_backend)
    _users.add(user)
    return _pool


def release_graph_pool(user: object) -> None:
    """End `user`'s use of the pool. The handle is dropped when its last user goes."""
    global _pool
    if user not in _users:
        return
    _users.discard(user)
    if not _users:
        _pool = None


def clear_cublas_workspaces() -> None:
    """Free what cuBLAS keeps for each stream that it ran on, unless graphs are alive that point to it."""
    if _pool is None and torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


def _new_pool(graph_backend: str) -> PoolHandle:
    if graph_backend == "emulated":
        return (_EMULATED, next(_emulated_ids))
    handle: PoolHandle = torch.cuda.graph_pool_handle()
    return handle


def _is_emulated(pool: PoolHandle) -> bool:
    return pool[0] == _EMULATED
