"""Turn a GGUF file into a folder that loads in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def gguf_to_safetensors(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf`, dequantised to bfloat16, and its tokenizer to `folder`.

    Needs the packages gguf and accelerate. Takes seconds for each 100 MB, once: the folder loads in
    a tenth of a second.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from runners.models.loader import without_progress_bars

    auto_model: Any = AutoModelForCausalLM
    auto_tokenizer: Any = AutoTokenizer
    source = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,  # everything is in the file: nothing is asked of the hub
    }
    with without_progress_bars():
        model = auto_model.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(folder)
        auto_tokenizer.from_pretrained(**source).save_pretrained(folder)
