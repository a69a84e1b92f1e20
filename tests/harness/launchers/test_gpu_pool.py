"""No two jobs ever hold one GPU, whichever processes they run in."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.launchers import gpu_pool
from harness.launchers.gpu_pool import GpuPool, pool_devices

#: Takes a GPU many times; whoever finds a device's mark in place has it together with another.
WORKER = """
import sys
from pathlib import Path
from harness.launchers.gpu_pool import GpuPool
folder = Path(sys.argv[1])
pool = GpuPool(["0", "1"], folder / "locks")
for _ in range(40):
    with pool.lend() as device:
        mark = folder / f"in_use_{device}"
        mark.touch(exist_ok=False)
        mark.unlink()
    with (folder / f"used_{device}").open("a") as used:
        used.write(".")
"""


def test_no_two_processes_hold_one_gpu(tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)]) for _ in range(4)]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert sum(len(used.read_text()) for used in tmp_path.glob("used_*")) == 160


def test_threads_of_one_process_each_get_another_gpu(tmp_path: Path) -> None:
    pool, barrier, held = GpuPool(["a", "b", "c"], tmp_path), threading.Barrier(3), []

    def work() -> None:
        with pool.lend() as device:
            held.append(device)
            barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(held) == ["a", "b", "c"]


def test_a_gpu_is_free_again_once_its_holder_was_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from harness.launchers.gpu_pool import GpuPool\n"
        "with GpuPool(['0'], Path(sys.argv[1])).lend(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -9
    with GpuPool(["0"], tmp_path).lend() as device:
        assert device == "0"


def test_who_gives_up_waiting_gets_none(tmp_path: Path) -> None:
    given_up = threading.Event()
    given_up.set()
    with GpuPool(["0"], tmp_path).lend(), GpuPool(["0"], tmp_path).lend(given_up) as device:
        assert device is None


def test_a_pool_without_gpus_lends_none_and_makes_no_folder(tmp_path: Path) -> None:
    with GpuPool([], tmp_path / "locks").lend() as device:
        assert device is None
    assert not (tmp_path / "locks").exists()


def driver(monkeypatch: pytest.MonkeyPatch, uuids: Sequence[str]) -> None:
    """Let NVML know these GPUs: this machine has none."""
    from harness import nvidia

    def gpu_uuids(listing: str | None) -> list[str]:
        return [uuids[index] for index in nvidia._chosen(list(uuids), listing)]

    monkeypatch.setattr(gpu_pool, "gpu_uuids", gpu_uuids)


def test_the_gpus_to_lend_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, ["GPU-a", "GPU-b", "GPU-c"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert pool_devices(None) == ("GPU-a", "GPU-b", "GPU-c")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a")
    assert pool_devices(None) == ("GPU-c", "GPU-a")


def test_named_gpus_become_uuids_and_one_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver(monkeypatch, ["GPU-a", "GPU-b"])
    assert pool_devices([1, 0]) == ("GPU-b", "GPU-a")
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.gpus=\[0,2\]: name GPUs that"):
        pool_devices([0, 2])
    with pytest.raises(ConfigError, match="name each GPU once"):
        pool_devices([0, "GPU-a"])


def test_without_a_driver_named_gpus_are_taken_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, [])
    assert pool_devices([0, 1]) == ("0", "1")
    assert pool_devices(None) == ()
