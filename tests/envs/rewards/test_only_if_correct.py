"""Rewards for right answers only: who is asked about, what the others get, and where it makes no sense."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
from reward_cases import SORT, reward

from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.rollout.collector import GradingError
from nmoe.trajectory import Group

Make = Callable[..., Environment]
Play = Callable[..., Group]
Module = Callable[[str], str]

QUALITY = """
asked = []
def f(completions, **columns):
    asked.append([completion[-1]["content"] for completion in completions])
    return [0.5 + number for number, _ in enumerate(completions)]
"""


def test_only_right_answers_are_asked_about(environment: Make, play: Play, module: Module) -> None:
    name = module(QUALITY)
    demo = environment(SORT + reward(f"{name}:f", weight=2.0, only_if_correct=True))
    group = play(demo, ["321", "123", None, "123", "9"])
    assert importlib.import_module(name).asked == [["123", "123"]]
    grades = [trajectory.grade for trajectory in group.trajectories]
    assert [grade.components["mine"] for grade in grades] == [0.0, 0.5, 0.0, 1.5, 0.0]
    assert [grade.score for grade in grades] == [0.0, 2.0, 0.0, 4.0, 0.0]
    play(demo, ["321", None])
    assert len(importlib.import_module(name).asked) == 1, "nothing is right, nothing is asked"


def test_an_error_names_the_sample_among_all(environment: Make, play: Play, module: Module) -> None:
    name = module('def f(completions, **columns):\n    return [1.0, float("inf")]\n')
    demo = environment(SORT + reward(f"{name}:f", only_if_correct=True))
    with pytest.raises(GradingError) as raised:
        play(demo, ["123", "9", "123"])
    assert raised.value.trajectory.grade.answer == "123"
    assert raised.value.trajectory.token_ids == play(environment(SORT), ["9", "9", "123"]).trajectories[2].token_ids


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            SORT + reward("m:f", weight=-1.0, only_if_correct=True),
            "a penalty for right answers alone makes wrong ones better",
        ),
        (
            SORT + '[[rewards]]\nname = "mine"\ntype = "reward_model"\npath = "p"\nonly_if_correct = true\n',
            "a reward model's scale has no zero",
        ),
        (
            '[task_pool]\ntype = "jsonl"\npath = "p"\ntask_type = "open"\n' + reward("m:f", only_if_correct=True),
            "open problems have no right answer; drop it",
        ),
    ],
)
def test_where_it_makes_no_sense(environment: Make, tables: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        environment(tables)
