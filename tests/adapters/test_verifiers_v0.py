"""Limits of verifiers before 0.4, by a stand-in for the package: `.ci/in_verifiers.py` plays with the package itself."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from nmoe.adapters.environment import shared_by_name


class Rubric:
    def __init__(self, funcs: Any, weights: Any) -> None:
        pass

    def add_metric(self, function: Any) -> None:
        pass


class MultiTurnEnv:
    def __init__(self, **more: Any) -> None:
        self.max_turns = more["max_turns"]

    async def rollout(self, label: str, replies: list[Any]) -> dict[str, Any]:
        """The package's order: it looks whether the turns are used up before it has the environment answer the last one."""
        state: dict[str, Any] = {"info": {"label": label}, "trajectory": []}
        state = await self.setup_state(state)  # type: ignore[attr-defined]
        while state.get("final_env_response") is None and len(state["trajectory"]) < self.max_turns:
            if state["trajectory"]:
                await self.env_response(state["trajectory"][-1]["completion"], state)  # type: ignore[attr-defined]
                if state.get("final_env_response") is not None:
                    break
            said, cut = replies[len(state["trajectory"])]
            completion = [{"role": "assistant", "content": said}]
            state["trajectory"].append({"completion": completion, "is_truncated": cut})
        await self.grade_the_rest(state)  # type: ignore[attr-defined]
        return state


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = ModuleType("verifiers")
    parts = {
        "Rubric": Rubric,
        "MultiTurnEnv": MultiTurnEnv,
        "Environment": object,
        "cleanup": lambda **_: lambda one: one,
    }
    vars(package).update(parts)
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.delitem(sys.modules, "nmoe.adapters.verifiers_v0", raising=False)
    yield importlib.import_module("nmoe.adapters.verifiers_v0")
    del sys.modules["nmoe.adapters.verifiers_v0"]


def test_the_last_turn_before_a_limit_is_graded(adapter: Any) -> None:
    def score(name: str, most: int, replies: list[Any], **more: Any) -> tuple[float, str]:
        shared = shared_by_name(name)
        env = adapter.load_environment(name, count=1, max_turns=most, **more)
        label = shared.rows(1)[0]["label"]
        gold = shared.problem(label).gold
        said = [(text.replace("GOLD", gold).replace("LOW", str(int(gold) - 1)), cut) for text, cut in replies]
        state = asyncio.run(env.rollout(label, said))
        assert state["nmoe"] is None
        return asyncio.run(adapter.score(state)), state["nmoe_grade"].failure

    assert score("word_problems", 1, [("GOLD", False)]) == (1.1, "ok")
    assert score("word_problems", 5, [("GOLD", False)]) == (1.1, "ok")
    assert score("word_problems", 1, [("GOLD", True)]) == (0.0, "truncated")
    assert score("word_problems", 1, [("so</think>GOLD", False)], opens_reasoning=True) == (1.1, "ok")
    right, _ = score("guess", 2, [("LOW", False), ("GOLD", False)])
    assert right == score("guess", 5, [("LOW", False), ("GOLD", False)])[0] > 1
    # An episode that wanted more is cut.
    assert score("guess", 1, [("LOW", False)])[1] == "truncated"
