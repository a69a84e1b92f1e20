"""Proves that replay equals eager, with the padding poisoned, before anything is timed.

Two comparisons a case (contract 3 of the design): the replay against an eager step *at the same
padded shape and plan*, which must agree bitwise or within the tolerance; and against the unpadded
eager step, where a GEMM may round otherwise at another shape: within the tolerance, and the same
top-1 token wherever the top-2 gap exceeds four times the measured error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from harness.probe import ProbeRequests
from runners.errors import NoUsableGraphError
from runners.padding import StepPlan

if TYPE_CHECKING:
    from harness.schema import ParityConfig
    from runners.forward_batch import ForwardBatch, LogitsProcessorOutput
    from runners.model_runner import ModelRunner

#: Tolerance per dtype, as a fraction of the largest reference logit and as an absolute floor. A bf16
#: product carries 2**-8 relative error; over some tens of layers a few per cent of the largest logit.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (6e-2, 2e-2),
}
_MAX_CASES_A_KIND = 24
_GAP_FACTOR = 4.0


@dataclass(frozen=True)
class ParityCase:
    """One batch, decoded by replay and by eager. Errors are in logits."""

    batch_size: int
    padded_batch_size: int
    mode: str
    num_graphs: int
    #: Replay against eager at the same padded shape.
    bitwise: bool
    max_abs_error: float
    max_rel_error: float
    #: Replay against the unpadded eager step.
    unpadded_max_abs_error: float
    unpadded_max_rel_error: float
    #: Share of rows with the same top-1 token, and how many of the others had a clear top-2 gap.
    top1_agreement: float
    num_top1_violations: int
    min_top2_gap: float
    passed: bool
    #: Why it failed.
    reason: str = ""
    #: Padded sizes of the parts, and why the step ran so (the words of `runners.padding`).
    sizes: tuple[int, ...] = ()
    plan_reason: str = ""
    #: Share of rows for which replay and eager at the same padded shape sampled the same token, from the
    #: same random numbers.
    sampled_agreement: float = 1.0


@dataclass
class ParityReport:
    """All cases of a job and the verdict."""

    rtol: float
    atol: float
    cases: list[ParityCase] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Return the `parity` part of `result.json`; figures that no case measured are None."""
        cases = self.cases

        def worst(name: str) -> float | None:
            return max((getattr(case, name) for case in cases), default=None)

        return {
            "verified": self.verified,
            "rtol": self.rtol,
            "atol": self.atol,
            "num_cases": len(cases),
            "num_failed": sum(not case.passed for case in cases),
            "num_bitwise": sum(case.bitwise for case in cases),
            "max_abs_error": worst("max_abs_error"),
            "max_rel_error": worst("max_rel_error"),
            "unpadded_max_abs_error": worst("unpadded_max_abs_error"),
            "unpadded_max_rel_error": worst("unpadded_max_rel_error"),
            "top1_agreement": min((case.top1_agreement for case in cases), default=None),
            "sampled_agreement": min((case.sampled_agreement for case in cases), default=None),
            "min_top2_gap": min((case.min_top2_gap for case in cases), default=None),
            "poisoned": True,
            "cases": [asdict(case) for case in cases],
        }


def parity_batch_sizes(capture_bs: Sequence[int], max_batch_size: int) -> list[int]:
    """Return the batch sizes to prove: captured ones, and ones that need padding or lie above.

    Long lists are thinned evenly; the smallest and the largest always stay.
    """
    on = sorted(set(capture_bs))
    off = sorted({size - 1 for size in on if size > 1} - set(on))
    above = [max_batch_size] if not on or max_batch_size > on[-1] else []
    return sorted({*_thin(on), *_thin(off), *above})


