"""The packaged environment of agentic code: the policy reads, edits and runs the tests, and hidden tests judge what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import CONFIGS
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.rl.launch import train
from nmoe.rollout.collector import Collector
from nmoe.runs.ledger import read_metrics
from nmoe.sandbox.api import SandboxSetupError
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Message, Sampling

Play = Callable[[list[list[int]]], Trajectory]


@pytest.fixture
def play(tokenizer: Tokenizer) -> Play:
    """One trajectory on the problem of the median, turn by turn; its golds have all been graded by then."""

    def played(turns: list[list[int]]) -> Trajectory:
        environment = Environment.from_toml("code_fix", tokenizer)
        try:
            runtime = ToolRuntime(environment, SandboxSettings(level="landlock", warm=0))
        except SandboxSetupError as error:
            pytest.skip(f"the landlock level cannot be had here: {error}")
        problems = map(environment.pool.order.at, range(12))
        problem = next(one for one in problems if "median" in one.question)

        def script(request: Request, index: int) -> list[int]:
            return turns[int(request.request_id.rpartition("/")[2])]

        with runtime:
            collector = Collector(ScriptedEngine(script), environment, 16000, runtime.sandboxes)  # type: ignore[arg-type]
            (group,) = collector.collect([problem], 1, Sampling(6000), (7, "train", 0)).groups
        return group.trajectories[0]

    return played


def call(harmony: Harmony, name: str, **arguments: str) -> list[int]:
    message = Message("assistant", json.dumps(arguments), "commentary", recipient=f"functions.{name}")
    return harmony.render_completion([message])


RUN = "python -m unittest discover tests 2>&1 | tail -3"


def test_a_bug_is_found_fixed_and_judged_by_hidden_tests(play: Play, harmony: Harmony) -> None:
    done = harmony.render_completion([Message("assistant", "The two middle values.", channel="final")])
    look, run = call(harmony, "read", path="lib/stats.py"), call(harmony, "bash", script=RUN)
    old, new = "ordered[middle] + ordered[middle + 1]", "ordered[middle - 1] + ordered[middle]"
    fix = call(harmony, "edit", path="lib/stats.py", old=old, new=new)
    trajectory = play([look, run, fix, run, done])
    assert [event.failure for event in trajectory.tool_events] == ["ok"] * 4
    assert old in trajectory.tool_events[0].output
    assert "FAILED" in trajectory.tool_events[1].output
    assert "OK" in trajectory.tool_events[3].output
    grade = trajectory.grade
    assert (grade.failure, grade.extras["correctness"], grade.extras["tool_use_ok"]) == ("ok", 1.0, 1.0)
    # The first stage of the curriculum: the form is what pays.
    assert grade.score == grade.weights["format"] + grade.weights["structure"]
    assert grade.weights["correctness"] == 0


def test_changing_the_tests_fixes_nothing(play: Play, harmony: Harmony) -> None:
    done = harmony.render_completion([Message("assistant", "They pass.", channel="final")])
    spoil = call(harmony, "bash", script="echo > tests/test_stats.py; rm -rf tests; cat tests/test_stats.py | head -1")
    trajectory = play([spoil, done])
    assert "import unittest" in trajectory.tool_events[0].output
    assert trajectory.grade.extras["correctness"] == 0.0
    assert trajectory.grade.verdict is not None
    assert trajectory.grade.verdict.outcome == "incorrect"


def test_the_packaged_config_runs(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer.save(tmp_path / "tokenizer")
    overrides = {
        "run.directory": tmp_path,
        "run.steps": 1,
        "optimizer.warmup_steps": 0,
        "model.tokenizer": tmp_path / "tokenizer",
        "sampling.max_new_tokens": 4,
        "batch.prompts_per_step": 1,
        "batch.group_size": 2,
        "sandbox.level": "landlock",
        "sandbox.warm": 0,
    }
    config = load_run(CONFIGS / "code_fix.toml", RLConfig, [f"--{key}={value}" for key, value in overrides.items()])
    (row,) = read_metrics(train(config))
    assert (row["step"], row["correctness"]) == (1, 0.0)
