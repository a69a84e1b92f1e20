"""What every source of requests goes through: order, length limits, cuts and the rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import ConfigError
from harness.workload.base import Workload, arrival_rate

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Shaping:
    """Limits and scaling of a workload; None leaves it as it is."""

    #: Prompt and output tokens of a request together, at least 2.
    max_seq_len: int | None = None
    #: What becomes of a longer request: `clip` (shortens the longer of its two parts first), `skip`, `error`.
    over_length: str = "clip"
    max_requests: int | None = None
    #: Keeps the requests that arrive before this time, on the virtual clock (after the rate is scaled).
    duration_s: float | None = None
    #: Multiplies the rate: 2 halves the gaps.
    rate_scale: float = 1.0
    #: Rescales the gaps to this mean rate (requests a second, or inf: all at once).
    request_rate: float | None = None
    max_concurrency: int | None = None


def shape(
    arrival_s: NDArray[np.float64],
    prompt_len: NDArray[np.int64],
    output_len: NDArray[np.int64],
    shaping: Shaping,
    notes: dict[str, int | float | str] | None = None,
) -> Workload:
    """Sort, limit, cut and scale requests of any source, in this order; count what was changed.

    Requests without a prompt or an output token (BurstGPT logs failed requests so) are left out.
    Raises ConfigError if none is left, or for a request over the limit with `over_length=error`.
    """
    notes = dict(notes or {})
    arrival_s, prompt_len, output_len = _in_order(arrival_s, prompt_len, output_len, notes)
    keep = _with_tokens(prompt_len, output_len, notes)
    keep = _within_duration(arrival_s, keep, shaping)
    keep = _within_length(prompt_len, output_len, keep, shaping, notes)
    arrival_s, prompt_len, output_len = (
        arrival_s[keep] - arrival_s[keep[0]],
        prompt_len[keep],
        output_len[keep],
    )
    if shaping.over_length == "clip" and shaping.max_seq_len is not None:
        prompt_len, output_len = _clipped(prompt_len, output_len, shaping.max_seq_len, notes)
    return Workload(
        arrival_s=arrival_s / _speedup(arrival_s, shaping),
        prompt_len=prompt_len.astype(np.int32),
        output_len=output_len.astype(np.int32),
        max_concurrency=shaping.max_concurrency,
        notes=notes,
    )


def _in_order(
    arrival_s: NDArray[np.float64],
    prompt_len: NDArray[np.int64],
    output_len: NDArray[np.int64],
    notes: dict[str, int | float | str],
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    num_unsorted = int(np.count_nonzero(np.diff(arrival_s) < 0))
    if not num_unsorted:
        return arrival_s, prompt_len, output_len
    notes["num_out_of_order"] = num_unsorted
    order = np.argsort(arrival_s, kind="stable")
    return arrival_s[order], prompt_len[order], output_len[order]


def _with_tokens(
    prompt_len: NDArray[np.int64], output_len: NDArray[np.int64], notes: dict[str, int | float | str]
) -> NDArray[np.intp]:
    keep = (prompt_len > 0) & (output_len > 0)
    if num_empty := int(np.count_nonzero(~keep)):
        notes["num_without_tokens"] = num_empty
    return _some(np.flatnonzero(keep), "workload.path", "every request has 0 prompt or 0 output tokens")


def _within_duration(
    arrival_s: NDArray[np.float64], keep: NDArray[np.intp], shaping: Shaping
) -> NDArray[np.intp]:
    if shaping.duration_s is None:
        return keep
    arrival_s = arrival_s[keep] - arrival_s[keep[0]]
    end_s = shaping.duration_s * _speedup(arrival_s, shaping)
    return keep[: int(np.searchsorted(arrival_s, end_s))]


def _within_length(
    prompt_len: NDArray[np.int64],
    output_len: NDArray[np.int64],
    keep: NDArray[np.intp],
    shaping: Shaping,
    notes: dict[str, int | float | str],
) -> NDArray[np.intp]:
    """Apply `over_length` and `max_requests`: a skipped request does not use up the maximum."""
    if shaping.max_seq_len is None or shaping.over_length == "clip":
        return keep[: shaping.max_requests]
    fits = (prompt_len + output_len)[keep] <= shaping.max_seq_len
    if shaping.over_length == "error":
        kept = keep[: shaping.max_requests]
        _refuse_over_length(prompt_len[kept] + output_len[kept], shaping.max_seq_len)
        return kept
    positions = np.flatnonzero(fits)[: shaping.max_requests]
    remedy = f"every request is longer than model.max_seq_len={shaping.max_seq_len}: raise it, or write clip"
    _some(positions, "workload.over_length", remedy, "skip")
    if num_skipped := int(np.count_nonzero(~fits[: positions[-1] + 1])):
        notes["num_skipped"] = num_skipped
    return keep[positions]


def _refuse_over_length(num_tokens: NDArray[np.int64], max_seq_len: int) -> None:
    num_over = int(np.count_nonzero(num_tokens > max_seq_len))
    if num_over:
        raise ConfigError(
            "workload.over_length",
            "error",
            f"{num_over} of {len(num_tokens)} requests are longer than model.max_seq_len={max_seq_len} "
            f"(the longest has {num_tokens.max()} tokens): raise it, or write clip or skip",
        )


def _clipped(
    prompt_len: NDArray[np.int64],
    output_len: NDArray[np.int64],
    max_seq_len: int,
    notes: dict[str, int | float | str],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shorten long requests to `max_seq_len`: prompt and output keep up to half each, and what the other leaves.

    To clip the output first would leave a long prompt one decode step, and so no decode batch to
    measure; to clip the prompt first would leave a long output nothing to attend to.
    """
    half = max_seq_len // 2
    new_output = np.minimum(output_len, np.maximum(half, max_seq_len - prompt_len))
    new_prompt = np.minimum(prompt_len, max_seq_len - new_output)
    if num_clipped := int(np.count_nonzero(prompt_len + output_len > max_seq_len)):
        notes["num_clipped"] = num_clipped
    return new_prompt, new_output


def _speedup(arrival_s: NDArray[np.float64], shaping: Shaping) -> float:
    """By how much the gaps shrink: `rate_scale`, or what brings the mean rate to `request_rate`."""
    if shaping.request_rate is None:
        return shaping.rate_scale
    if shaping.rate_scale != 1:
        raise ConfigError(
            "workload.rate_scale",
            shaping.rate_scale,
            "workload.request_rate sets the rate already: write rate_scale=1 or request_rate=null",
        )
    rate, _ = arrival_rate(arrival_s)
    return shaping.request_rate / rate if rate else 1.0


def _some(keep: NDArray[np.intp], field: str, remedy: str, value: object = None) -> NDArray[np.intp]:
    if not len(keep):
        raise ConfigError(field, value, remedy)
    return keep
