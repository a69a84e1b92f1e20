"""Event timing against a spin of known length, and what NVML tells about the card."""

from __future__ import annotations

import pytest
import torch

from harness.cache_flush import CacheFlush
from harness.energy import energy_of
from harness.step_timer import StepTimer
from harness.telemetry import Telemetry
from runners.forward_batch import ForwardBatch
from runners.graph_backend import CudaGraph, side_stream
from runners.model_runner import ModelRunner
from runners.stopwatch import CudaStopwatch
from tests.runners.tiny_runner import Requests, tiny_config, tiny_model

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


@triton.jit
def spin_kernel(num_ns, out):  # type: ignore[no-untyped-def]
    """Spin until the card's own nanosecond clock has advanced by `num_ns`."""
    start = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    now = start
    while now - start < num_ns:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    tl.store(out, now - start)


def spin(milliseconds: float, device: torch.device, spent: torch.Tensor | None = None) -> torch.Tensor:
    if spent is None:
        spent = torch.zeros(1, dtype=torch.int64, device=device)
    spin_kernel[(1,)](int(milliseconds * 1e6), spent)
    return spent


def measured_spin(milliseconds: float, device: torch.device) -> float:
    """Time a spin that is queued behind another: the launch, slow from Python, is over by then."""
    stopwatch, spent = CudaStopwatch(), torch.zeros(1, dtype=torch.int64, device=device)
    spin(5.0, device, spent)
    stopwatch.start()
    spin(milliseconds, device, spent)
    stopwatch.stop()
    return stopwatch.elapsed_ms()


def assert_measures(elapsed_ms: float, expected_ms: float) -> None:
    """Never less than the spin; at most a kernel's start and the clock's resolution more."""
    assert 0.999 * expected_ms <= elapsed_ms <= 1.01 * expected_ms + 0.05


@pytest.mark.parametrize("milliseconds", [0.5, 2.0, 10.0])
def test_events_measure_a_spin_of_known_length(device: torch.device, milliseconds: float) -> None:
    measured_spin(0.1, device)
    assert_measures(measured_spin(milliseconds, device), milliseconds)


def test_longer_spins_take_longer_by_what_they_spin(device: torch.device) -> None:
    measured_spin(0.1, device)
    short, long = measured_spin(2.0, device), measured_spin(12.0, device)
    assert long - short == pytest.approx(10.0, rel=0.01)


def test_events_measure_a_spin_inside_a_graph(device: torch.device) -> None:
    spin(0.1, device)
    graph, spent = CudaGraph(), torch.zeros(1, dtype=torch.int64, device=device)
    with side_stream(device):
        graph.capture(lambda: spin_kernel[(1,)](5_000_000, spent), torch.cuda.graph_pool_handle())
    graph.replay()
    stopwatch = CudaStopwatch()
    torch.cuda.synchronize()
    stopwatch.start()
    graph.replay()
    stopwatch.stop()
    assert_measures(stopwatch.elapsed_ms(), 5.0)


class Spins(ModelRunner):
    """Every step takes ten milliseconds longer on the device."""

    def compute_logits(self, batch: ForwardBatch) -> torch.Tensor:
        output = super().compute_logits(batch)
        return output + spin(10.0, self.device) * 0.0


def test_a_step_is_the_replay_and_what_the_host_exposes() -> None:
    spin(0.1, torch.device("cuda"))
    with Spins(tiny_model("cuda"), tiny_config(device="cuda")) as runner:
        batch, timer = Requests(runner).first(3), StepTimer(runner)
        timer.isolated(batch, None)
        timing = timer.isolated(batch, None)
        assert runner.outcome is not None and runner.outcome.mode == "graph"
        assert 10.0 <= timing.replay_ms <= 11.0
        assert timing.replay_ms <= timing.step_ms
        assert timing.step_ms <= 1.05 * (timing.replay_ms + timing.host_prepare_us / 1e3)


def test_nvml_tells_clocks_power_and_throttle_reasons(device: torch.device) -> None:
    telemetry = Telemetry.of(device)
    if not telemetry.is_there:
        pytest.skip("NVML shows no card here")
    spin(20.0, device)
    reading = telemetry.read()
    torch.cuda.synchronize()
    assert reading.sm_clock_mhz and reading.mem_clock_mhz and reading.power_w and reading.temperature_c
    assert isinstance(reading.throttle_reasons, tuple)
    assert telemetry.num_other_processes() is not None


def test_energy_of_a_spin_is_between_idle_and_the_limit_of_the_card(device: torch.device) -> None:
    telemetry = Telemetry.of(device)
    if telemetry.energy_mj() is None:
        pytest.skip("this card does not count its energy")
    limit_w = telemetry.describe()["power_limit_w"]

    def run() -> None:
        spin(10.0, device)
        torch.cuda.synchronize()

    energy_mj = energy_of(run, telemetry.energy_mj, seconds=0.3)
    assert energy_mj is not None
    assert 20 <= energy_mj / 10.0 <= limit_w, "mJ a ms is W"


def test_the_cache_flush_writes_more_than_the_l2_cache(device: torch.device) -> None:
    flush = CacheFlush(device)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    assert flush.num_bytes == 2 * l2_bytes
    stopwatch = CudaStopwatch()
    flush()
    torch.cuda.synchronize()
    stopwatch.start()
    flush()
    stopwatch.stop()
    assert flush.num_bytes / (stopwatch.elapsed_ms() / 1e3) < 2e13, "that much was really written"
