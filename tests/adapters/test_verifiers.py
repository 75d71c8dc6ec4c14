"""Environments of nmoe in verifiers, whose classes are stood for here. The packages themselves: `.ci/in_verifiers.py`."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import pydantic
import pytest
from test_shared import by_word, capitals

from nmoe.adapters.environment import SharedEnvironment, shared_by_name
from nmoe.errors import UserError

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")


class Message(pydantic.BaseModel):
    role: str = "assistant"
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Rubric:
    def __init__(self, funcs: list[Any], weights: list[float]) -> None:
        self.funcs, self.weights = list(funcs), list(weights)

    def add_metric(self, function: Any) -> None:
        self.funcs.append(function)
        self.weights.append(0.0)


class Old:
    """What the adapter uses of `MultiTurnEnv` in 0.3.1."""

    def __init__(self, rubric: Rubric, tool_defs: Any, dataset: Any, eval_dataset: Any = None, **more: Any) -> None:
        self.rubric, self.tool_defs, self.dataset, self.eval_dataset = rubric, tool_defs, dataset, eval_dataset

    async def rollout(self, row: Any, turns: list[Message], cut: bool = False) -> Any:
        """As `MultiTurnEnv.rollout` does; the model's turns are given, and no more are sampled than there are."""
        state: Any = {"prompt": row["prompt"], "info": row["info"], "trajectory": []}
        try:
            state = await self.setup_state(state)  # type: ignore[attr-defined]
            messages = list(state["prompt"])
            for turn in turns:
                state["trajectory"].append({"is_truncated": cut})
                messages.append(turn)
                messages += await self.env_response(messages, state)  # type: ignore[attr-defined]
                if state.get("final_env_response") is not None:
                    break
        finally:
            await self.grade_the_rest(state)  # type: ignore[attr-defined]
        state["messages"] = messages
        return state


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake: Any = types.ModuleType("verifiers")
    fake.Environment, fake.MultiTurnEnv, fake.Rubric = object, Old, Rubric
    fake.cleanup = lambda priority: lambda function: function
    monkeypatch.setitem(sys.modules, "verifiers", fake)
    monkeypatch.delitem(sys.modules, "nmoe.adapters.verifiers_v0", raising=False)
    return importlib.import_module("nmoe.adapters.verifiers_v0")


def rewards(env: Any, state: Any) -> dict[str, float]:
    return {one.__name__: asyncio.run(one(state)) for one in env.rubric.funcs}


def test_the_old_form_plays_turns_and_tools(old: Any) -> None:
    env = old.load_environment("guess", count=2, eval_count=1)
    assert (len(env.dataset), len(env.eval_dataset)) == (2, 1)
    row = env.dataset[0]
    gold = shared_by_name("guess").problem(row["info"]["label"]).gold
    low = Message(content=str(int(gold) - 1))
    state = asyncio.run(env.rollout(row, [low, Message(content=gold)]))
    assert state["messages"][2] == {"role": "user", "content": "higher"}
    assert rewards(env, state)["score"] == pytest.approx(1.4)
    assert rewards(env, state)["correctness"] == 1.0
    assert env.rubric.weights == [1.0] + [0.0] * (len(env.rubric.funcs) - 1)
    # A limit of verifiers has ended it after the first guess, and the second was cut.
    assert rewards(env, asyncio.run(env.rollout(row, [low])))["score"] == 0.0
    assert rewards(env, asyncio.run(env.rollout(row, [Message(content=gold)], cut=True)))["score"] == 0.0

    env = old.load_environment("tools", count=1)
    assert [one["name"] for one in env.tool_defs] == ["python"]
    problem = shared_by_name("tools").problem(env.dataset[0]["info"]["label"])
    code = json.dumps({"code": f"print({problem.question.removeprefix('Add: ')})"})
    call = Message(tool_calls=[{"id": "call_7", "name": "python", "arguments": code}])
    state = asyncio.run(env.rollout(env.dataset[0], [call, Message(content=problem.gold)]))
    assert state["messages"][2] == {
        "role": "tool",
        "name": "python",
        "content": f"{problem.gold}\n",
        "tool_call_id": "call_7",
    }
    assert rewards(env, state)["tool_use"] == 1.0


