"""Host time of a FlashInfer decode plan, per batch size: `python -m tests.bench.bench_attention_plan`.

Prints a JSON line for each batch size, page size and kind of kernel: the median over replays that had to
plan, over replays of growing requests, which plan where their chunks change, and over replays of the same
page counts. Needs a CUDA device and FlashInfer.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from runners.attention.base import AttentionGroup
from runners.attention.flashinfer_backend import FlashInferAttentionBackend
from runners.forward_batch import ForwardMode
from runners.input_buffers import InputBuffers
from runners.paged_kv import PagedKV

BATCH_SIZES = (1, 8, 32, 128, 256)
MAX_SEQ_LEN = 2048
NUM_SAMPLES = 300


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for name, heads in (("decode kernel", (16, 8)), ("tensor cores", (32, 8))):
        for page_size in (1, 16):
            backend, buffers = build(AttentionGroup(*heads, 128, sm_scale=128**-0.5), page_size, device)
            for batch_size in BATCH_SIZES:
                row = {"kernel": name, "page_size": page_size, "batch_size": batch_size}
                print(json.dumps({**row, **measure(backend, buffers, batch_size)}), flush=True)


def build(
    group: AttentionGroup, page_size: int, device: torch.device
) -> tuple[FlashInferAttentionBackend, InputBuffers]:
    # Nothing is computed, so one request's worth of pages is enough.
    kv = PagedKV(
        [group],
        num_pages=MAX_SEQ_LEN // page_size + 1,
        page_size=page_size,
        max_requests=1,
        max_seq_len=MAX_SEQ_LEN,
        dtype=torch.bfloat16,
        device=device,
    )
    limits = {"max_batch_size": max(BATCH_SIZES), "max_seq_len": MAX_SEQ_LEN, "device": device}
    return FlashInferAttentionBackend([group], kv, **limits), InputBuffers(max(BATCH_SIZES), 1, device)


def measure(backend: FlashInferAttentionBackend, buffers: InputBuffers, batch_size: int) -> dict[str, float]:
    """Return the median µs of a replay's plan: made anew, of growing requests, of the same page counts."""
    static = buffers.static_batch(batch_size)
    rows, lens = static.req_pool_indices, static.seq_lens
    decode = ForwardMode.DECODE
    backend.init_forward_metadata_capture_cuda_graph(batch_size, batch_size, rows, lens, decode)
    host_lens = torch.randint(300, 700, (batch_size,), dtype=torch.int32)

    def plan() -> None:
        backend.init_forward_metadata_replay_cuda_graph(batch_size, rows, lens, 0, decode, host_lens)

    def plan_anew() -> None:
        backend.decode.forget_plan()
        plan()

    def grow_and_plan() -> None:
        host_lens.add_(1)
        plan()

    return {
        "plan_us_p50": median_us(plan_anew),
        "growing_us_p50": median_us(grow_and_plan),
        "reuse_us_p50": median_us(plan),
    }


def median_us(step: Callable[[], None]) -> float:
    samples = []
    for _ in range(NUM_SAMPLES):
        started = time.perf_counter_ns()
        step()
        samples.append((time.perf_counter_ns() - started) / 1e3)
        torch.cuda.synchronize()
    return round(statistics.median(samples), 1)


if __name__ == "__main__":
    main()
