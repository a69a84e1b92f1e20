"""How the steps of a workload ran: mode shares and padding waste, from `steps.parquet`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from harness.floor import Floor


@dataclass(frozen=True)
class ModeShare:
    """The decode steps that ran in one mode for one reason."""

    mode: str
    reason: str
    num_steps: int
    mean_batch_size: float
    #: Of all decode steps, and of the time of all decode steps; 0 to 1, None if no time was measured.
    share: float
    time_share: float | None
    #: The floor of these steps over their time; None if it is not known.
    floor_share: float | None = None


def mode_shares(steps: pd.DataFrame, floor: Floor | None = None) -> list[ModeShare]:
    """Return the decode steps by mode and reason, most frequent first."""
    decode = steps[steps["phase"] == "decode"]
    total_ms = float(decode["step_ms"].sum())
    shares = [
        ModeShare(
            mode=str(mode),
            reason=str(reason),
            num_steps=len(group),
            mean_batch_size=float(group["batch_size"].mean()),
            share=len(group) / len(decode),
            time_share=float(group["step_ms"].sum()) / total_ms if total_ms else None,
            floor_share=None if floor is None else workload_floor_share(group, floor),
        )
        for (mode, reason), group in decode.fillna({"mode": "", "reason": ""}).groupby(["mode", "reason"])
    ]
    return sorted(shares, key=lambda share: -share.num_steps)


def workload_floor_share(decode: pd.DataFrame, floor: Floor) -> float | None:
    """Return the floor of decode steps over the time that they took; None without a time."""
    step_ms = float(decode["step_ms"].sum())
    return float(floor.step_ms(decode["num_kv_tokens"]).sum()) / step_ms if step_ms else None


def padding_waste(steps: pd.DataFrame) -> float | None:
    """Return the share of padding rows among all rows of padded steps; None without one."""
    replayed = steps[steps["mode"].isin(["graph", "split", "compiled"]) & (steps["phase"] == "decode")]
    num_rows = int(replayed["padded_batch_size"].sum())
    return 1.0 - int(replayed["batch_size"].sum()) / num_rows if num_rows else None
