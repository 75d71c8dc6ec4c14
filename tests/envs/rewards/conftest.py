"""Environments with rewards, played by an engine that answers by script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from reward_cases import PROBLEM
from scripted_engine import ScriptedEngine

from nmoe.envs.environment import Environment
from nmoe.rollout.collector import Collector
from nmoe.text.harmony import Harmony
from nmoe.trajectory import Group
from nmoe.types import Message, Problem, Sampling, TrainerState


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Writes a module of reward functions into the working directory; returns its name, of which no test has the same."""
    monkeypatch.chdir(tmp_path)
    name = "rewards_" + "".join(c if c.isalnum() else "_" for c in request.node.name)

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def play(harmony: Harmony) -> Callable[..., Group]:
    """Has a group of answers to PROBLEM sampled, graded and rewarded. None is an answer that is cut off."""

    def run(environment: Environment, answers: Sequence[str | None], problem: Problem = PROBLEM) -> Group:
        def script(_: object, index: int) -> list[int]:
            said = answers[index]
            if said is None:
                return harmony.tokenizer.encode("hm") * 200
            thought = Message("assistant", "hm", channel="analysis")
            return harmony.render_completion([thought, Message("assistant", said, channel="final")])

        collector = Collector(ScriptedEngine(script), environment, 400)  # type: ignore[arg-type]
        key, state = (0, "train", 7, 0), TrainerState(6, 100)
        return collector.collect([problem], len(answers), Sampling(150), key, state=state).groups[0]

    return run