def test_a_grader_that_raises_ends_the_rollout(old: Any) -> None:
    with SharedEnvironment(capitals()) as shared:
        row = {"prompt": [], "info": {"label": by_word(shared)["bug"]}}
        env = old.NmoeEnv(shared, opens_reasoning=False, dataset=[row])
        with pytest.raises(UserError, match="the grader has a bug"):
            asyncio.run(env.rollout(row, [Message(content="BUG")]))


class NewConfig(pydantic.BaseModel):
    task: Any = None


class NewTask(Generic[A, B, C]):
    def __init__(self, data: Any, config: Any) -> None:
        self.data = data


class NewTaskset(Generic[A, B]):
    def __init__(self, config: Any) -> None:
        self.config = config


class NewEnv(Generic[A]):
    pass


class Data(pydantic.BaseModel):
    name: str
    prompt: Any
    system_prompt: str | None = None


class Trace:
    def __init__(self) -> None:
        self.is_truncated = self.has_error = False
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    def record_reward(self, name: str, value: float, weight: float) -> None:
        self.rewards[name] = value * weight

    def record_metrics(self, values: dict[str, float]) -> None:
        self.metrics |= values


class Player:
    """An agent whose turns are given; the run is over where there are no more."""

    def __init__(self, turns: list[str]) -> None:
        self.turns, self.heard, self.trace = list(turns), list[Any](), Trace()

    def interaction(self, task: Any) -> Player:
        return self

    async def __aenter__(self) -> Player:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def turn(self, messages: Any = None) -> Any:
        self.heard.append(messages)
        over = not self.turns
        said = [] if over else [Message(content=self.turns.pop(0))]
        return types.SimpleNamespace(terminated=over, messages=said)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake: Any = types.ModuleType("verifiers.v1")
    fake.TasksetConfig = fake.EnvConfig = fake.AgentConfig = fake.TaskConfig = NewConfig
    fake.Task, fake.TaskData, fake.State, fake.Taskset, fake.Env = NewTask, Data, object, NewTaskset, NewEnv
    package: Any = types.ModuleType("verifiers")
    package.v1 = fake
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", fake)
    monkeypatch.delitem(sys.modules, "nmoe.adapters.verifiers_v1", raising=False)
    yield importlib.import_module("nmoe.adapters.verifiers_v1")
    sys.modules.pop("nmoe.adapters.verifiers_v1", None)


def played(new: Any, task: Any, turns: list[str]) -> Player:
    player = Player(turns)
    asyncio.run(new.NmoeEnv().run(task, types.SimpleNamespace(player=player)))
    return player


def test_the_new_form_plays_turns_and_tools(new: Any) -> None:
    taskset = new.NmoeTaskset(new.NmoeConfig(environment="guess", split="eval"))
    assert taskset.INFINITE
    task = next(iter(taskset.load()))
    assert task.data.prompt.startswith("Guess: ")
    gold = shared_by_name("guess").problem(task.data.label).gold
    player = played(new, task, [str(int(gold) - 1), gold])
    assert player.heard == [None, [{"role": "user", "content": "higher"}]]
    assert player.trace.rewards == {"guess": pytest.approx(1.4)}
    assert player.trace.metrics["correctness"] == 1.0
    assert played(new, task, []).trace.rewards == {"guess": 0.0}

    task = next(iter(new.NmoeTaskset(new.NmoeConfig(environment="tools")).load()))
    assert '"name": "python"' in task.data.system_prompt
    gold = shared_by_name("tools").problem(task.data.label).gold
    call = json.dumps({"name": "python", "arguments": {"code": f"print({task.data.prompt.removeprefix('Add: ')})"}})
    player = played(new, task, [f"<tool_call>\n{call}\n</tool_call>", gold])
    assert player.heard[1] == [{"role": "user", "content": f"<tool_response>\n{gold}\n\n</tool_response>"}]
    assert player.trace.metrics["tool_use"] == 1.0


def test_a_taskset_without_an_environment_is_refused(new: Any) -> None:
    with pytest.raises(UserError, match=r"--env\.taskset\.environment NAME"):
        new.NmoeTaskset(new.NmoeConfig())
