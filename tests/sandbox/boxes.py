"""What tests of sandboxes share: limits that are quick to reach, and the sandboxes of a level."""

from __future__ import annotations

import shutil
from collections.abc import Coroutine
from typing import Any, Literal, Protocol, TypeVar

import pytest

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox.api import Limits, SandboxSetupError
from nmoe.sandbox.process import ProcessSandbox
from nmoe.sandbox.sandboxes import Sandboxes

T = TypeVar("T")
LEVELS = ("bubblewrap", "landlock")
# Small, so that reaching a limit is quick.
LIMITS = Limits(wall_s=10.0, cpu_s=10.0, memory_mb=128, processes=24, file_mb=8, disk_mb=16, output_kb=64)


class Box(Protocol):
    """A sandbox and the loop that it lives in, for tests that are plain functions."""

    sandbox: ProcessSandbox

    def __call__(self, work: Coroutine[Any, Any, T]) -> T: ...


def sandboxes_of(level: Literal["bubblewrap", "landlock"], warm: int = 0, **more: Any) -> Sandboxes:
    """Skips the test where the level cannot be had here; one that starts and does not hold is a failure."""
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed (apt-get install bubblewrap): the bubblewrap level is not tested")
    try:
        return Sandboxes(SandboxSettings(level=level, warm=warm, **more), LIMITS)
    except SandboxSetupError as error:
        if "cannot be started" in str(error):
            pytest.skip(f"the {level} level is not tested: {error}")
        raise
