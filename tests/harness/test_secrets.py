"""No secret is written into a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.record import JobRecord
from harness.record_reader import read_result
from harness.scrub import HIDDEN, names_a_secret, scrub, scrub_command
from tests.harness.job_folder import CONFIG


class TestSecrets:
    @pytest.mark.parametrize(
        "key", ["api_key", "apiKey", "HF_TOKEN", "tracking.api-key", "password", "aws_secret"]
    )
    def test_a_key_that_names_a_secret_is_known(self, key: str) -> None:
        assert names_a_secret(key)

    @pytest.mark.parametrize(
        "key", ["prefill_chunk_tokens", "eos_token_id", "num_kv_tokens", "seed", "key", "keys"]
    )
    def test_other_keys_are_not(self, key: str) -> None:
        assert not names_a_secret(key)

    def test_none_reaches_the_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        record = JobRecord(tmp_path)
        record.update(
            config={"model": {"hf_token": "plain-secret", "path": "https://user:hunter2@host/model"}},
            environment={
                "command": ["harness", "--api-key", "typed-secret", "x.token=other-secret", "seed=1"]
            },
            error={
                "kind": "E",
                "message": "key 0123456789abcdef0123456789abcdef01234567 is wrong",
                "traceback": None,
            },
        )
        record.warn("used hf_abcdefghijklmnopqrstuvwxyz")
        text = (tmp_path / "result.json").read_text()
        for secret in (
            "plain-secret",
            "hunter2",
            "typed-secret",
            "other-secret",
            "0123456789abcdef",
            "hf_abcdef",
        ):
            assert secret not in text
        assert read_result(tmp_path)["environment"]["command"] == [
            "harness",
            "--api-key",
            "***",
            "x.token=***",
            "seed=1",
        ]

    def test_a_commit_and_ordinary_values_stay(self) -> None:
        config = {
            "revision": "93efa2f097d58c2a74874c7e644dbc9b0cee75a2",
            "runner": {"prefill_chunk_tokens": 512},
        }
        assert scrub(config | CONFIG) == config | CONFIG

    def test_a_long_word_costs_no_more_than_its_length(self) -> None:
        assert scrub("x" * 500_000) == "x" * 500_000

    def test_a_command_line_keeps_its_other_words(self) -> None:
        assert scrub_command(["run", "--password=x", "capture=vllm"]) == [
            "run",
            f"--password={HIDDEN}",
            "capture=vllm",
        ]
