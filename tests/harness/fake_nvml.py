"""A card at the seam of NVML: what pynvml would answer, told by the test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from harness.telemetry import Telemetry

POWER_CAP = 0x4
THERMAL = 0x40
#: Reasons that are none of the card's own: idle, and an application's clock setting.
HARMLESS = 0x1 | 0x2


class FakeNvml:
    """The functions of pynvml that telemetry asks; `throttle_masks` and `sm_clocks_mhz` are told one a look."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(
        self,
        throttle_masks: Iterator[int] | None = None,
        sm_clocks_mhz: Iterator[int] | None = None,
        energy_step_mj: int | None = 500,
        num_processes: int = 1,
    ) -> None:
        self._masks = throttle_masks or itertools.repeat(0)
        self._clocks = sm_clocks_mhz or itertools.repeat(1980)
        self._energy_step_mj = energy_step_mj
        self._energy_mj = 0
        self._num_processes = num_processes

    def telemetry(self) -> Telemetry:
        return Telemetry(self, "the card")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return next(self._clocks) if kind == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 54

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return next(self._masks)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self._energy_step_mj is None:
            raise self.NVMLError("not supported")
        self._energy_mj += self._energy_step_mj
        return self._energy_mj

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=1000 + index) for index in range(self._num_processes)]


def throttled_first(num_looks: int, mask: int = THERMAL) -> Iterator[int]:
    """Throttle for the first looks, then no more."""
    return itertools.chain(itertools.repeat(mask, num_looks), itertools.repeat(0))
