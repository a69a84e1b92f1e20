"""A workload that cannot run, or a key that would do nothing, is refused with field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.compose import compose
from harness.errors import ConfigError
from harness.schema import check, load_config
from harness.workload_rules import idle_keys

HEADER = "batch_size,padded_batch_size,mode,graph_backend,context_len,step_ms_p50\n"


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(load_config(compose(overrides)))
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        (["workload=trace"], "workload.path", "add workload.path=FILE"),
        (["workload=lengths", "workload.path=/nowhere.csv"], "workload.path", "No such file"),
        (["workload.path=/log.csv"], "workload.path", "add workload=trace"),
        (
            ["workload=ramp", "workload.max_requests=null", "workload.duration_s=3"],
            "workload.max_requests",
            "needs",
        ),
        (["workload=ramp", "workload.request_rate=inf"], "workload.request_rate", "give requests a second"),
        (
            ["workload.request_rate=inf", "workload.max_requests=null", "workload.duration_s=3"],
            "workload.max_requests",
            "say how many",
        ),
        (["workload.sec_multiplier=60"], "workload.sec_multiplier", "format=timed_trace"),
        (["workload=steady", "workload.burst_size=3"], "workload.burst_size", "write workload=synthetic"),
        (
            ["workload.burst_size=9", "workload.max_requests=8"],
            "workload.burst_size",
            "at most workload.max_requests=8",
        ),
        (
            ["workload=ramp", "workload.over_length=error", "workload.prompt_len=500"],
            "workload.over_length",
            "532 tokens",
        ),
        (["workload=ramp", "workload.start_rate=0"], "workload.start_rate", "greater than 0"),
    ],
)
def test_what_cannot_run_is_refused(overrides: list[str], field: str, remedy: str) -> None:
    error = refusal(*overrides)
    assert error.field == field
    assert remedy in error.remedy


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload=lengths"],
        ["workload=lengths", "workload.max_requests=null", "workload.duration_s=3"],
        ["workload=ramp", "workload.request_rate=null"],
        ["workload.burst_size=8", "workload.max_requests=8"],
    ],
)
def test_what_can_run_is_not(overrides: list[str]) -> None:
    check(load_config(compose(overrides)))


def test_named_columns_are_given_at_once_or_one_by_one(tmp_path: Path) -> None:
    trace = tmp_path / "log.csv"
    trace.write_text("t,Request tokens,out\n0,5,6\n")
    source = ["workload=trace", f"workload.path={trace}", "workload.format=csv"]
    check(
        load_config(
            compose(
                [*source, "workload.columns={arrival_s: t, prompt_len: 'Request tokens', output_len: out}"]
            )
        )
    )
    names = ["arrival_s=t", "prompt_len='Request tokens'", "output_len=out"]
    check(load_config(compose([*source, *(f"workload.columns.{name}" for name in names)])))
    assert refusal(*source, "workload.columns.arrival_s=t").field == "workload.columns.prompt_len"


def test_costs_must_know_every_kind_of_step_that_can_run(tmp_path: Path) -> None:
    costs = tmp_path / "sizes.csv"
    clock = ["workload.clock=costs", f"workload.costs_path={costs}"]
    costs.write_text(HEADER + "4,4,graph,emulated,128,2.0\n")
    assert "no measured eager step" in refusal(*clock).remedy
    costs.write_text(HEADER + "4,4,eager,none,128,2.0\n")
    assert "no measured graph step" in refusal(*clock).remedy
    assert "measure.prefill_tokens" in refusal(*clock, "runner=eager").remedy
    (tmp_path / "prefill.csv").write_text("num_tokens,context_len,step_ms_p50,num_samples\n64,64,1.5,20\n")
    check(load_config(compose([*clock, "runner=eager"])))


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["workload=steady"], None),
        (["workload=synthetic", "workload.duration_s=3", "workload.rate_scale=2"], None),
        (["workload=ramp", "workload.batch_size=3"], "workload.batch_size=3: unused with workload.kind=ramp"),
        (
            ["workload=steady", "workload.request_rate=3", "workload.duration_s=4", "workload.rate_scale=5"],
            "workload.request_rate=3, workload.duration_s=4, workload.rate_scale=5: unused with workload.kind=steady",
        ),
    ],
)
def test_keys_that_the_kind_does_not_read_are_named(overrides: list[str], warning: str | None) -> None:
    config = load_config(compose(overrides))
    check(config)
    assert (idle_keys(config) or "").startswith(warning or "")
    assert bool(idle_keys(config)) == bool(warning)
