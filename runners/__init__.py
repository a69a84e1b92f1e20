"""Decode steps of transformers models, replayed from CUDA graphs.

Usable without the harness. A prompt, then one decoded token, on any machine (`cuda:0` for a GPU):

    import numpy as np
    from runners.batches import decode_batch, extend_batch
    from runners.capture_sizes import capture_sizes
    from runners.model_runner import ModelRunner, RunnerConfig
    from runners.models.loader import ModelSpec, load_model

    shape = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    loaded = load_model(ModelSpec(source="random", max_seq_len=64, config=shape), "cpu")
    sizes = capture_sizes("vllm", 4).sizes
    with ModelRunner(loaded, RunnerConfig("cpu", 4, 64, capture_sizes=sizes)) as runner:
        prompt, row, seq_lens = np.array([3, 14, 15, 92]), runner.kv.add_request(), np.array([5], np.int32)
        runner.kv.extend(row, 5)
        logits = runner.forward(extend_batch(runner.kv, [row], [0], [prompt])).next_token_logits
        step = decode_batch(runner.kv, np.array([row], np.int32), seq_lens, logits.argmax(-1).numpy())
        print(runner.forward(step).next_token_logits.argmax(-1), runner.outcome)
"""
