"""List fields are read as people write them; what names a Python object is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.overrides import is_multirun, read_overrides, refuse_foreign_folder


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("capture.sizes=1,2,4", "capture.sizes=[1,2,4]"),
        ("capture.sizes=[1,2,4]", "capture.sizes=[1,2,4]"),
        ("capture.sizes=4", "capture.sizes=[4]"),
        ("++capture.sizes=1,2", "++capture.sizes=[1,2]"),
        ("tracking.tags=a100,night", "tracking.tags=[a100,night]"),
        ("capture.sizes=[]", "capture.sizes=[]"),
        ("runner.max_batch_size=1,2", "runner.max_batch_size=1,2"),
        ("model=tiny", "model=tiny"),
    ],
)
def test_without_multirun_a_comma_in_a_list_field_makes_the_list(written: str, read: str) -> None:
    assert read_overrides([written], multirun=False) == [read]


def test_without_multirun_several_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match="add -m"):
        read_overrides(["capture.sizes=[1,2],[1,4]"], multirun=False)


@pytest.mark.parametrize(
    "written", ["capture.sizes=1,2,4", "capture.sizes=[1,2],4", "capture.sizes=range(1,4)"]
)
def test_with_multirun_a_bare_comma_on_a_list_field_is_refused(written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_overrides([written], multirun=True)
    assert caught.value.remedy == "write capture.sizes=[1,2,4]; several lists: capture.sizes=[1,2],[1,4]"


@pytest.mark.parametrize(
    "written", ["capture.sizes=[1,2,4],[1,2,4,8]", "capture.sizes=[1,2]", "model=tiny,qwen3_8b"]
)
def test_with_multirun_lists_and_choices_are_left_to_the_sweep(written: str) -> None:
    assert read_overrides([written], multirun=True) == [written]


@pytest.mark.parametrize(
    "written",
    [
        "model._target_=os.system",
        "+model.config={_target_:os.system}",
        "+hydra.callbacks.x.y=1",
        "hydra.searchpath=[/tmp]",
    ],
)
def test_an_override_names_no_python_object_and_no_foreign_path(written: str) -> None:
    with pytest.raises(ConfigError):
        read_overrides([written], multirun=False)


@pytest.mark.parametrize("written", ["capture.sizes=[1,2", "runner", "a=b=c{", "=3"])
def test_an_override_that_cannot_be_read_says_how_to_write_it(written: str) -> None:
    with pytest.raises(ConfigError, match="write|close every bracket"):
        read_overrides([written], multirun=False)


@pytest.mark.parametrize("text", ["x: {_target_: os.system}", "hydra: {searchpath: [file:///x]}"])
def test_a_folder_of_the_users_own_names_no_python_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="mine.yaml has"):
        refuse_foreign_folder("--config-dir", tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        refuse_foreign_folder("--config-dir", tmp_path / "nowhere")


def test_multirun_is_the_flag_or_hydras_mode() -> None:
    assert is_multirun([], True)
    assert is_multirun(["hydra.mode=MULTIRUN"], False)
    assert not is_multirun(["hydra.mode=RUN"], False)
