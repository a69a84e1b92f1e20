"""What a simulated replay added up to: steps, shares, latencies and the batch histogram."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.planner import kernel_state as kn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.step_times import StepTimes


@dataclass(frozen=True)
class Simulation:
    """A finished simulation. Latencies come from histograms whose bins are 1% wide; means are exact."""

    times: StepTimes
    #: `[num_windows, max_batch_size + 1, num_cells]` decode steps of the steady part: no ramp, no drain.
    histogram: NDArray[np.int64]
    #: The same shape: the tokens that requests have less than the longest one of their step, summed; and the
    #: time of these steps, `[num_windows, max_batch_size + 1]`.
    excess_tokens: NDArray[np.int64]
    window_ns: NDArray[np.int64]
    #: Length of a window in ms; None with a single one.
    window_ms: float | None
    #: `[max_batch_size + 1]` all decode steps, and their time.
    batch_steps: NDArray[np.int64]
    batch_ns: NDArray[np.int64]
    num_steps: int
    num_prefill_steps: int
    prefill_ms: float
    num_preemptions: int
    num_answered: int
    #: Answers within the SLO; all of them if there is none.
    num_good: int
    input_tokens: int
    output_tokens: int
    #: From the first sending to the last token.
    duration_ms: float
    latency_ms: dict[str, dict[str, float | None]]

    @classmethod
    def of(cls, times: StepTimes, state: kn.Kernel, window_ns: int | None) -> Simulation:
        """Read the result of a kernel that is done."""
        s = state.scalars
        answered = int(s[kn.NUM_ANSWERED])
        sums = {
            "ttft": (s[kn.TTFT_NS], answered),
            "tpot": (s[kn.TPOT_NS], int(s[kn.NUM_TPOT])),
            "e2el": (s[kn.E2EL_NS], answered),
            "itl": (None, 0),
        }
        rows = {"ttft": kn.TTFT, "tpot": kn.TPOT, "e2el": kn.E2EL, "itl": kn.ITL}
        return cls(
            times=times,
            histogram=state.histogram,
            excess_tokens=state.excess_tokens,
            window_ns=state.window_ns,
            window_ms=None if window_ns is None else window_ns / 1e6,
            batch_steps=state.batch_steps,
            batch_ns=state.batch_ns,
            num_steps=int(s[kn.NUM_STEPS]),
            num_prefill_steps=int(s[kn.PREFILL_STEPS]),
            prefill_ms=float(s[kn.PREFILL_NS]) / 1e6,
            num_preemptions=int(s[kn.NUM_PREEMPTIONS]),
            num_answered=answered,
            num_good=int(s[kn.NUM_GOOD]),
            input_tokens=int(s[kn.INPUT_TOKENS]),
            output_tokens=int(s[kn.OUTPUT_TOKENS]),
            duration_ms=float(s[kn.LAST_ANSWER_NS] - s[kn.FIRST_SENT_NS]) / 1e6,
            latency_ms={
                name: _latency(state.latencies[rows[name]], *sums[name])
                for name in ("ttft", "tpot", "itl", "e2el")
            },
        )

    @property
    def num_decode_steps(self) -> int:
        return int(self.batch_steps.sum())

    @property
    def mean_batch_size(self) -> float | None:
        steps = self.num_decode_steps
        return float((self.batch_steps * np.arange(len(self.batch_steps))).sum()) / steps if steps else None

    @property
    def mean_step_ms(self) -> float | None:
        """Mean time of all decode steps, ramp and drain included."""
        steps = self.num_decode_steps
        return float(self.batch_ns.sum()) / 1e6 / steps if steps else None

    def mode_shares(self) -> dict[str, float]:
        """Share of the decode steps that ran in each mode."""
        steps = self.num_decode_steps
        counts: Counter[str] = Counter()
        for batch_size in np.flatnonzero(self.batch_steps):
            counts[self.times.plans[batch_size].mode] += int(self.batch_steps[batch_size])
        return {mode: count / steps for mode, count in sorted(counts.items())}

    def padding_waste(self) -> float | None:
        """Padding rows among all rows that decode steps computed."""
        sizes = range(len(self.batch_steps))
        padded = np.array([self.times.plans[size].padded_batch_size(size) for size in sizes])
        rows = int((padded * self.batch_steps).sum())
        return 1 - int((np.arange(len(padded)) * self.batch_steps).sum()) / rows if rows else None

    def as_dict(self) -> dict[str, Any]:
        """Return the result under the words of the record: keys of `result.json` and `bench_serve.json`."""
        seconds = self.duration_ms / 1e3
        result: dict[str, Any] = {
            "duration": seconds,
            "completed": self.num_answered,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.num_answered / seconds if seconds else None,
            "request_goodput": self.num_good / seconds if seconds else None,
            "output_throughput": self.output_tokens / seconds if seconds else None,
            "num_steps": self.num_steps,
            "num_decode_steps": self.num_decode_steps,
            "num_prefill_steps": self.num_prefill_steps,
            "num_preemptions": self.num_preemptions,
            "mode_shares": self.mode_shares(),
            "mean_batch_size": self.mean_batch_size,
            "mean_step_ms": self.mean_step_ms,
            "padding_waste": self.padding_waste(),
            "batch_size_steps": {
                str(size): int(self.batch_steps[size]) for size in np.flatnonzero(self.batch_steps)
            },
        }
        for name, values in self.latency_ms.items():
            result |= {f"{statistic}_{name}_ms": value for statistic, value in values.items()}
        return result


def _latency(counts: NDArray[np.int64], total_ns: int | None, num: int) -> dict[str, float | None]:
    """Mean, median and p99 in ms. The mean is exact where the sum is known."""
    if not counts.sum():
        return dict.fromkeys(("mean", "median", "p99"))
    middles = kn.LATENCY_GROWTH ** (np.arange(len(counts)) + 0.5) / 1e3
    cumulative = counts.cumsum()
    ranks = (int(np.searchsorted(cumulative, share * cumulative[-1])) for share in (0.5, 0.99))
    median, p99 = (float(middles[rank]) for rank in ranks)
    mean = float((counts * middles).sum() / counts.sum()) if total_ns is None else float(total_ns) / num / 1e6
    return {"mean": mean, "median": median, "p99": p99}
