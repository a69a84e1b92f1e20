"""The capture list that a configuration asks for. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import ConfigError
from runners.capture_sizes import CaptureList, capture_sizes

if TYPE_CHECKING:
    from harness.schema import Config


def capture_list(config: Config) -> CaptureList:
    """Return the policy's list, clipped to `capture.max_size`, which is `runner.max_batch_size` by default.

    Raises ConfigError if the policy and its sizes, or its plan file, give no list.
    """
    capture = config.capture
    maximum = capture.max_size or config.runner.max_batch_size
    if capture.policy == "planned":
        from harness.planner.plan_file import planned_sizes

        if capture.plan_path is None:
            raise ConfigError(
                "capture.plan_path",
                None,
                "capture=planned needs the file that the verb plan wrote (--output)",
            )
        return capture_sizes("explicit", maximum, sizes=planned_sizes(capture.plan_path, maximum))
    if capture.plan_path is not None:
        raise ConfigError("capture.plan_path", capture.plan_path, "is read by capture=planned only")
    try:
        return capture_sizes(
            capture.policy, maximum, sizes=capture.sizes or None, allow_gap=capture.allow_gap
        )
    except ValueError as error:
        raise ConfigError("capture.sizes", capture.sizes, str(error)) from error
