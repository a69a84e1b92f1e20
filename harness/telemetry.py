"""What the card tells of itself through NVML: clocks, power, temperature, energy, other tenants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import torch

#: NVML reasons that lower the clock because the card must, not because it idles or is told to.
_THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
#: A look costs host time: this share of the time at most.
_SHARE_OF_TIME = 0.01
#: A clock that falls by more than this share makes later times incomparable with earlier ones; one that is
#: within it of the card's top is not held back.
_MAX_FALL = 0.03


@dataclass(frozen=True)
class Reading:
    """The card at one instant; None is what it does not tell."""

    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    #: Why the card is held below its clock; empty if it is not.
    throttle_reasons: tuple[str, ...] | None = None

    @property
    def is_throttled(self) -> bool | None:
        """Whether the card is held below its clock; None if it does not tell."""
        return None if self.throttle_reasons is None else bool(self.throttle_reasons)


#: The figures of a reading: columns of `sizes.csv`.
FIGURES = tuple(field.name for field in fields(Reading) if field.name != "throttle_reasons")


class Telemetry:
    """Reads one card. `nvml` is the module pynvml, already started, and `handle` its name for the card.

    Without them, as on a CPU, every reading is None.
    """

    def __init__(self, nvml: Any = None, handle: Any = None) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def of(cls, device: torch.device) -> Telemetry:
        """Return the telemetry of a torch device."""
        if device.type != "cuda":
            return cls()
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name))
        except Exception:  # NVML is missing, or hides the card: readings stay None, which the record shows
            return cls()

    @property
    def is_there(self) -> bool:
        """Whether there is a card to ask."""
        return self._nvml is not None

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def describe(self) -> dict[str, Any]:
        """Return the facts that do not change during a job: driver, limits, other tenants at the start."""
        if self._nvml is None:
            return {"driver": None}
        nvml = self._nvml
        limit_mw = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        ecc = self._ask("nvmlDeviceGetEccMode")
        return {
            "driver": str(nvml.nvmlSystemGetDriverVersion()),
            "max_sm_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            "max_mem_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
            "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
            "ecc": None if ecc is None else bool(ecc[0]),
            "num_other_gpu_processes": self.num_other_processes(),
        }

    def read(self) -> Reading:
        """Read the card now: five questions to the driver."""
        nvml = self._nvml
        if nvml is None:
            return Reading()
        power_mw = self._ask("nvmlDeviceGetPowerUsage")
        sm_clock_mhz = self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
        return Reading(
            sm_clock_mhz=sm_clock_mhz,
            mem_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=self._throttle_reasons(sm_clock_mhz),
        )

    def _throttle_reasons(self, sm_clock_mhz: float | None) -> tuple[str, ...] | None:
        mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if mask is None:
            return None
        reasons = tuple(name for bit, name in _THROTTLE_REASONS.items() if mask & bit)
        # The driver sets it at the power limit already, at times with the clock still at its top.
        return () if reasons == ("sw_power_cap",) and self._is_at_top(sm_clock_mhz) else reasons

    def _is_at_top(self, sm_clock_mhz: float | None) -> bool:
        top = self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM)
        return bool(top and sm_clock_mhz and sm_clock_mhz >= (1 - _MAX_FALL) * top)

    def energy_mj(self) -> int | None:
        """Return the energy that the card used since its driver was loaded, in mJ; None if it does not count."""
        value = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if value is None else int(value)

    def num_other_processes(self) -> int | None:
        """Return how many processes beside this one compute on the card; None if the driver does not tell.

        One is taken as ours, whatever its id: in a container the driver reports those of the host.
        """
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        if processes is None:
            return None
        return max(0, len(processes) - 1)


class TelemetryWatch:
    """Looks at the card between stretches of samples, as seldom as its own cost demands (1% of the time)."""

    def __init__(self, telemetry: Telemetry, timer_s: Callable[[], float] = time.perf_counter) -> None:
        self._telemetry = telemetry
        self._timer_s = timer_s
        self._due_s = timer_s()

    @property
    def is_due(self) -> bool:
        """Whether a look costs little enough by now. Always, where there is no card to ask."""
        return self._timer_s() >= self._due_s

    def look(self) -> Reading:
        """Read the card."""
        before_s = self._timer_s()
        reading = self._telemetry.read()
        if self._telemetry.is_there:
            now_s = self._timer_s()
            self._due_s = now_s + (now_s - before_s) / _SHARE_OF_TIME
        return reading


def medians(readings: Iterable[Reading]) -> dict[str, float | None]:
    """Return the median of each figure, None where no reading has it."""
    return {name: median(values) if values else None for name, values in _by_figure(readings).items()}


def ranges(readings: Iterable[Reading]) -> dict[str, dict[str, float] | None]:
    """Return `min`, `median` and `max` of each figure, None where no reading has it."""
    return {
        name: {"min": min(values), "median": median(values), "max": max(values)} if values else None
        for name, values in _by_figure(readings).items()
    }


def _by_figure(readings: Iterable[Reading]) -> dict[str, list[float]]:
    readings = list(readings)
    return {
        name: [float(value) for reading in readings if (value := getattr(reading, name)) is not None]
        for name in FIGURES
    }


def clock_drift(clocks_mhz: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the deepest fall of a series of SM clocks, (from, to) in MHz; None if it is not worth a warning."""
    peak, fall = 0.0, (0.0, 0.0)
    for clock in clocks_mhz:
        if clock is not None:
            peak = max(peak, clock)
            if peak - clock > fall[0] - fall[1]:
                fall = (peak, clock)
    return fall if fall[0] - fall[1] > _MAX_FALL * fall[0] else None
