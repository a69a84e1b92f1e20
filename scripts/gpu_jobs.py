"""The jobs whose records are committed, as overrides of the main job."""

from __future__ import annotations

#: The sizes of the tables: SGLang's capture list to 256, 512 tokens of context, few samples of slow steps.
TABLE = (
    *(
        "capture=sglang",
        "runner.max_batch_size=256",
        "model.max_seq_len=1024",
        "runner.prefill_chunk_tokens=4096",
    ),
    *("measure.context_lens=[512]", "measure.batch_sizes=[1,8,32,128,256]", "measure.prefill_tokens=[512]"),
    *("measure.timeout_s=0.8", "parity.batch_sizes=[1,7,32,100,256]", "workload=none", "tracking=disabled"),
)
#: A trace of long requests, over a pool that holds a part of them at full length.
TRACE = (
    *(
        "capture=sglang",
        "runner.max_batch_size=256",
        "model.max_seq_len=4096",
        "runner.prefill_chunk_tokens=2048",
    ),
    *(
        "attention.num_pages=24576",
        "attention.overcommit=true",
        "measure=none",
        "parity.batch_sizes=[1,7,64]",
    ),
    *("workload=trace", "workload.max_requests=500", "workload.rate_scale=10", "tracking=disabled"),
)
#: Costs for the planner: the sizes of every engine's list and some between, contexts up to long ones, uneven
#: batches, the scheduler's loop, and traffic to check the simulator against. One step is in flight, as simulated.
PLANNER_SIZES = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, *range(32, 257, 8)]
PLANNER = (
    *("model.implementation=fused", "compile=none", "capture=explicit", f"capture.sizes={PLANNER_SIZES}"),
    *("runner.max_batch_size=256", "model.max_seq_len=16384", "runner.prefill_chunk_tokens=2048"),
    *("attention.num_pages=36000", "attention.overcommit=true", "parity.batch_sizes=[1,7,32,100,256]"),
    *("measure=planning", f"measure.batch_sizes={PLANNER_SIZES}", "measure.eager_batch_sizes=[1,8,64]"),
    *("measure.longest_lens=[2048,16384]", "measure.prefill_tokens=[16,128,512,1024,2048]"),
    "measure.loop_batch_sizes=[1,8,32,64,128,256]",
    *("workload=trace", "workload.max_requests=500", "workload.rate_scale=10", "tracking=disabled"),
)
#: The same path in small, for a machine without a GPU: what it measures is emulated, and no source of costs.
PLANNER_TINY = (
    *("capture=explicit", "capture.sizes=[1,2,4,8,16]", "runner.max_batch_size=16", "model.max_seq_len=512"),
    *("runner.prefill_chunk_tokens=64", "parity.batch_sizes=[1,7,16]", "measure=planning"),
    *("measure.context_lens=[16,64,256]", "measure.longest_lens=[64,256]", "measure.prefill_tokens=[16,64]"),
    *("measure.eager_batch_sizes=[1,8]", "measure.loop_batch_sizes=[1,8,16]", "measure.timeout_s=0.1"),
    *("workload=trace", "workload.max_requests=20", "workload.rate_scale=10", "tracking=disabled"),
)
LAYER = ("compile=default", "compile.scope=layer", "compile.dynamic=true")
#: The fused layers with two steps in flight: `step_ms` is then the pace.
FUSED = ("model.implementation=fused", "runner.overlap=true")
#: What docs/measuring.md explains: a short sweep in three rounds, with all that the card tells.
TELEMETRY = (
    *("model=qwen3_0_6b", "compile=none", *TABLE),
    *("measure.batch_sizes=[1,8,32,128]", "measure.rounds=3", "measure.timeout_s=1.2"),
)
#: Stage → overrides of its job.
JOBS: dict[str, tuple[str, ...]] = {
    "tiny": ("model=tiny", "measure=quick", "workload.max_requests=4", "tracking=disabled"),
    "qwen3_0_6b": ("model=qwen3_0_6b", "compile=none", *TABLE),
    "qwen3_0_6b_compiled": ("model=qwen3_0_6b", *LAYER, *TABLE),
    "qwen3_8b": ("model=qwen3_8b", "compile=none", *TABLE),
    "qwen3_8b_compiled": ("model=qwen3_8b", *LAYER, *TABLE),
    "qwen3_0_6b_fused": ("model=qwen3_0_6b", "compile=none", *FUSED, *TABLE),
    "qwen3_8b_fused": ("model=qwen3_8b", "compile=none", *FUSED, *TABLE),
    "qwen3_0_6b_trace": ("model=qwen3_0_6b", *TRACE),
    "qwen3_8b_trace": ("model=qwen3_8b", *TRACE),
    "telemetry": (*TELEMETRY, "measure.profile=true"),
    "telemetry_again": TELEMETRY,
    "telemetry_flushed": (*TELEMETRY, "measure.flush_cache=true"),
    "planner_h200": ("model=qwen3_0_6b", *PLANNER, "measure.context_lens=[16,512,2048,8192,16384]"),
    "planner_h200_8b": ("model=qwen3_8b", *PLANNER, "measure.context_lens=[16,512,2048,8192]"),
    "planner_tiny": ("model=tiny", *PLANNER_TINY),
}
#: Run only if asked for by name: a first look at whether the script works, and a job that takes long.
ON_REQUEST = ("tiny", "planner_h200_8b", "planner_tiny")
