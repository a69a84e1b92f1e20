"""The floor of a decode step: no step is faster than reading its weights and its cache once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Floor:
    """What a step reads, and how fast the device copies (bytes read plus bytes written, a second)."""

    decode_weight_bytes: int
    kv_bytes_per_token: int
    #: None where it could not be measured; then there is no floor.
    copy_bandwidth_bytes_per_s: float | None

    @classmethod
    def of_record(cls, result: Mapping[str, Any]) -> Self | None:
        """Return the floor that a job measured; None if it measured none."""
        part = result.get("size_sweep") or {}
        values: list[Any] = [part.get(name) for name in cls.__dataclass_fields__]
        return None if None in values else cls(*values)

    def step_ms(self, num_kv_tokens: Any) -> Any:
        """Return the floor in ms of steps that read this many KV tokens, a number or an array; or None."""
        if self.copy_bandwidth_bytes_per_s is None:
            return None
        num_bytes = self.decode_weight_bytes + num_kv_tokens * self.kv_bytes_per_token
        return 1e3 * num_bytes / self.copy_bandwidth_bytes_per_s


def floor_share(row: Mapping[str, Any], latency: str) -> float | None:
    """Return the floor of a row of `sizes.csv` as a share of one of its latencies; None if not measured."""
    floor_ms, latency_ms = row.get("roofline_ms"), row.get(latency)
    return None if floor_ms is None or not latency_ms else float(floor_ms / latency_ms)


def workload_floor(result: Mapping[str, Any]) -> Floor | None:
    """Return the floor that steps of the workload may be held against: their times were measured."""
    is_measured = (result.get("workload") or {}).get("clock") == "measured"
    return Floor.of_record(result) if is_measured else None
