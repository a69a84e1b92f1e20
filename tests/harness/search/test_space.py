"""The swept values of a command line are what a search chooses from."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.errors import ConfigError
from harness.search.space import Space, read_space


def space(*overrides: str) -> Space:
    return read_space(OverridesParser.create().parse_overrides(list(overrides)))


def values(override: str) -> list[object]:
    return [point[override.partition("=")[0]] for point in space(override).points()]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("capture=vllm,sglang", ["vllm", "sglang"]),
        ("capture=choice(vllm,sglang)", ["vllm", "sglang"]),
        ("capture.sizes=[1,2],[1,4]", ["[1,2]", "[1,4]"]),
        ("runner.max_batch_size=range(4,17,4)", [4, 8, 12, 16]),
        ("runner.max_batch_size=range(1,4)", [1, 2, 3]),
        ("runner.max_batch_size=int(interval(2,4))", [2, 3, 4]),
        ("model.name='a b','c,d'", ["'a b'", "'c,d'"]),
        ("measure.max_noise=range(0.5,2,0.5)", ["0.5", "1.0", "1.5"]),
    ],
)
def test_each_form_of_a_sweep_is_a_set_of_choices(override: str, expected: list[object]) -> None:
    assert values(override) == expected


def test_an_interval_has_no_list_of_points() -> None:
    searched = space("workload.request_rate=interval(1,8)", "capture=vllm,sglang")
    assert list(searched.points()) == []
    assert [point["capture"] for point in searched.samples()] == ["vllm", "sglang"]


def test_the_points_are_all_combinations_and_share_the_rest() -> None:
    searched = space("capture=vllm,all", "padding=nearest,max", "device=cpu", "~experiment")
    assert len(list(searched.points())) == 4
    assert searched.overrides({"capture": "all", "padding": "max"}) == [
        "device=cpu",
        "~experiment",
        "capture=all",
        "padding=max",
    ]


def test_the_command_line_replaces_what_a_file_sweeps() -> None:
    searched = space("capture=vllm,all", "padding=nearest,max", "capture=sglang")
    assert list(searched.distributions) == ["padding"]
    assert searched.shared == ("capture=sglang",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("capture=vllm", "nothing to search"),
        ("capture=glob(*)", r"capture=glob\(\*\): cannot be searched"),
        ("workload.request_rate=interval(3,1)", "lower end, then the higher"),
    ],
)
def test_what_cannot_be_searched_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space(override)