def sizes_chosen_by_cost(runner: ModelRunner, proven: Sequence[ParityCase] = ()) -> list[int]:
    """Return a batch size for each plan that only measured costs bring about and that is not proven yet."""
    graphs = runner.graph_runner
    if graphs is None:
        return []
    seen = {(case.mode, case.sizes) for case in proven}
    chosen = []
    for batch_size in range(min(runner.config.max_batch_size, runner.config.num_kv_pages - 1), 0, -1):
        try:
            plan = graphs.plan(batch_size)
        except NoUsableGraphError:
            continue
        if plan.mode != "eager" and plan.reason.startswith("cheaper") and (plan.mode, plan.sizes) not in seen:
            seen.add((plan.mode, plan.sizes))
            chosen.append(batch_size)
    return chosen


def _thin(sizes: Sequence[int]) -> list[int]:
    if len(sizes) <= _MAX_CASES_A_KIND:
        return list(sizes)
    step = (len(sizes) - 1) / (_MAX_CASES_A_KIND - 1)
    return [sizes[round(i * step)] for i in range(_MAX_CASES_A_KIND)]


def ragged_lengths(num_requests: int, page_size: int, max_len: int) -> list[int]:
    """Return unlike context lengths that end just before, on and just after a page edge."""
    edge = page_size * max(1, min(4, max_len // page_size - 1))
    pattern = [edge, 1, edge + 1, 2, max(1, edge - 1), page_size + 1, page_size, 2 * page_size - 1]
    return [min(max_len, max(1, pattern[i % 8] + (i // 8) % 3)) for i in range(num_requests)]


def fit_lengths(lengths: Sequence[int], page_size: int, num_pages: int) -> list[int]:
    """Return the lengths, the last ones shortened where they take more than `num_pages` pages together.

    Each request keeps one page, so there may be at most `num_pages` of them.
    """
    room = num_pages - len(lengths)
    fitting = []
    for length in lengths:
        more = min(-(-length // page_size) - 1, room)
        room -= more
        fitting.append(min(length, (1 + more) * page_size))
    return fitting


def check_parity(
    runner: ModelRunner,
    config: ParityConfig,
    seed: int,
    batch_sizes: Sequence[int] | None = None,
    on_case: Callable[[ParityCase], None] | None = None,
) -> ParityReport:
    """Decode each batch size by replay and by eager, largest first, then again after a larger one.

    Large batches come first so that every smaller one meets the rows that a larger one left behind.
    """
    graphs = runner.graph_runner
    rtol, atol = TOLERANCES[runner.dtype]
    report = ParityReport(
        rtol=config.rtol if config.rtol is not None else rtol,
        atol=config.atol if config.atol is not None else atol,
    )
    capture_bs = graphs.capture_bs if graphs is not None else []
    sizes = list(batch_sizes or parity_batch_sizes(capture_bs, runner.config.max_batch_size))
    room = runner.config.num_kv_pages - 1
    sizes = sorted({min(size, room) for size in sizes})  # a request takes a page at least
    lengths = ragged_lengths(sizes[-1], runner.config.page_size, runner.config.max_seq_len)
    lengths = fit_lengths(lengths, runner.config.page_size, room)
    with ProbeRequests(runner, lengths, seed) as probe, poisoned_padding(runner):
        for batch_size in sorted(sizes, reverse=True):
            case = _compare(runner, probe, batch_size, report)
            report.cases.append(case)
            if on_case is not None:
                on_case(case)
    return report


@contextmanager
def poisoned_padding(runner: ModelRunner) -> Iterator[None]:
    """Turn poison mode on for the block, and back to what it was."""
    graphs = runner.graph_runner
    if graphs is None:
        yield
        return
    before, graphs.poison_padding = graphs.poison_padding, True
    try:
        yield
    finally:
        graphs.poison_padding = before


def _compare(runner: ModelRunner, probe: ProbeRequests, batch_size: int, report: ParityReport) -> ParityCase:
    """Run one batch three ways and judge it."""
    batch = probe.decode_batch(batch_size)
    runner.sampler.reset()
    replayed, replayed_ids = _to_host(runner.forward(batch))
    outcome = runner.outcome
    assert outcome is not None
    runner.sampler.reset()
    parts = [_eager(runner, part, size) for part, size in _parts(batch, outcome.sizes)]
    same_shape, same_ids = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    unpadded, _ = _eager(runner, batch)
    bitwise = torch.equal(replayed, same_shape)
    sampled_agreement = (replayed_ids == same_ids).float().mean().item()
    abs_error, rel_error = _errors(replayed, same_shape)
    unpadded_abs, unpadded_rel = _errors(replayed, unpadded)
    agreement, violations, min_gap = _compare_top1(replayed, unpadded, unpadded_abs)
    reason = _judge(replayed, (abs_error, same_shape), (unpadded_abs, unpadded), violations, report)
    if not reason and bitwise and sampled_agreement < 1:
        reason = "replay and eager sampled different tokens from the same logits and the same seed"
    return ParityCase(
        batch_size=batch_size,
        padded_batch_size=outcome.padded_batch_size,
        mode=outcome.mode,
        num_graphs=outcome.num_graphs,
        bitwise=bitwise,
        max_abs_error=abs_error,
        max_rel_error=rel_error,
        unpadded_max_abs_error=unpadded_abs,
        unpadded_max_rel_error=unpadded_rel,
        top1_agreement=agreement,
        num_top1_violations=violations,
        min_top2_gap=min_gap,
        passed=not reason,
        reason=reason,
        sizes=outcome.sizes,
        plan_reason=outcome.reason,
        sampled_agreement=sampled_agreement,
    )


def _eager(
    runner: ModelRunner, batch: ForwardBatch, size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `_to_host` does of the eager step, padded to `size` if given."""
    plan = StepPlan("eager", () if size is None else (size,), "forced")
    return _to_host(runner.forward(batch, plan=plan))


def _to_host(output: LogitsProcessorOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step's logits in float32 and its token ids, on the host."""
    assert output.next_token_ids is not None
    return output.next_token_logits.float().cpu().clone(), output.next_token_ids.cpu().clone()


def _parts(batch: ForwardBatch, sizes: Sequence[int]) -> Iterator[tuple[ForwardBatch, int | None]]:
    """Cut a batch as the step did that ran it; a step without captured sizes is one unpadded part."""
    start = 0
    for size in sizes:
        end = min(start + size, batch.batch_size)
        yield batch.part(start, end), size
        start = end
    if not sizes:
        yield batch, None


def _errors(values: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute error, and that error over the largest reference value."""
    error = (values - reference).abs().max().item()
    return error, error / max(reference.abs().max().item(), 1e-30)


def _compare_top1(values: torch.Tensor, reference: torch.Tensor, error: float) -> tuple[float, int, float]:
    """Return the share of equal top-1 tokens, the unequal ones with a clear gap, and the least gap."""
    top2 = reference.topk(2, dim=-1).values
    gap = top2[:, 0] - top2[:, 1]
    equal = values.argmax(-1) == reference.argmax(-1)
    violations = int((~equal & (gap > _GAP_FACTOR * error)).sum())
    return equal.float().mean().item(), violations, gap.min().item()


def _judge(
    values: torch.Tensor,
    same_shape: tuple[float, torch.Tensor],
    unpadded: tuple[float, torch.Tensor],
    violations: int,
    report: ParityReport,
) -> str:
    """Return why a case fails, or an empty string. A comparison with NaN fails."""
    if not bool(torch.isfinite(values).all()):
        return "the replay returned values that are not finite"
    for what, (error, reference) in {"at the same shape": same_shape, "unpadded": unpadded}.items():
        limit = report.atol + report.rtol * reference.abs().max().item()
        if math.isnan(error) or error > limit:
            return f"replay and eager {what} differ by {error:.3g}, more than {limit:.3g}"
    if violations:
        return f"{violations} row(s) chose another token although the top-2 gap was clear"
    return ""
