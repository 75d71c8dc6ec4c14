"""Rewards in replay bundles: functions are asked again, what may not be is taken as recorded, and a difference is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from reward_cases import SORT, reward

from nmoe.envs.environment import Environment
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import UserCodeFailedError
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group, Trajectory

Make = Callable[..., Environment]
Play = Callable[..., Group]
Module = Callable[[str], str]

SOURCE = """
def length(completions, trainer_state, tags, **_):
    assert tags == [["a", "b"]] * len(completions)
    return [len(one[-1]["content"]) / 4 + trainer_state.global_step + trainer_state.max_steps for one in completions]
def compared(completions, **_):
    return [len(completions)] * len(completions)
def fails(completions, **_):
    return []
"""


@pytest.fixture
def checks(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[Environment, Trajectory], dict[str, Check]]:
    """Writes the bundle of a trajectory and replays it."""

    def run(environment: Environment, trajectory: Trajectory) -> dict[str, Check]:
        directory = tmp_path / "replay"
        directory.mkdir(exist_ok=True)
        recorder = ReplayRecorder(directory, environment, tokenizer, seed=0, sample_rate=1.0, per_failure=1)
        (path,) = recorder.write(7, [trajectory])

        async def collect() -> dict[str, Check]:
            return {check.name: check async for check in replay(read_bundle(path), tokenizer, allow_user_code=True)}

        return asyncio.run(collect())

    return run


def differences(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.difference for name, check in checks.items() if check.difference is not None}


def test_functions_are_asked_again_with_the_columns_and_state_of_the_run(
    environment: Make, play: Play, module: Module, checks: Callable[..., dict[str, Check]]
) -> None:
    name = module(SOURCE)
    demo = environment(
        SORT + reward(f"{name}:length", weight=0.5) + reward(f"{name}:compared", "compared", replay=False)
    )
    trajectory = play(demo, ["123", "9"]).trajectories[0]
    assert trajectory.grade.score == 1.0 + 0.5 * (0.75 + 6 + 100) + 2
    found = checks(demo, trajectory)
    assert differences(found) == {}
    assert found["rewards"].compared == "mine asked again; compared taken as recorded"


def test_a_value_that_comes_out_differently_is_named(
    environment: Make, play: Play, module: Module, checks: Callable[..., dict[str, Check]]
) -> None:
    demo = environment(SORT + reward(f"{module(SOURCE)}:compared"))
    trajectory = play(demo, ["123", "9"]).trajectories[0]
    assert differences(checks(demo, trajectory)) == {"rewards": "grade.score: 3.0 in the bundle, 2.0 now"}
    grade = trajectory.grade
    forged = replace(trajectory, grade=replace(grade, components={**grade.components, "mine": 1.0}))
    assert differences(checks(demo, forged)) == {"rewards": "grade.score: 3.0 in the bundle, 2.0 now"}


def test_the_sample_that_a_reward_failed_on_fails_again(
    environment: Make, play: Play, module: Module, checks: Callable[..., dict[str, Check]]
) -> None:
    demo = environment(SORT + reward(f"{module(SOURCE)}:fails"))
    with pytest.raises(UserCodeFailedError) as caught:
        play(demo, ["123"])
    (said,) = differences(checks(demo, caught.value.trajectory)).values()
    assert "returned 0 values for 1 completions" in said
