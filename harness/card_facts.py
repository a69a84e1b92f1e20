"""What the card told during a job, in a few words, from the recorded files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

Row = Mapping[str, Any]
_FIGURES = (
    ("SM clock", "sm_clock_mhz", "MHz"),
    ("memory clock", "mem_clock_mhz", "MHz"),
    ("power", "power_w", "W"),
    ("temperature", "temperature_c", "°C"),
)


class CardFact(NamedTuple):
    name: str
    value: str
    note: str


def card_facts(sizes: Sequence[Row], workload: Row | None) -> Iterator[CardFact]:
    """Yield clocks, power, temperature and energy a token; nothing where there was no card to ask.

    `sizes` are the rows of `sizes.csv`, `workload` that part of `result.json`.
    """
    telemetry = (workload or {}).get("telemetry") or {}
    for name, key, unit in _FIGURES:
        values = [row[key] for row in sizes if row.get(key) is not None]
        values += [telemetry[key][which] for which in ("min", "max") if telemetry.get(key)]
        if values:
            spread = f"{min(values):.0f} to {max(values):.0f}" if min(values) < max(values) else "throughout"
            yield CardFact(name, f"{median(values):.0f} {unit}", spread)
    energy = [row for row in sizes if row.get("energy_mj_per_token") is not None]
    if energy:
        best = min(energy, key=lambda row: float(row["energy_mj_per_token"]))
        where = f"steps in a row at batch {best['batch_size']}, {best['mode']}: the least of the sweep"
        yield CardFact("energy a token", f"{best['energy_mj_per_token']:.3g} mJ", where)
    if telemetry.get("energy_mj_per_token") is not None:
        note = f"workload, prefill included; {telemetry['energy_j']:.3g} J in all"
        yield CardFact("energy a token", f"{telemetry['energy_mj_per_token']:.3g} mJ", note)
