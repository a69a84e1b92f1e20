"""A shortest path under limits on what its nodes take: exact label search with Lagrangian bounds.

Prices on the resources turn the limits into costs; the cheapest priced path is a lower bound, and a
priced path that happens to be within the limits an upper one (Handler and Zang 1980). What is left is
searched: partial paths are extended size by size, and dropped when another is no worse in every way, or
when even the cheapest priced way to go on ends above a ceiling. The ceiling starts just above the lower
bound and is raised until a path lies below it, which is then the cheapest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_PRICE_STEPS = 60
#: How far above the lower bound the first ceiling lies, as a fraction, and how the distance grows.
_FIRST_MARGIN, _MARGIN_GROWTH = 2e-5, 3.0
#: Extensions that a search looks at. Beyond it a narrow search, which keeps this many partial paths at a
#: node, returns a good path and its gap.
_MAX_WORK, _BEAM = 2_000_000, 20
#: Price of a node that breaks ties, as a share of the cost of the path that visits none.
_TIE = 1e-12
#: Slack for rounding, where a path is compared with a limit or with the best one known.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class _Network:
    """What is searched, and the prices that bound it.

    A column stands for where a path is: column 0 for the start, column `i + 1` for node `i`.
    """

    #: `[n, n + 1]` cost of going to a node from a column; infinite where one cannot.
    arc_cost: NDArray[np.float64]
    #: `[num_resources, n]` what visiting a node takes, not negative; `[num_resources]` how much there is.
    resources: NDArray[np.float64]
    limits: NDArray[np.float64]

    @property
    def last(self) -> int:
        return len(self.arc_cost) - 1

    def cost(self, path: Sequence[int]) -> float:
        return sum(float(self.arc_cost[j, i + 1]) for i, j in zip([-1, *path], path, strict=False))

    def is_within(self, path: Sequence[int]) -> bool:
        return bool((self.resources[:, path].sum(axis=1) <= self.limits + _TOLERANCE).all())


@dataclass(frozen=True)
class _Prices:
    """Prices of the resources, the bound that they prove, and priced costs along the network."""

    bound: float
    #: `[num_resources]`
    price: NDArray[np.float64]
    #: `[n]` lowest priced cost from each node to the last, the node's own left out.
    to_go: NDArray[np.float64]


def search(
    arc_cost: NDArray[np.float64],
    resources: NDArray[np.float64],
    limits: NDArray[np.float64],
    start: Sequence[int] | None = None,
) -> tuple[list[int], float]:
    """Return the cheapest path to the last node within `limits`, and the gap that is left unproven.

    Args:
        arc_cost: `[n, n + 1]`: entry `[j, i]` is the cost of going to node `j` from node `i - 1`, or from
            the start for `i = 0`; infinite where one cannot.
        resources: `[num_resources, n]` what visiting a node takes, not negative.
        limits: `[num_resources]`; the last node alone must be within them.
        start: a path within the limits, to begin with.

    The gap is a fraction of the cost: 0 unless the search had to be cut short.
    """
    network = _Network(arc_cost, resources, limits)
    prices, path = _raise_prices(network, list(start) if start else [network.last])
    upper = network.cost(path)
    margin, complete = _FIRST_MARGIN, True
    while complete:
        ceiling = min(upper, prices.bound * (1 + margin))
        found, complete = _extend(network, prices, ceiling, beam=None)
        if found or ceiling == upper:
            break
        margin *= _MARGIN_GROWTH
    if not complete:
        found = _extend(network, prices, upper, beam=_BEAM)[0]
    path = found or path
    return path, 0.0 if complete else max(0.0, 1 - prices.bound / network.cost(path))


def shortest_path(arc_cost: NDArray[np.float64]) -> list[int]:
    """Return the cheapest path without limits, of the fewest nodes among equals; see `search`."""
    one_each = _Network(arc_cost, np.ones((1, len(arc_cost))), np.zeros(1))
    alone = float(arc_cost[-1, 0])
    return _priced_path(one_each, np.array([alone * _TIE]))[1]


def _raise_prices(network: _Network, path: list[int]) -> tuple[_Prices, list[int]]:
    """Find prices that bound well, by subgradient steps of Polyak's length; and the best path met."""
    price = np.zeros(len(network.limits))
    best = _Prices(-np.inf, price, np.zeros(network.last + 1))
    upper, scale = network.cost(path), 1.0
    for _ in range(_MAX_PRICE_STEPS):
        to_go, priced_path = _priced_path(network, price)
        bound = float(to_go[-1] - price @ network.limits)
        if network.is_within(priced_path) and network.cost(priced_path) < upper:
            path, upper = priced_path, network.cost(priced_path)
        if bound > best.bound:
            best = _Prices(bound, price, to_go[:-1])
        else:
            scale *= 0.7
        slope = network.resources[:, priced_path].sum(axis=1) - network.limits
        if upper - bound <= _TOLERANCE * upper or not slope.any():
            break
        price = np.maximum(0.0, price + scale * (upper - bound) / (slope @ slope) * slope)
    return best, path


