"""Checks of found faults: what a run learns from, and the figures that describe it."""

from __future__ import annotations

import tempfile
from typing import Any

from found import Result, check


@check(
    16,
    "a reward that returns None for two of four samples without a gold",
    "mean 1.5 over two samples, share masked 0.5",
)
def none_is_not_zero() -> Result:
    import nmoe

    def some(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if index % 3 == 0 else float(index) for index in range(len(completions))]

    run = nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        env=[{"prompt": "Sing."}, {"prompt": "Hum."}],
        rewards=[some],
        config={
            "run": {"steps": 1, "name": "none", "directory": tempfile.mkdtemp()},
            "batch": {"prompts_per_step": 1, "group_size": 4},
            "sampling.max_new_tokens": 8,
        },
    )
    row = run.metrics[-1]
    mean, masked = row["reward_mean"], row["grader_error_rate"]
    return f"mean {mean}, share masked {masked}", (mean, masked) == (1.5, 0.5)
