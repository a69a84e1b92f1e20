"""The energy of a piece of work, by the card's own counter."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A counter that stands still for this many times the wanted seconds is given up.
_PATIENCE = 4


def energy_of(
    run: Callable[[], object],
    energy_mj: Callable[[], int | None],
    seconds: float,
    timer_s: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Return the energy of one `run` in mJ, called over and over for at least `seconds`.

    The counter moves in jumps, some 20 to 100 ms apart, so the measurement begins and ends at one. None if
    `energy_mj` tells nothing, or for 0 seconds.
    """
    level_mj = energy_mj() if seconds else None
    if level_mj is None:
        return None
    began: tuple[float, int] | None = None
    num_runs, jumped_s = 0, timer_s()
    while True:
        run()
        num_runs += 1
        now_mj, now_s = energy_mj(), timer_s()
        if now_mj is None or (now_mj == level_mj and now_s - jumped_s > _PATIENCE * seconds):
            return None
        if now_mj == level_mj:
            continue
        level_mj, jumped_s = now_mj, now_s
        if began is None:
            began, num_runs = (now_s, now_mj), 0
        elif now_s - began[0] >= seconds:
            return (now_mj - began[1]) / num_runs
