"""How the steps of a workload ran: mode shares and padding waste, from `steps.parquet`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


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


def mode_shares(steps: pd.DataFrame) -> list[ModeShare]:
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
        )
        for (mode, reason), group in decode.fillna({"mode": "", "reason": ""}).groupby(["mode", "reason"])
    ]
    return sorted(shares, key=lambda share: -share.num_steps)


def padding_waste(steps: pd.DataFrame) -> float | None:
    """Return the share of padding rows among all rows of padded steps; None without one."""
    replayed = steps[steps["mode"].isin(["graph", "split", "compiled"]) & (steps["phase"] == "decode")]
    num_rows = int(replayed["padded_batch_size"].sum())
    return 1.0 - int(replayed["batch_size"].sum()) / num_rows if num_rows else None
