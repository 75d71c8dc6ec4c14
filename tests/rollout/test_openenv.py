"""Environments of OpenEnv, played over recorded messages of openenv 0.10.0. `.ci/openenv_ors.py` plays with the package itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.registry import hand_over
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import openenv
from nmoe.envs.tasks.own import TaskError
from nmoe.errors import UserError
from nmoe.rollout.collector import Collector, UserCodeFailedError
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Sampling

Make = Callable[..., Environment]
RECORD = {"url": "http://127.0.0.1:8000/", "action": "message", "shows": "said", "prompt": "A game."}


def observation(said: Any, reward: float | None, done: bool) -> str:
    data = {"observation": {"metadata": {}, "said": said}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def fault(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


STATE = '{"type":"state","data":{"episode_id":"e","step_count":2}}'
OPENED = observation("Count down from 3.", None, False)


class Wire:
    """A WebSocket that gives recorded replies."""

    def __init__(self, replies: list[str | Exception]) -> None:
        self._replies, self.sent, self.closed = iter(replies), list[Any](), False

    async def send(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def recv(self) -> str:
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def play(environment: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Plays an episode, whose turns all say `on`, against recorded replies."""

    def played(record: dict[str, Any], *replies: str | Exception) -> tuple[Trajectory, Wire, str]:
        wire, addresses = Wire([*replies]), list[str]()

        async def connected(address: str) -> Wire:
            addresses.append(address)
            return wire

        monkeypatch.setattr(openenv, "_connected", connected)
        (pool,) = hand_over([record])
        demo = environment(f'format = "boxed"\ntask = "openenv"\n[task_pool]\ntype = "python"\ncall = "{pool}"\n')

        def script(request: Request, index: int) -> list[int]:
            return [*tokenizer.encode("on"), *demo.renderer.stop_ids]

        collector = Collector(ScriptedEngine(script), demo, 2000)  # type: ignore[arg-type]
        try:
            (group,) = collector.collect(demo.pool.take(1), 1, Sampling(400), (7, "train")).groups
        finally:
            assert wire.closed == bool(addresses), "whatever happens"
        return group.trajectories[0], wire, addresses[0]

    return played


def test_an_episode(play: Callable[..., Any]) -> None:
    replies = (OPENED, observation("go on", 0.25, False), observation("over", 1.0, True), STATE)
    trajectory, wire, address = play(RECORD | {"reset": {"start": 3}, "others": {"player": 1}}, *replies)
    assert address == "ws://127.0.0.1:8000/ws"
    reset, *steps, state, close = wire.sent
    assert reset["data"].pop("seed") in range(2**31)
    assert reset == {"type": "reset", "data": {"start": 3}}
    assert steps == [{"type": "step", "data": {"player": 1, "message": "on"}}] * 2
    assert (state, close) == ({"type": "state"}, {"type": "close"})
    assert trajectory.problem.question == "A game.\n\nCount down from 3."
    assert [(one.user, one.reward) for one in trajectory.exchanges] == [("go on", 0.25), (None, 1.0)]
    assert trajectory.exchanges[1].state == {"metadata": {}, "state": {"episode_id": "e", "step_count": 2}}
    assert (trajectory.grade.components["correctness"], trajectory.trainable) == (1.25, True)


def test_a_record_has_the_last_word_on_the_seed(play: Callable[..., Any]) -> None:
    _, wire, _ = play(RECORD | {"reset": {"seed": 5}}, OPENED, observation("over", 1.0, True), STATE)
    assert wire.sent[0]["data"] == {"seed": 5}


def test_an_observation_without_a_named_field_is_shown_whole(play: Callable[..., Any]) -> None:
    trajectory, _, _ = play(RECORD | {"shows": None}, OPENED, observation("over", 1.0, True), STATE)
    assert trajectory.problem.question == 'A game.\n\n{"said": "Count down from 3."}'


def test_steps_without_a_reward_have_the_one_that_the_record_says(play: Callable[..., Any]) -> None:
    replies = (OPENED, observation("go on", None, False), observation("over", 1.0, True), STATE)
    trajectory, _, _ = play(RECORD | {"reward_if_none": 0.5}, *replies)
    assert [one.reward for one in trajectory.exchanges] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("record", "replies", "said"),
    [
        # What the server makes of float("nan"), too.
        (
            {},
            [OPENED, observation("on", None, False)],
            "a step came without a reward, or with one that is not a number",
        ),
        ({}, [OPENED, observation("on", float("nan"), False)], "the reward nan, not a finite number"),
        ({}, [OPENED, observation("on", "much", False)], "the reward 'much', not a finite number"),  # type: ignore[arg-type]
        ({}, [OPENED, observation([{"role": "oracle", "content": "on"}], 0.0, False)], "the messages .*oracle"),
        ({}, [OPENED, fault("EXECUTION_ERROR", "no such number")], "with the error EXECUTION_ERROR: no such number"),
        ({}, [OPENED, "on"], "was not answered in the protocol of OpenEnv"),
        ({}, [STATE], "which is no observation"),
        ({}, [observation("over", 0.0, True)], "is done before the policy has said anything"),
        ({"shows": "text"}, [OPENED], "`shows` = 'text' is not in the observation"),
    ],
)
def test_mistakes_of_an_environment_stop_the_run(
    play: Callable[..., Any], record: dict[str, Any], replies: list[str], said: str
) -> None:
    with pytest.raises((UserCodeFailedError, TaskError), match=said):
        play(RECORD | record, *replies)


@pytest.mark.parametrize("key", ["url", "action"])
def test_a_record_without_what_a_connection_needs_is_refused(play: Callable[..., Any], key: str) -> None:
    with pytest.raises(UserError, match=f"`{key}` of a record for openenv"):
        play(RECORD | {key: ""})


@pytest.mark.parametrize(
    "reply",
    [ConnectionResetError("reset by peer"), fault("CAPACITY_REACHED", "64 sessions"), fault("SESSION_ERROR", "gone")],
)
def test_a_lost_server_masks_the_sample(play: Callable[..., Any], reply: Any) -> None:
    for replies in ([reply], [OPENED, reply]):
        trajectory, _, _ = play(RECORD, *replies)
        assert (trajectory.grade.failure, trajectory.trainable) == ("environment_error", False)
        assert "task openenv: " in trajectory.grade.reason


def test_a_password_is_kept_out_of_records(play: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="`url` of a record for openenv has a user or a password"):
        play(RECORD | {"url": "http://me:secret@127.0.0.1:8000"})
