"""Environments of the package skyrl-gym, played in this process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.registry import hand_over
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks.own import TaskError
from nmoe.rollout.collector import Collector, UserCodeFailedError
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Sampling

gym = pytest.importorskip("skyrl_gym")

RECORD = {
    "prompt": [{"role": "user", "content": "Ann has 3 boxes of 6 eggs. How many eggs?"}],
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"method": "rule", "ground_truth": "18"},
    "extra_info": {"max_turns": 3},
}
REASON = (
    "Please provide your step-by-step reasoning, and also include a tentative numeric answer at the end in the exact format: "
    "'#### ANSWER'."
)
ONLY = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."


def play(environment: Any, tokenizer: Tokenizer, record: Any, turns: list[str], more: str = "") -> Trajectory:
    (pool,) = hand_over([record])
    demo: Environment = environment(
        f'format = "boxed"\ntask = "skyrl_gym"\n{more}[task_pool]\ntype = "python"\ncall = "{pool}"\n'
    )

    def script(request: Request, index: int) -> list[int]:
        turn = int(request.request_id.rpartition("/")[2]) if request.request_id.startswith("7/train/") else 0
        return [*tokenizer.encode(turns[turn]), *demo.renderer.stop_ids]

    collector = Collector(ScriptedEngine(script), demo, 2000)  # type: ignore[arg-type]
    (group,) = collector.collect(demo.pool.take(1), 1, Sampling(400), (7, "train")).groups
    return group.trajectories[0]


def test_an_episode_of_three_turns(environment: Any, tokenizer: Tokenizer) -> None:
    played = play(environment, tokenizer, RECORD, ["3 and 6", "#### 19", "#### 18"])
    assert [(one.user, one.reward) for one in played.exchanges] == [
        (REASON, 0.0),
        (ONLY, pytest.approx(0.2 / 3)),
        (None, 1.0),
    ]
    assert played.grade.components["correctness"] == pytest.approx(1 + 0.2 / 3)
    assert played.grade.verdict is not None
    assert played.grade.verdict.outcome == "correct"
    assert tokenizer.decode(played.token_ids).replace("<|endoftext|>", "") == (
        f"3 and 6\n{REASON}\n#### 19\n{ONLY}\n#### 18"
    )


def test_it_pays_as_the_package_does_alone(environment: Any, tokenizer: Tokenizer) -> None:
    turns = ["#### 1", "no number", "#### 18 "]
    env = gym.make("gsm8k_multi_turn", env_config=None, extras=RECORD)
    env.init(RECORD["prompt"])
    alone = [env.step(turn)["reward"] for turn in turns]
    assert [one.reward for one in play(environment, tokenizer, RECORD, turns).exchanges] == alone


def test_a_record_may_name_no_environment_that_there_is(environment: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(TaskError, match=r"env_class is 'gsm9k', and skyrl-gym has aime, gsm8k, gsm8k_multi_turn"):
        play(environment, tokenizer, {**RECORD, "env_class": "gsm9k"}, ["#### 1"])
    with pytest.raises(TaskError, match=r"AssertionError: reward_spec\.ground_truth is required"):
        play(environment, tokenizer, {**RECORD, "reward_spec": {}}, ["#### 1"])


def test_a_turn_that_the_environment_replaces_stops_the_run(environment: Any, tokenizer: Tokenizer) -> None:
    class Replacing(gym.Env):  # type: ignore[name-defined]
        def __init__(self, env_config: Any, extras: Any) -> None:
            assert (env_config, extras["color"]) == ({}, "blue")

        def init(self, prompt: Any) -> Any:
            return prompt, {}

        def step(self, action: str) -> Any:
            return {"observations": [], "reward": 0.0, "done": True, "metadata": {}, "postprocessed_action": "18"}

        def close(self) -> None:
            pass

    gym.register(id="replacing", entry_point=Replacing)
    try:
        with pytest.raises(UserCodeFailedError, match="the environment replaces what the policy said"):
            play(environment, tokenizer, {**RECORD, "env_class": "replacing", "color": "blue"}, ["#### 18 or so"])
    finally:
        del gym.registry["replacing"]


@pytest.mark.parametrize("late", ["make", "step"])
def test_an_environment_is_closed_in_its_thread_after_a_late_call(late: str, environment: Any, tokenizer: Any) -> None:
    calls: list[tuple[str, int]] = []

    class Late(gym.Env):  # type: ignore[name-defined]
        def __init__(self, env_config: Any, extras: Any) -> None:
            self._called("make")

        def _called(self, name: str) -> None:
            calls.append((name, threading.get_ident()))
            if name == late:
                time.sleep(0.6)
                calls.append((f"end of {name}", threading.get_ident()))

        def init(self, prompt: Any) -> Any:
            return prompt, {}

        def step(self, action: str) -> Any:
            self._called("step")
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

        def close(self) -> None:
            self._called("close")

    gym.register(id="late", entry_point=Late)
    try:
        played = play(environment, tokenizer, {**RECORD, "env_class": "late"}, ["#### 18"], "[budget]\nwall_s = 0.4\n")
    finally:
        del gym.registry["late"]
    assert played.grade.failure == "environment_error"
    assert played.grade.reason.endswith("took longer than 0.4 s (budget.wall_s)")
    before = ["make"] if late == "make" else ["make", "step"]
    assert [name for name, _ in calls] == [*before, f"end of {late}", "close"]
    assert len({thread for _, thread in calls}) == 1