def _priced_path(network: _Network, price: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[int]]:
    """Return `[n + 1]` the priced cost from each node to the last (entry `n`: from the start), and the path."""
    last, node_price = network.last, price @ network.resources
    columns = np.ascontiguousarray(network.arc_cost.T)
    to_go: NDArray[np.float64] = np.zeros(last + 2)
    after = np.zeros(last + 2, dtype=np.int64)
    for i in range(last - 1, -2, -1):
        onwards = columns[i + 1, i + 1 :] + node_price[i + 1 :] + to_go[i + 1 : last + 1]
        best = int(np.argmin(onwards))
        to_go[i], after[i] = onwards[best], i + 1 + best
    path = [int(after[-1])]
    while path[-1] != last:
        path.append(int(after[path[-1]]))
    return to_go, path


@dataclass(frozen=True)
class _Labels:
    """Partial paths that stand at one column: cost, what they took, and the label each came from."""

    cost: NDArray[np.float64]
    #: `[num_resources, num_labels]`
    taken: NDArray[np.float64]
    #: `[2, num_labels]` column and position of the predecessor.
    origin: NDArray[np.int64]

    def at(self, index: NDArray[np.int64]) -> _Labels:
        return _Labels(self.cost[index], self.taken[:, index], self.origin[:, index])


def _extend(
    network: _Network, prices: _Prices, upper: float, beam: int | None
) -> tuple[list[int] | None, bool]:
    """Return the cheapest path that costs less than `upper`, or None; and whether all such were considered."""
    last, ceiling = network.last, upper * (1 - _TOLERANCE)
    num_resources = len(network.limits)
    labels = [_Labels(np.zeros(1), np.zeros((num_resources, 1)), np.full((2, 1), -1))]
    #: Per column the lowest priced cost to it: an arc that cannot beat the ceiling is not looked at.
    reached = [0.0]
    budget_value = float(prices.price @ network.limits)
    node_price = prices.price @ network.resources
    work = 0
    for node in range(last + 1):
        onwards = network.arc_cost[node, : node + 1] + node_price[node] + prices.to_go[node]
        columns = np.flatnonzero(np.array(reached) + onwards - budget_value < ceiling)
        here = _arrivals(network, labels, node, columns)
        work += len(here.cost)
        if beam is None and work > _MAX_WORK:
            return None, False
        needed = network.resources[:, last, None] if node < last else 0.0
        priced = here.cost + prices.price @ here.taken + prices.to_go[node]
        keep = (here.taken + needed <= network.limits[:, None] + _TOLERANCE).all(axis=0)
        here = here.at(np.flatnonzero(keep & (priced - budget_value < ceiling)))
        if node == last:
            return _cheapest(labels, here.at(np.flatnonzero(here.cost < ceiling)), last), True
        here = here.at(_undominated(here.cost, here.taken))
        priced = here.cost + prices.price @ here.taken
        if beam is not None and len(priced) > beam:
            here = here.at(np.argpartition(priced, beam)[:beam])
            priced = here.cost + prices.price @ here.taken
        labels.append(here)
        reached.append(float(priced.min(initial=np.inf)))
    raise AssertionError("the last node ends the search")


def _arrivals(network: _Network, labels: list[_Labels], node: int, columns: NDArray[np.int64]) -> _Labels:
    """All partial paths of `columns`, extended to `node`."""
    num_resources = len(network.limits)
    sources = [(int(column), labels[column]) for column in columns if len(labels[column].cost)]
    if not sources:
        return _Labels(np.zeros(0), np.zeros((num_resources, 0)), np.zeros((2, 0), dtype=np.int64))
    return _Labels(
        np.concatenate([at.cost + network.arc_cost[node, column] for column, at in sources]),
        np.concatenate([at.taken for _, at in sources], axis=1) + network.resources[:, node, None],
        np.concatenate(
            [np.stack([np.full(len(at.cost), column), np.arange(len(at.cost))]) for column, at in sources],
            axis=1,
        ),
    )


def _cheapest(labels: list[_Labels], here: _Labels, last: int) -> list[int] | None:
    if not len(here.cost):
        return None
    column, position = here.origin[:, int(np.argmin(here.cost))].tolist()
    path = [last]
    while column:
        path.append(column - 1)
        column, position = labels[column].origin[:, position].tolist()
    return path[::-1]


def _undominated(cost: NDArray[np.float64], taken: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of labels that no other one equals or betters in cost and every resource."""
    order = np.lexsort((*taken[::-1], cost))
    if len(taken) == 1:
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], taken[0, order[:-1]]]))
        kept: NDArray[np.int64] = order[taken[0, order] < best_before[: len(order)]]
        return kept
    return _staircase(order, taken)


def _staircase(order: NDArray[np.int64], taken: NDArray[np.float64]) -> NDArray[np.int64]:
    """For several resources: scan by rising cost, keeping the lower left staircase of the last two.

    With three resources, labels are compared only where the first is equal: some that are dominated
    stay, which costs time and no exactness.
    """
    kept: list[int] = []
    stairs: dict[tuple[float, ...], tuple[list[float], list[float]]] = {}
    *groups, all_x, all_y = taken[:, order].tolist()
    group_of = list(zip(*groups, strict=True)) or [()] * len(order)
    for index, group, x, y in zip(order.tolist(), group_of, all_x, all_y, strict=True):
        xs, ys = stairs.setdefault(group, ([], []))
        position = bisect_right(xs, x)
        if position and ys[position - 1] <= y:
            continue
        kept.append(index)
        end = position
        while end < len(ys) and ys[end] >= y:
            end += 1
        xs[position:end], ys[position:end] = [x], [y]
    return np.array(kept, dtype=np.int64)
