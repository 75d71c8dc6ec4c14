"""How a step is spelled in the names of files and directories: step 10 is `step_000010`."""

import re

_STEP_NAME = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    """Name of a step, at least six digits wide so that a directory listing sorts by step.

    Raises ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"a step is counted from 0, got {step}")
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step that a name such as `step_000010` stands for; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None
