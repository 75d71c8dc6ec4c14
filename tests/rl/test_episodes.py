"""The length of a run in episodes: the guidelines' arithmetic, and what has no end."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run_with
from nmoe.errors import UserError
from nmoe.preflight.learning_rate import learning_rate
from nmoe.preflight.preflight import preflight, refuse_to_start
from nmoe.rl.episodes import steps_of, with_steps_of_episodes
from nmoe.rl.launch import train

SHAPE = {"hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "intermediate_size": 16}


def config(tmp_path: Path, problems: int | None = 40, **tables: dict[str, Any]) -> RLConfig:
    pool = {"type": "generated", "task_type": "sort", "max_examples": problems}
    joined: dict[str, dict[str, Any]] = {
        "run": {"episodes": 2.0, "directory": str(tmp_path)},
        "model": {"shape": {**SHAPE, "context_tokens": 64}, "tokenizer": "bytes"},
        "environment": {"env_id": "sort", "format": "boxed", "task_pool": {k: v for k, v in pool.items() if v}},
        "sampling": {"max_new_tokens": 4},
        "batch": {"prompts_per_step": 8, "group_size": 2},
    }
    return load_run_with(None, RLConfig, {**joined, **tables}, "test", "run")


@pytest.mark.parametrize(
    ("pool", "prompts", "samples", "train_batch", "episodes"), [(400, 16, 8, 16, 1), (400, 8, 8, 8, 50)]
)
def test_optimizer_steps_are_those_of_the_guidelines(
    pool: int, prompts: int, samples: int, train_batch: int, episodes: int
) -> None:
    """Guidelines, section 7: `pool_size * n_samples_per_prompt // train_batch_size * num_episodes`, the batch in samples."""
    updates = prompts * samples // train_batch
    assert steps_of(episodes, pool, prompts) * updates == pool * samples // train_batch * episodes


def test_a_run_is_as_long_as_its_episodes_and_a_share_of_it_warms_up(tmp_path: Path) -> None:
    """40 problems, 8 a step, twice = 10 steps; a warm-up of 30% = 3 of them."""
    run = train(
        config(tmp_path, optimizer={"warmup_ratio": 0.3, "learning_rate": 1e-3}, checkpoint={"every_steps": 10})
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    recorded = tomllib.loads((run / "config.toml").read_text())
    assert recorded["run"]["steps"] == 10
    assert "episodes" not in recorded["run"]


def test_the_first_steps_of_a_share(tmp_path: Path) -> None:
    """Of 1,000 steps 5% are 50: 40% of the peak at step 20. 7% are 70: 29%, and 66 of 1,000 would do."""
    slow = {"warmup_ratio": 0.07, "learning_rate": 5e-7}
    asked = config(tmp_path, 4000, run={"episodes": 2.0}, optimizer=slow | {"warmup_ratio": 0.05})
    assert with_steps_of_episodes(asked).run.steps == 1000
    assert learning_rate(with_steps_of_episodes(asked)).text == "40% of its peak 5e-07 by step 20"
    late = config(tmp_path, 4000, run={"episodes": 2.0}, optimizer=slow)
    with pytest.raises(UserError, match=r"warmup_ratio = 0\.07, which is 70 steps, is too long; set 0\.066 or less"):
        refuse_to_start(late)


def test_what_has_no_length_is_refused(tmp_path: Path) -> None:
    endless = config(tmp_path, None)
    with pytest.raises(UserError, match=r"run\.episodes = 2: the task pool of 'sort' has no end; give run\.steps"):
        with_steps_of_episodes(endless)
    assert "episodes" in [check.name for check in preflight(endless) if check.status == "fail"]
    critic = {"critic": {"path": "c", "warmup_steps": 10}, "algorithm": {"advantage": "gae"}}
    with pytest.raises(UserError, match=r"critic\.warmup_steps = 10: leaves no step .* 2 are 10 steps"):
        with_steps_of_episodes(config(tmp_path, **critic))
    with pytest.raises(UserError, match=r"excludes run\.episodes = 2; give one of the two"):
        config(tmp_path, run={"steps": 3, "episodes": 2.0})
    with pytest.raises(UserError, match=r"must be more than 0, unless run\.episodes is given"):
        config(tmp_path, run={"name": "none"})
    with pytest.raises(UserError, match=r"excludes warmup_steps = 3; give one of the two"):
        config(tmp_path, optimizer={"warmup_steps": 3, "warmup_ratio": 0.1})
