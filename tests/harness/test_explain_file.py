"""What is wrong in a YAML file of the user's own is shown with its file and line, and with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.__main__ import main

GLOBAL = "# @package _global_\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "runner:\n  max_batch: 4\n",
            "runner.max_batch=4: unknown key; did you mean runner.max_batch_size? (--cfg job shows all keys) "
            "({path}, line 3)",
        ),
        (
            "runner:\n  max_batch_size: many\n",
            "runner.max_batch_size=many: give a whole number ({path}, line 3)",
        ),
        ("seed: [1\nrunner: 2\n", "experiment=mine: {path}, line 3: not YAML ("),
        ("model:\n  name: a\n   path: b\n", "experiment=mine: {path}, line 4: not YAML ("),
        ("defaults:\n  - override /modell: tiny\n", "no such group; did you mean model? ({path}, line 3)"),
        ("runner: 4\n", "runner=4: holds keys of its own: write them indented below it, such as runner.kind"),
        (
            "hydra:\n  sweepr: 3\n",
            "hydra.sweepr=3: unknown key of Hydra's (--cfg hydra shows all of them) ({path}, line 3)",
        ),
        (
            "defaults:\n  - /runner: eager\n",
            "runner=eager: chosen already: in the defaults of a file of your own write `- override /runner: eager`",
        ),
        ("just text\n", "experiment=mine: must hold keys, one `key: value` a line ({path})"),
        ("defaults:\n  - override /model: tinny\n", "model=tinny: choose one of"),
    ],
)
def test_an_error_in_an_own_overlay_names_its_line_and_the_remedy(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(GLOBAL + text)
    assert main(["-cd", str(tmp_path), "experiment=mine", f"output_dir={tmp_path / 'job'}"]) == 2
    printed = capsys.readouterr().err
    assert message.format(path=path) in printed
    assert printed.count("\n") == 1
    assert "hydra" in text or "hydra" not in printed
    assert "composing" not in printed


def test_an_overlay_without_its_first_line_is_told_to_begin_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("runner:\n  max_batch_size: 4\n")
    assert main(["-cd", str(tmp_path), "experiment=mine", f"output_dir={tmp_path / 'job'}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: experiment=mine: ")
    assert f"let the file begin with # @package _global_ ({path})" in printed


def test_a_key_below_its_package_is_found_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\ndtyp: float32\n")
    assert main(["-cd", str(tmp_path), "model=mine", f"output_dir={tmp_path / 'job'}"]) == 2
    printed = capsys.readouterr().err
    assert "model.dtyp=float32: unknown key; did you mean model.dtype?" in printed
    assert "mine.yaml, line 2)" in printed


def test_an_overlay_may_set_the_keys_that_belong_to_no_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{GLOBAL}seed: 5\n")
    assert main(["-cd", str(tmp_path), "experiment=mine", "--cfg", "job"]) == 0
    assert "\nseed: 5\n" in capsys.readouterr().out
