"""The schema refuses what cannot run, with field, value and remedy, before any weight is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.errors import ConfigError
from harness.fields import field_names, list_fields
from harness.schema import Config, LengthSpec, check, load_config

TINY = {
    "model": {"config": {"model_type": "qwen3", "max_position_embeddings": 2048}},
    "workload": {"max_requests": 8},
}

#: The keys that scripts and dashboards rely on.
PROMISED = {
    "device": "",
    "seed": "",
    "output_dir": "",
    "model": "source path revision dtype implementation max_seq_len",
    "attention": "backend page_size kv_cache_dtype",
    "runner": "kind max_batch_size above_max on_miss poison_padding copy_output overlap",
    "capture": "policy sizes max_size allow_gap plan_path",
    "padding": "strategy costs_path",
    "compile": "mode max_bs scope dynamic fullgraph",
    "workload": "kind path format clock over_length max_requests duration_s rate_scale request_rate burstiness max_concurrency prompt_len output_len",
    "measure": "batch_sizes context_lens prefill_tokens eager_batch_sizes longest_lens loop_batch_sizes min_samples max_noise timeout_s",
    "parity": "enabled rtol atol on_failure",
    "tracking": "mode project entity group tags dir",
    "job": "timeout_s objective",
    "sweep": "id resume dry_run stop_on_first_failure",
}


def configured(**changes: object) -> Config:
    """The smallest configuration that runs, with dotted keys (`__` for the dot) changed."""
    tree = yaml.safe_load(yaml.safe_dump(TINY))
    for key, value in changes.items():
        *groups, name = key.split("__")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return load_config(yaml.safe_dump(tree))


def refusal(**changes: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(configured(**changes))
    return caught.value


def test_the_defaults_of_the_schema_run() -> None:
    check(configured())


@pytest.mark.parametrize("text", ["path", "file"])
def test_a_configuration_is_read_from_text_or_from_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("seed: 7\n")
    assert load_config(file if text == "file" else str(file)).seed == 7


@pytest.mark.parametrize(
    ("yaml_text", "field", "remedy"),
    [
        ("runner: {max_batch_sise: 4}", "runner.max_batch_sise", "did you mean runner.max_batch_size?"),
        ("runner: {page_size: 4}", "runner.page_size", "did you mean attention.page_size?"),
        ("surprise: 1", "surprise", "the configuration has device, seed"),
        ("seed: many", "seed", "give a whole number"),
        ("measure: {max_noise: low}", "measure.max_noise", "give a number"),
        (
            "measure: {batch_sizes: 4}",
            "measure.batch_sizes",
            "give a list such as measure.batch_sizes=[1,2,4]",
        ),
        ("measure: {batch_sizes: [1, two]}", "measure.batch_sizes", "give a list"),
        ("capture: {allow_gap: maybe}", "capture.allow_gap", "give true or false"),
        ("seed: ${nowhere}", "seed", "names no key"),
        ("a: [", "configuration", "is not YAML"),
        ("workload: {prompt_len: short}", "workload.prompt_len", "give a whole number, or {distribution"),
        ("workload: {prompt_len: 0}", "workload.prompt_len", "at least 1 token"),
        ("workload: {prompt_len: {meen: 3}}", "workload.prompt_len.meen", "did you mean mean?"),
        (
            "workload: {prompt_len: {distribution: normal, mean: 3}}",
            "workload.prompt_len.std",
            "needs a number",
        ),
        (
            "workload: {prompt_len: {distribution: uniform, min: 5, max: 4}}",
            "workload.prompt_len.max",
            "at least",
        ),
        (
            "workload: {output_len: {distribution: zipf}}",
            "workload.output_len.distribution",
            "choose one of fixed",
        ),
        ("workload: {output_len: {mean: ten}}", "workload.output_len.mean", "give a number"),
    ],
)
def test_a_value_that_does_not_fit_its_field_is_refused(yaml_text: str, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=".") as caught:
        load_config(yaml_text)
    assert caught.value.field == field
    assert remedy in caught.value.remedy


def test_an_unknown_key_is_shown_with_the_value_it_had() -> None:
    with pytest.raises(ConfigError, match="runner.fast=true"):
        load_config("runner: {fast: true}")


@pytest.mark.parametrize(
    ("change", "value", "remedy"),
    [
        ("runner__max_batch_size", 0, "must be at least 1"),
        ("seed", -1, "must be at least 0"),
        ("sampling__temperature", -0.1, "must be at least 0"),
        ("sampling__temperature", float("inf"), "finite"),
        ("sampling__top_k", -1, "must be at least 0"),
        ("sampling__top_p", 0.0, "greater than 0"),
        ("sampling__top_p", 1.5, "at most 1"),
        ("sampling__seed", -1, "must be at least 0"),
        ("measure__max_noise", float("nan"), "finite"),
        ("measure__timeout_s", float("inf"), "finite"),
        ("measure__timeout_s", 0.0, "greater than 0"),
        ("capture__sizes", [0, 1], "must be at least 1"),
        ("runner__kind", "graph", "did you mean cuda_graph?"),
        ("compile__mode", False, "write compile.mode=none"),
        ("compile__mode", "off", "write compile.mode=none"),
        ("tracking__mode", False, "write tracking.mode=disabled"),
    ],
)
def test_a_value_out_of_range_is_refused(change: str, value: object, remedy: str) -> None:
    error = refusal(**{change: value})
    assert error.field == change.replace("__", ".")
    assert remedy in error.remedy


def test_all_requests_at_once_is_a_rate() -> None:
    check(configured(workload__request_rate=float("inf")))


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"device": "gpu"}, "device", "write auto, cpu"),
        ({"device": "cpu", "attention__backend": "flashinfer"}, "attention.backend", "needs CUDA"),
        ({"model__path": "/weights"}, "model.path", "add model.source=pretrained"),
        ({"model__source": "pretrained"}, "model.path", "needs a hub id or a folder"),
        ({"model__source": "pretrained", "model__path": "./nowhere"}, "model.path", "no such folder"),
        ({"model__max_seq_len": 4096}, "model.max_seq_len", "max_position_embeddings=2048"),
        ({"attention__num_pages": 8}, "attention.num_pages", "give at least 33"),
        ({"sampling__top_k": 5}, "sampling.top_k", "add sampling.temperature=1"),
        ({"sampling__top_p": 0.9}, "sampling.top_p", "add sampling.temperature=1"),
        ({"attention__num_pages": 100}, "attention.num_pages", "give 513"),
        ({"capture__max_size": 17}, "capture.max_size", "runner.max_batch_size=16"),
        ({"capture__policy": "explicit", "capture__sizes": [1, 17]}, "capture.sizes", "17 is over"),
        (
            {"capture__policy": "explicit", "capture__sizes": [1, 8]},
            "capture.sizes",
            "capture.allow_gap=true",
        ),
        ({"capture__policy": "explicit"}, "capture.sizes", "needs a list"),
        ({"capture__sizes": [1, 16]}, "capture.sizes", "goes with capture=explicit"),
        ({"padding__strategy": "exact", "runner__on_miss": "error"}, "padding.strategy", "write capture=all"),
        ({"padding__costs_path": "/nowhere.csv"}, "padding.costs_path", "No such file"),
        ({"compile__max_bs": 17}, "compile.max_bs", "at most the largest capture size, 16"),
        ({"compile__mode": "default", "runner__kind": "eager"}, "compile.mode", "add runner=cuda_graph"),
        (
            {
                "compile__mode": "default",
                "compile__max_bs": 4,
                "capture__policy": "explicit",
                "capture__sizes": [8, 16],
            },
            "compile.max_bs",
            "the smallest capture size is 8",
        ),
        ({"compile__mode": "reduce_overhead", "compile__max_bs": 8}, "compile.max_bs", "up to 16"),
        (
            {"compile__mode": "reduce_overhead", "padding__strategy": "split"},
            "padding.strategy",
            "write compile=default",
        ),
        (
            {"compile__mode": "reduce_overhead", "runner__above_max": "split"},
            "runner.above_max",
            "write compile=default",
        ),
        ({"runner__poison_padding": True}, "runner.poison_padding", "add measure=none workload=none"),
        (
            {"measure__flush_cache": True, "runner__overlap": True},
            "measure.flush_cache",
            "runner.overlap=false",
        ),
        ({"measure__batch_sizes": [1, 17]}, "measure.batch_sizes", "17 is over runner.max_batch_size=16"),
        ({"parity__batch_sizes": [17]}, "parity.batch_sizes", "17 is over runner.max_batch_size=16"),
        ({"measure__context_lens": [513]}, "measure.context_lens", "513 is over model.max_seq_len=512"),
        ({"measure__context_lens": []}, "measure.context_lens", "at least one length"),
        ({"measure__prefill_tokens": [513]}, "measure.prefill_tokens", "513 is over model.max_seq_len=512"),
        ({"measure__longest_lens": [513]}, "measure.longest_lens", "513 is over model.max_seq_len=512"),
        ({"measure__loop_batch_sizes": [99]}, "measure.loop_batch_sizes", "99 is over runner.max_batch_size"),
        (
            {"measure__loop_batch_sizes": [1], "runner__overlap": True},
            "measure.loop_batch_sizes",
            "set runner.overlap=false",
        ),
        ({"workload__max_requests": None}, "workload.max_requests", "needs a number of requests"),
        ({"workload__kind": "trace"}, "workload.path", "add workload.path=FILE"),
        ({"workload__kind": "trace", "workload__path": "/nowhere.csv"}, "workload.path", "No such file"),
        ({"workload__kind": "steady", "workload__batch_size": 17}, "workload.batch_size", "17 is over"),
        (
            {"workload__over_length": "error", "workload__prompt_len": 500},
            "workload.over_length",
            "532 tokens",
        ),
        ({"workload__clock": "fixed"}, "workload.fixed_step_ms", "needs the ms of a step"),
        ({"workload__clock": "costs"}, "workload.costs_path", "needs the sizes.csv"),
    ],
)
def test_a_combination_that_cannot_run_is_refused(
    changes: dict[str, object], field: str, remedy: str
) -> None:
    error = refusal(**changes)
    assert error.field == field
    assert remedy in error.remedy


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no GPU is visible" in refusal(device="cuda:0").remedy
    error = refusal(attention__backend="flashinfer")
    assert (error.field, type(error)) == ("attention.backend", ConfigError)
    assert "needs CUDA" in error.remedy


def test_a_trace_that_lacks_a_column_is_refused_with_the_column(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,374\n")
    error = refusal(workload__kind="trace", workload__path=str(trace))
    assert error.field == "workload.path"
    assert "GeneratedTokens" in error.remedy


def test_costs_that_are_no_size_sweep_are_refused(tmp_path: Path) -> None:
    costs = tmp_path / "sizes.csv"
    costs.write_text("batch_size,step_ms_p50\n1,2.0\n")
    assert "not a sizes.csv" in refusal(padding__costs_path=str(costs)).remedy


def test_an_overcommitted_pool_is_admitted_when_asked_for() -> None:
    check(configured(attention__num_pages=100, attention__overcommit=True))
    assert refusal(attention__num_pages=20, attention__overcommit=True).field == "attention.num_pages"


def test_exact_padding_with_every_size_captured_may_refuse_misses() -> None:
    check(configured(padding__strategy="exact", runner__on_miss="error", capture__policy="all"))


def test_poisoned_padding_is_admitted_without_timed_phases() -> None:
    check(configured(runner__poison_padding=True, measure__enabled=False, workload__enabled=False))


def test_a_workload_that_is_switched_off_is_not_looked_at() -> None:
    check(configured(workload__enabled=False, workload__kind="trace", workload__path="/nowhere"))


def test_lengths_are_read_into_a_distribution() -> None:
    assert configured(workload__prompt_len=7).workload.prompt_len == LengthSpec(mean=7.0)
    spread = {"distribution": "lognormal", "mean": 90, "std": 30, "max": 200}
    assert configured(workload__output_len=spread).workload.output_len == LengthSpec(
        "lognormal", 90.0, 30.0, 1, 200
    )


def test_the_list_fields_are_known_by_their_type() -> None:
    assert list_fields(Config) == {
        "capture.sizes",
        "job.objective",
        "measure.batch_sizes",
        "measure.context_lens",
        "measure.prefill_tokens",
        "measure.eager_batch_sizes",
        "measure.longest_lens",
        "measure.loop_batch_sizes",
        "parity.batch_sizes",
        "tracking.tags",
    }


@pytest.mark.parametrize("group", PROMISED)
def test_the_keys_that_scripts_rely_on_keep_their_names(group: str) -> None:
    known = field_names(Config)
    for name in PROMISED[group].split():
        assert f"{group}.{name}" in known
    assert group in known


def test_every_field_has_a_docstring() -> None:
    import ast

    import harness.lengths
    import harness.schema

    for module in (harness.schema, harness.lengths):
        tree = ast.parse(Path(module.__file__).read_text())
        for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for field, text in zip(section.body, [*section.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(text, ast.Expr), f"{section.name}.{ast.unparse(field.target)}"
