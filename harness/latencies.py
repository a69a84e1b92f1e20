"""Latencies of a replay, summarised under the keys and definitions of `vllm bench serve`.

Source: vllm/benchmarks/serve.py, `calculate_metrics` and the result of `benchmark`. The one difference:
what has no sample is None here, where vLLM writes 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.scheduler_loop import RequestRow

#: Metrics that a goodput objective may name, each in ms.
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class Latencies:
    """Collects what a summary needs, as flat arrays: 8 bytes an output token, 56 a request."""

    def __init__(self) -> None:
        self._itl_ms = array("d")
        self._token_ms: list[float] = []
        self._num_tokens: list[int] = []
        self._requests: dict[str, array[float]] = {
            name: array("d")
            for name in (
                "sent_ms",
                "finished_ms",
                "prompt_len",
                "output_len",
                "ttft_ms",
                "tpot_ms",
                "e2el_ms",
            )
        }
        self._last_sent_ms = 0.0

    def add_sending(self, sent_ms: float) -> None:
        self._last_sent_ms = max(self._last_sent_ms, sent_ms)

    def add_tokens(self, now_ms: float, num_tokens: int, gaps_ms: NDArray[np.float64]) -> None:
        """Add the tokens of a step, and the gap to the token before for all but first tokens, `[n]`."""
        if num_tokens:
            self._token_ms.append(now_ms)
            self._num_tokens.append(num_tokens)
            self._itl_ms.frombytes(gaps_ms.tobytes())

    def add_request(self, row: RequestRow, sent_ms: float, finished_ms: float) -> None:
        tpot_ms = row["tpot_ms"]
        values = {
            "sent_ms": sent_ms,
            "finished_ms": finished_ms,
            "prompt_len": row["prompt_len"],
            "output_len": row["output_len"],
            "ttft_ms": row["ttft_ms"],
            "tpot_ms": np.nan if tpot_ms is None else tpot_ms,
            "e2el_ms": row["e2el_ms"],
        }
        for name, value in values.items():
            self._requests[name].append(value)

    def summary(self) -> LatencySummary:
        return LatencySummary(
            itl_ms=np.array(self._itl_ms),
            token_ms=np.array(self._token_ms),
            num_tokens=np.array(self._num_tokens, dtype=np.int64),
            last_sent_ms=self._last_sent_ms,
            **{name: np.array(values) for name, values in self._requests.items()},
        )


@dataclass(frozen=True)
class LatencySummary:
    """A finished replay. Arrays of `[num_requests]` are in the order of completion, float64."""

    sent_ms: NDArray[np.float64]
    finished_ms: NDArray[np.float64]
    prompt_len: NDArray[np.float64]
    output_len: NDArray[np.float64]
    ttft_ms: NDArray[np.float64]
    #: NaN for a request of one output token.
    tpot_ms: NDArray[np.float64]
    e2el_ms: NDArray[np.float64]
    #: `[num_gaps]`, the gaps of all requests pooled.
    itl_ms: NDArray[np.float64]
    #: `[num_steps]`, the steps that yielded tokens: when, and how many.
    token_ms: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    last_sent_ms: float

    @property
    def ramp_end_ms(self) -> float | None:
        """When the first request was answered: before it, the batch only grew."""
        return float(self.finished_ms.min()) if len(self.finished_ms) else None

    @property
    def drain_start_ms(self) -> float | None:
        """When the last request was sent: after it, the batch only shrinks."""
        return self.last_sent_ms if len(self.sent_ms) else None

    @property
    def num_output_tokens(self) -> int:
        return int(self.output_len.sum())

    def bench_serve(self, goodput_ms: Mapping[str, float] | None = None) -> dict[str, float | int | None]:
        """Return the summary under the keys of `vllm bench serve`'s JSON result.

        `goodput_ms` maps ttft, tpot and e2el to the limits that make a request a good one; as in vLLM, a
        one-token output meets any limit on TPOT. The duration is that of the virtual clock, from the
        first sending to the last token.
        """
        completed = len(self.sent_ms)
        duration_s = float(self.finished_ms.max() - self.sent_ms.min()) / 1e3 if completed else 0.0
        total_input, total_output = int(self.prompt_len.sum()), self.num_output_tokens
        num_good = self._num_good(goodput_ms) if goodput_ms else None
        result: dict[str, float | int | None] = {
            "duration": duration_s,
            "completed": completed,
            "failed": 0,
            "total_input_tokens": total_input,
            "total_output_tokens": total_output,
            "request_throughput": _rate(completed, duration_s),
            "request_goodput": _rate(num_good, duration_s),
            "output_throughput": _rate(total_output, duration_s),
            "total_token_throughput": _rate(total_input + total_output, duration_s),
            "max_output_tokens_per_s": self._max_output_tokens_per_s(),
            "max_concurrent_requests": self._max_concurrent_requests(),
        }
        tpot_ms = self.tpot_ms[~np.isnan(self.tpot_ms)]
        metrics = {"ttft": self.ttft_ms, "tpot": tpot_ms, "itl": self.itl_ms, "e2el": self.e2el_ms}
        for name, values in metrics.items():
            result |= _latency_keys(name, values)
        return result

    def _num_good(self, goodput_ms: Mapping[str, float]) -> int:
        unknown = set(goodput_ms) - set(GOODPUT_METRICS)
        if unknown:
            raise ValueError(
                f"goodput has no metric {min(unknown)!r}: choose of {', '.join(GOODPUT_METRICS)}"
            )
        good = np.ones(len(self.sent_ms), dtype=bool)
        for name, limit_ms in goodput_ms.items():
            good &= np.nan_to_num(getattr(self, f"{name}_ms")) <= limit_ms
        return int(good.sum())

    def _max_output_tokens_per_s(self) -> float | None:
        """The busiest second, in seconds counted from the first sending."""
        if not len(self.token_ms):
            return None
        second = ((self.token_ms - self.sent_ms.min()) / 1e3).astype(np.int64)
        return float(np.bincount(second, weights=self.num_tokens).max())

    def _max_concurrent_requests(self) -> int | None:
        """Requests that were in the system at any time within one second, at most (vLLM counts so)."""
        if not len(self.sent_ms):
            return None
        start_ms = self.sent_ms.min()
        first = ((self.sent_ms - start_ms) / 1e3).astype(np.int64)
        last = ((self.finished_ms - start_ms) / 1e3).astype(np.int64)
        change = np.bincount(first, minlength=last.max() + 2) - np.bincount(
            last + 1, minlength=last.max() + 2
        )
        return int(np.cumsum(change).max())


def _latency_keys(name: str, values_ms: NDArray[np.float64]) -> dict[str, float | int | None]:
    if not len(values_ms):
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
        f"p99_{name}_ms": float(np.percentile(values_ms, 99)),
    }


def _rate(count: int | None, duration_s: float) -> float | None:
    return None if count is None or duration_s <= 0 else count / duration_s
