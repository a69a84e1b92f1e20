"""What transformers makes of the real weights. A module of its own, for a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tokenize(folder: Path, questions: list[str], texts: list[str]) -> list[list[int]]:
    """Token ids of the questions, each as a chat, and of the texts."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    return [*chats, *(tokenizer(text)["input_ids"] for text in texts)]


def generate_one_by_one(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of `transformers.generate` in float32, one unpadded prompt at a time.

    Past the end of the text too: each line has `num_tokens`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            **options,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
