from __future__ import annotations

import json
import re

import pytest
import yaml

from harness.errors import ConfigError
from harness.planner.export import ENGINES, export_flags

SIZES = [1, 2, 8, 40]


def test_vllm_gets_spaces_and_a_maximum_that_fits_the_list() -> None:
    flags = export_flags("vllm", SIZES).flags
    assert flags == "--cudagraph-capture-sizes 1 2 8 40 --max-cudagraph-capture-size 40 --max-num-seqs 40"


def test_vllm_sizes_are_tokens_under_speculative_decoding() -> None:
    flags = export_flags("vllm", SIZES, tokens_per_request=4).flags
    assert flags == "--cudagraph-capture-sizes 4 8 32 160 --max-cudagraph-capture-size 160 --max-num-seqs 40"


def test_an_older_vllm_gets_its_compilation_config() -> None:
    flags = export_flags("vllm", SIZES, engine_version="v0.10.2").flags
    config = flags.removeprefix("--compilation-config '").partition("'")[0]
    assert json.loads(config) == {"cudagraph_capture_sizes": SIZES}


def test_sglang_gets_the_names_of_its_version() -> None:
    assert export_flags("sglang", SIZES).flags.startswith(
        "--cuda-graph-bs-decode 1 2 8 40 --cuda-graph-max-bs-decode 40"
    )
    old = export_flags("sglang", SIZES, engine_version="0.5.13").flags
    assert old.startswith("--cuda-graph-bs 1 2 8 40 --cuda-graph-max-bs 40 ")
    assert export_flags("sglang", SIZES, engine_version="0.5.14").flags == export_flags("sglang", SIZES).flags


def test_sglang_sizes_stay_requests_under_speculative_decoding() -> None:
    assert export_flags("sglang", SIZES, tokens_per_request=4) == export_flags("sglang", SIZES)


def test_flags_for_another_release_than_the_checked_one_are_called_unchecked() -> None:
    assert export_flags("vllm", SIZES).checked == "checked against vLLM 0.33.0"
    assert export_flags("vllm", SIZES, engine_version="0.33").checked == "checked against vLLM 0.33.0"
    old = export_flags("vllm", SIZES, engine_version="0.8")
    assert old.checked.startswith("UNCHECKED for version 0.8: only vLLM 0.33.0 was checked")


def test_tensorrt_llm_pads() -> None:
    exported = export_flags("tensorrt_llm", SIZES)
    assert exported.config is not None
    config = yaml.safe_load(exported.config)
    assert config == {
        "max_batch_size": 40,
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": SIZES},
    }
    assert exported.flags == "--config config.yaml"
    assert "--extra_llm_api_options" in export_flags("tensorrt_llm", SIZES, engine_version="1.1.0").flags


def test_lmdeploy_gets_its_batch_sizes() -> None:
    assert (
        "--cudagraph-capture-batch-sizes 1 2 8 40 --max-batch-size 40"
        in export_flags("lmdeploy", SIZES).flags
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_every_list_is_clipped_and_ends_at_the_engines_maximum(engine: str) -> None:
    exported = export_flags(engine, [1, 2, 8, 40, 64], max_batch_size=42)
    text = exported.flags + (exported.config or "")
    assert "42" in text and "64" not in text


@pytest.mark.parametrize("engine", ENGINES)
def test_every_export_names_what_it_was_checked_against(engine: str) -> None:
    assert any(character.isdigit() for character in export_flags(engine, SIZES).checked_against)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"engine": "tgi", "sizes": SIZES}, "--engine"),
        ({"engine": "vllm", "sizes": []}, "LIST"),
        ({"engine": "vllm", "sizes": [0, 4]}, "LIST"),
        ({"engine": "vllm", "sizes": SIZES, "engine_version": "new"}, "--engine-version"),
        ({"engine": "vllm", "sizes": SIZES, "tokens_per_request": 0}, "--tokens-per-request"),
    ],
)
def test_what_cannot_be_exported_is_refused(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        export_flags(**arguments)  # type: ignore[arg-type]


#: The names in the sources of the versions that an export says it was checked against, read 2026-11.
NAMES = {
    "vllm": ("0.33.0", {"--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--max-num-seqs"}),
    "sglang": (
        "0.5.23",
        {"--cuda-graph-bs-decode", "--cuda-graph-max-bs-decode", "--max-running-requests"},
    ),
    "tensorrt_llm": (
        "1.4.0rc1",
        {"--config", "max_batch_size", "cuda_graph_config", "enable_padding", "batch_sizes"},
    ),
    "lmdeploy": ("0.18.0", {"--backend", "--cudagraph-capture-batch-sizes", "--max-batch-size"}),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_names_are_those_of_the_version_they_were_checked_against(engine: str) -> None:
    version, names = NAMES[engine]
    exported = export_flags(engine, SIZES)
    assert exported.checked_against.endswith(version)
    written = {word for word in exported.flags.split() if word.startswith("--")}
    written |= set(re.findall(r"(\w+):", exported.config or ""))
    assert written == names


def test_vllm_keeps_the_sizes_of_speculative_decoding_that_it_would_round() -> None:
    """Both of its model runners round a size up to a multiple of the tokens that a request decodes."""
    flags = export_flags("vllm", SIZES, tokens_per_request=5).flags.split()
    tokens = [int(word) for word in flags[1 : flags.index("--max-cudagraph-capture-size")]]
    assert [-(-size // 5) * 5 for size in tokens] == tokens
