"""Checks of found faults: the library, the messages, and what a run shows."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

from found import Result, check

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64}
SHORT: dict[str, Any] = {
    "run.steps": 1,
    "batch.prompts_per_step": 1,
    "batch.group_size": 4,
    "sampling.max_new_tokens": 8,
}


@check(30, "what a policy wrote, on the console of a run of one step", "prompt, completion and reward")
def a_sample_is_shown() -> Result:
    import nmoe

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        nmoe.train_rl(TINY, env="sort", config=SHORT | {"run.directory": tempfile.mkdtemp()})
    wanted = ("prompt:", "Sort: ", "completion:", "reward 0 ")
    shown = [one for one in wanted if one in said.getvalue()]
    return f"{len(shown)} of {len(wanted)} parts shown", len(shown) == len(wanted)
