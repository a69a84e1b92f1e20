"""What the host wrote arrives on the device, by the kernel and by the copy engine, in the order of the stream."""

from __future__ import annotations

import pytest
import torch

from runners.staging import CopyFences, Upload
from tests.runners.kernel_source import needs_nvrtc

WAYS = [pytest.param("kernel", marks=needs_nvrtc), "copy"]
#: The inputs of 256 requests.
NUM_BYTES = 9216


def host_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).pin_memory()


@pytest.mark.parametrize("num_bytes", [16, 768, NUM_BYTES, 12_288, 1_000_016])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_arrives_behind_what_the_stream_is_doing(
    device: torch.device, way: str, num_bytes: int
) -> None:
    source = host_bytes(num_bytes)
    room = torch.zeros(num_bytes + 32, dtype=torch.uint8, device=device)
    upload = Upload(room[16:-16], source, by_kernel=way == "kernel")
    assert upload.way == way
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        torch.cuda.synchronize()
        source.add_(1)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            room.zero_()
            upload.queue()
            assert not stream.query(), "it waited for the device"
            arrived = room.cpu()
        assert torch.equal(arrived[16:-16], source)
        assert not arrived[:16].any() and not arrived[-16:].any()


@pytest.mark.parametrize("way", WAYS)
def test_each_replay_reads_what_the_host_wrote_for_it(device: torch.device, way: str) -> None:
    """The host is several steps ahead, and writes the buffers again under fences, while graphs run."""
    num_steps, depth = 400, 4
    wanted = torch.randint(0, 256, (num_steps, NUM_BYTES), dtype=torch.uint8)
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)
    seen = torch.zeros(num_steps, NUM_BYTES, dtype=torch.uint8, device=device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    x = torch.zeros(1024, 1024, device=device)
    product = torch.empty_like(x)

    def work() -> None:
        for _ in range(4):
            torch.mm(x, x, out=product)
        seen.index_copy_(0, step, target.unsqueeze(0))
        step.add_(1)

    work()  # what libraries do once is not for a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    step.zero_()
    hosts = [host_bytes(NUM_BYTES) for _ in range(depth)]
    uploads = [Upload(target, host, by_kernel=way == "kernel") for host in hosts]
    assert {upload.way for upload in uploads} == {way}
    fences = CopyFences(depth, device)
    torch.cuda._sleep(20_000_000)
    for row in wanted:
        turn = fences.next_turn()
        hosts[turn].copy_(row)
        uploads[turn].queue()
        graph.replay()
        fences.settle()
    assert torch.equal(seen.cpu(), wanted)


@needs_nvrtc
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_device_has_its_kernel(device: torch.device) -> None:
    for index in range(2):
        with torch.cuda.device(index):
            source = host_bytes(NUM_BYTES)
            target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=torch.device("cuda", index))
            upload = Upload(target, source)
            upload.queue()
            assert upload.way == "kernel" and torch.equal(target.cpu(), source)


@pytest.mark.parametrize(
    ("num_bytes", "target_at", "source_at"),
    [(36, 0, 0), (1024, 8, 0), (1024, 0, 4), (8, 0, 0), (64, 0, 0), (1000, 0, 0)],
)
def test_few_bytes_and_what_is_not_in_words_of_16_go_by_the_drivers_copy(
    device: torch.device, num_bytes: int, target_at: int, source_at: int
) -> None:
    source = host_bytes(num_bytes + source_at)[source_at:]
    target = torch.zeros(num_bytes + target_at, dtype=torch.uint8, device=device)[target_at:]
    upload = Upload(target, source)
    upload.queue()
    assert upload.way == "copy" and torch.equal(target.cpu(), source)


def test_memory_that_is_not_pinned_is_left_to_torch(device: torch.device) -> None:
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8, device=device)
    upload = Upload(target, source)
    upload.queue()
    assert upload.way == "torch" and torch.equal(target.cpu(), source)
