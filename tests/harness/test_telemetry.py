"""Telemetry of a card that the test makes up, and of none."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness.energy import energy_of
from harness.telemetry import FIGURES, Reading, Telemetry, TelemetryWatch, clock_drift, medians, ranges
from tests.harness.fake_nvml import HARMLESS, POWER_CAP, THERMAL, FakeNvml


class Timer:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_reading_holds_clocks_power_and_temperature() -> None:
    reading = FakeNvml(throttle_masks=iter([POWER_CAP | THERMAL])).telemetry().read()
    assert reading == Reading(1980, 3201, 412.5, 54, ("sw_power_cap", "hw_thermal_slowdown"))
    assert reading.is_throttled


def test_a_clock_that_idles_or_was_set_is_not_throttled() -> None:
    assert FakeNvml(throttle_masks=iter([HARMLESS])).telemetry().read().is_throttled is False


@pytest.mark.parametrize(
    ("mask", "sm_clock_mhz", "reasons"),
    [
        (POWER_CAP, 1965, ()),
        (POWER_CAP, 1650, ("sw_power_cap",)),
        (THERMAL, 1965, ("hw_thermal_slowdown",)),
    ],
)
def test_a_power_cap_that_leaves_the_clock_at_its_top_holds_nothing_back(
    mask: int, sm_clock_mhz: int, reasons: tuple[str, ...]
) -> None:
    card = FakeNvml(throttle_masks=iter([mask]), sm_clocks_mhz=iter([sm_clock_mhz]))
    reading = card.telemetry().read()
    assert (reading.throttle_reasons, reading.is_throttled) == (reasons, bool(reasons))


def test_without_a_card_everything_is_unknown() -> None:
    telemetry = Telemetry.of(torch.device("cpu"))
    assert telemetry.read() == Reading()
    assert telemetry.read().is_throttled is None
    assert telemetry.energy_mj() is None and telemetry.num_other_processes() is None
    assert telemetry.describe() == {"driver": None}


def test_what_a_card_refuses_to_tell_is_unknown() -> None:
    assert FakeNvml(energy_step_mj=None).telemetry().energy_mj() is None


@pytest.mark.parametrize(("num_processes", "others"), [(0, 0), (1, 0), (3, 2)])
def test_one_process_on_the_card_is_taken_as_ours(num_processes: int, others: int) -> None:
    assert FakeNvml(num_processes=num_processes).telemetry().num_other_processes() == others


def test_limits_of_the_card_are_described() -> None:
    assert FakeNvml().telemetry().describe() == {
        "driver": "580.1",
        "max_sm_clock_mhz": 1980,
        "max_mem_clock_mhz": 3201,
        "power_limit_w": 700.0,
        "ecc": True,
        "num_other_gpu_processes": 0,
    }


def test_a_look_that_costs_much_is_taken_seldom() -> None:
    timer, nvml = Timer(), FakeNvml()
    ask = nvml.nvmlDeviceGetPowerUsage

    def slow(handle: str) -> int:
        timer.now_s += 0.002
        return ask(handle)

    nvml.nvmlDeviceGetPowerUsage = slow  # type: ignore[method-assign]
    watch = TelemetryWatch(nvml.telemetry(), timer)
    assert watch.is_due
    watch.look()
    timer.now_s += 0.19
    assert not watch.is_due
    timer.now_s += 0.02
    assert watch.is_due


def test_without_a_card_a_look_is_always_due() -> None:
    watch = TelemetryWatch(Telemetry(), Timer())
    assert watch.look() == Reading() and watch.is_due


def test_readings_are_summed_up_by_what_they_have() -> None:
    readings = [Reading(sm_clock_mhz=clock, power_w=400.0) for clock in (1980, 1700, 1900)] + [Reading()]
    assert medians(readings) == dict.fromkeys(FIGURES) | {"sm_clock_mhz": 1900.0, "power_w": 400.0}
    assert ranges(readings)["sm_clock_mhz"] == {"min": 1700.0, "median": 1900.0, "max": 1980.0}
    assert ranges([])["power_w"] is None


@pytest.mark.parametrize(
    ("clocks", "fall"),
    [
        ([], None),
        ([None, None], None),
        ([1980, 1980, 1965], None),
        ([1980, None, 1755, 1900], (1980, 1755)),
        ([1500, 1980, 1980], None),
        ([1500, 1980, 1700], (1980, 1700)),
    ],
)
def test_the_deepest_fall_of_the_clock_is_worth_a_warning(
    clocks: list[float | None], fall: tuple[float, float] | None
) -> None:
    assert clock_drift(clocks) == fall


def test_energy_is_counted_between_jumps_of_the_counter() -> None:
    """10 ms and 3 J a run; the counter tells every 50 ms what was used until then."""
    timer = Timer()

    def run() -> None:
        timer.now_s += 0.010

    def counter_mj() -> int:
        return 15_000 * int(timer.now_s / 0.050 + 1e-9)

    assert energy_of(run, counter_mj, 0.2, timer) == pytest.approx(3000.0)


def test_energy_that_is_not_counted_or_not_wanted_is_unknown_and_runs_nothing() -> None:
    for counter, seconds in ((lambda: None, 0.2), (lambda: 5, 0.0)):
        assert energy_of(lambda: pytest.fail("nothing to run for"), counter, seconds) is None


def test_a_counter_that_stands_still_is_given_up() -> None:
    timer = Timer()

    def run() -> None:
        timer.now_s += 0.1

    assert energy_of(run, itertools.repeat(7).__next__, 0.2, timer) is None
    assert timer.now_s < 1.0
