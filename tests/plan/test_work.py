"""The work of a step: what runs at most, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nmoe.config.commands import RLConfig, SFTConfig
from nmoe.config.loader import load_run_with
from nmoe.envs.environment import Environment
from nmoe.plan.work import Prompts, Work, prompts_of, work_of
from nmoe.recipes.setup import load_tokenizer

SHAPE = {"hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "context_tokens": 512}
MODEL = {"shape": {**SHAPE, "intermediate_size": 16}, "tokenizer": "bytes"}


def rl(**tables: Any) -> RLConfig:
    environment = {"env_id": "reverse", "task": "reverse", "task_pool": {"type": "generated"}}
    batch = {"prompts_per_step": 4, "group_size": 8, "max_refills": 0} | tables.pop("batch", {})
    joined = {"run": {"steps": 2}, "model": MODEL, "environment": environment, "sampling": {"max_new_tokens": 30}}
    return load_run_with(None, RLConfig, joined | {"batch": batch} | tables, "test", "run")


KNOWN = Prompts(20, {})


@pytest.mark.parametrize(
    ("tables", "ranks", "work"),
    [
        # 32 samples of 20 + 30 tokens; each of 4 prompts runs once.
        ({}, 1, Work(32 * 50, 4 * 20 + 32 * 30, 32 * 30, 32, 4 * 20 + 32 * 30)),
        # A micro-batch of 512 tokens takes 10 samples, which are of two groups.
        ({"batch": {"tokens_per_microbatch": 512}}, 1, Work(500, 2 * 20 + 300, 300, 32, 1040)),
        # Each of two updates takes half of the groups, and each of two ranks half of those samples.
        ({"batch": {"updates_per_step": 2}}, 2, Work(8 * 50, 20 + 8 * 30, 8 * 30, 32, 1040)),
        # 6 prompts are drawn for 4, and as many again once more.
        ({"batch": {"oversampling": 1.5, "max_refills": 1}}, 1, Work(1600, 1040, 960, 96, 12 * (20 + 8 * 30))),
        # The evaluation samples more than a step does: 200 problems, two completions each.
        (
            {"eval": [{"problems": 200, "samples": 2, "temperature": 1.0, "max_tokens": 40}]},
            1,
            Work(1600, 1040, 960, 400, 200 * (20 + 2 * 40)),
        ),
    ],
)
def test_a_step_of_rl_by_hand(tables: dict[str, Any], ranks: int, work: Work) -> None:
    assert work_of(rl(**tables), 512, KNOWN, ranks) == work


def test_prompts_that_are_not_known_are_as_long_as_they_may_be() -> None:
    assert work_of(rl(), 512).rows == 4 * (512 - 30) + 32 * 30
    environment = {**rl().environment.model_dump(exclude_unset=True), "budget": {"prompt_tokens": 100}}
    assert work_of(rl(environment=environment), 512).rows == 4 * 100 + 32 * 30
    # What tools say is part of a sequence too.
    environment |= {"tools": {"use": ["python"]}}
    assert work_of(rl(environment=environment), 512, KNOWN).tokens == 32 * 512


def test_prompts_are_measured() -> None:
    config = rl()
    environment = Environment.from_settings(config.environment, load_tokenizer(config.model))
    found = prompts_of(config)
    assert found is not None
    assert found.training == max(len(environment.prompts.ids(environment.pool.order.at(place))) for place in range(64))
    assert found.probes == {}
    assert prompts_of(rl(model={"path": "missing"})) is None


def test_supervised_steps_fill_micro_batches(tmp_path: Path) -> None:
    def sft(**tables: Any) -> SFTConfig:
        joined = {"run": {"steps": 2}, "model": MODEL, "records": {"path": "r.jsonl", "tokens_per_step": 4096}}
        return load_run_with(None, SFTConfig, joined | tables, "test", "run")

    assert work_of(sft(), 512) == Work(4096, 4096, 4096)
    assert work_of(sft(), 512, ranks=4).tokens == 1024
    assert work_of(sft(batch={"tokens_per_microbatch": 512}), 512).tokens == 512
