"""What the graphs hold, what a job gives back, and whether the classes add up."""

from __future__ import annotations

import gc

import torch

from runners.capture import CaptureRecord
from runners.capture_memory import read_memory
from runners.graph_backend import own_stream
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import LoadedModel, ModelSpec, load_model
from tests.runners.tiny_runner import Requests

MIB = 2**20
SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
#: Few layers and a large vocabulary: the logits outweigh the rest of a graph's memory.
CONFIG: dict[str, object] = {
    **{"model_type": "qwen3", "vocab_size": 131072, "hidden_size": 256, "intermediate_size": 512},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}
LOGITS_BYTES = SIZES[-1] * 131072 * 2


def model() -> LoadedModel:
    return load_model(ModelSpec("random", dtype="bfloat16", max_seq_len=64, config=dict(CONFIG)), "cuda")


def settings() -> RunnerConfig:
    return RunnerConfig(
        device="cuda",
        max_batch_size=SIZES[-1],
        max_seq_len=64,
        capture_sizes=SIZES,
        attention_backend="torch",
    )


def job(loaded: LoadedModel) -> list[CaptureRecord]:
    """Build a runner, decode a step of each size, and take everything down."""
    with ModelRunner(loaded, settings()) as runner:
        requests = Requests(runner, [3 + i % 8 for i in range(SIZES[-1])])
        for n in (64, 7, 1):
            runner.forward(requests.first(n))
            assert runner.outcome is not None and runner.outcome.mode == "graph"
        assert runner.graph_runner is not None
        return list(runner.graph_runner.capture_records)


def settled() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def held_by_torch() -> int:
    settled()
    return torch.cuda.memory_reserved()


def free_on_device() -> int:
    settled()
    return torch.cuda.mem_get_info()[0]


def test_logits_are_held_once_for_all_sizes() -> None:
    records = job(model())
    in_pool = sum(record.pool_bytes or 0 for record in records)
    assert in_pool < LOGITS_BYTES
    assert sum(record.torch_bytes or 0 for record in records) >= LOGITS_BYTES


def test_graphs_on_the_stream_of_the_job_bring_no_workspace_of_their_own() -> None:
    loaded, device = model(), torch.device("cuda", torch.cuda.current_device())
    apart = sum(record.torch_bytes or 0 for record in job(loaded))
    with own_stream(device):
        together = sum(record.torch_bytes or 0 for record in job(loaded))
    settled()
    assert together < apart
    assert together <= LOGITS_BYTES + 4 * MIB


def test_closing_a_runner_leaves_the_graphs_of_another_alone() -> None:
    """Their kernels may use a workspace that cuBLAS keeps, and clearing is for all streams."""
    with ModelRunner(model(), settings()) as first:
        batch = Requests(first, [3 + i % 8 for i in range(SIZES[-1])]).first(40)
        before = first.forward(batch).next_token_logits.clone()
        job(model())
        filler = torch.full((2**28,), float("nan"), device="cuda")  # whatever was freed is written over
        assert torch.equal(first.forward(batch).next_token_logits, before)
        del filler


def test_three_jobs_in_a_row_return_to_the_baseline() -> None:
    loaded = model()
    job(loaded)  # loads its kernels, which stay
    held, free = held_by_torch(), free_on_device()
    for _ in range(3):
        job(loaded)
        assert held_by_torch() <= held
        # The driver keeps what it once mapped for graphs, in chunks, and uses it again.
        assert free_on_device() >= free - 4 * MIB


def test_the_classes_add_up_to_what_the_device_lost() -> None:
    loaded = model()
    job(loaded)
    device = torch.device("cuda", torch.cuda.current_device())
    free = []

    def on_capture(record: CaptureRecord) -> None:
        free.append(torch.cuda.mem_get_info()[0])

    settled()
    with ModelRunner(loaded, settings(), on_capture=on_capture) as runner:
        assert runner.graph_runner is not None
        records = runner.graph_runner.capture_records
        if records[0].device_bytes is None:
            return  # another process holds the card, and what it takes cannot be told from ours
        later = [(r.pool_bytes or 0) + (r.torch_bytes or 0) + (r.device_bytes or 0) for r in records[1:]]
        assert abs(sum(later) - (free[0] - free[-1])) <= 4 * MIB
        reading = read_memory(device, None)
        assert (reading.torch_bytes or 0) == torch.cuda.memory_reserved(device)
