"""Prompts without a right answer: no verdict, rewards alone, and nothing that counts right ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.envs.check import check_environment
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.evaluate import refuse_open_problems
from nmoe.rl.group_rewards import GroupRewards, joined
from nmoe.rl.metrics import rollout_metrics
from nmoe.rollout.collector import Collector
from nmoe.types import Sampling

Make = Callable[..., Environment]

POOL = '[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "open"\n'
REWARD = '[[rewards]]\nname = "long"\ntype = "function"\ncall = "open_rewards:long"\n'


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": "Say something.", "style": "plain"}, {"prompt": [{"role": "user", "content": "Go on."}]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "open_rewards.py").write_text(
        "def long(completions, **_):\n    return [len(c[-1]['content']) for c in completions]\n"
    )
    return tmp_path


@pytest.mark.usefixtures("prompts")
def test_an_open_problem_has_rewards_and_no_verdict(environment: Make) -> None:
    demo = environment(POOL + REWARD)
    assert demo.pool.order.read_as.endswith("data.jsonl: question from 'prompt'")
    problem = demo.pool.order.at(0)
    assert problem.gold == ""
    engine = ScriptedEngine(lambda *_: demo.grader.answer_ids(problem, "something"))
    (group,) = Collector(engine, demo, 400).collect([problem], 1, Sampling(60), (0,)).groups  # type: ignore[arg-type]
    grade = group.trajectories[0].grade
    assert (grade.verdict, grade.failure, grade.answer) == (None, "ok", "something")
    assert (grade.components["format"], grade.components["long"], grade.score) == (1.0, 9.0, 9.0)
    assert not {"correctness", "efficiency"} & grade.components.keys(), "it is not wrong"
    metrics = rollout_metrics(group.trajectories)
    assert metrics["reward_mean"] == 9.0
    assert not [name for name in metrics if "correct" in name or "wrong" in name]


def test_a_sample_without_a_reward_is_in_no_baseline(prompts: Path, environment: Make) -> None:
    (prompts / "some_rewards.py").write_text("def some(completions, **_):\n    return [None, 1, 2, None]\n")
    some = REWARD.replace("open_rewards:long", "some_rewards:some")
    demo = environment(POOL + some)
    problem = demo.pool.order.at(0)
    engine = ScriptedEngine(lambda *_: demo.grader.answer_ids(problem, "something"))
    (group,) = Collector(engine, demo, 400).collect([problem], 4, Sampling(60), (0,)).groups  # type: ignore[arg-type]
    assert [t.grade.failure for t in group.trajectories] == ["grader_error", "ok", "ok", "grader_error"]
    metrics = rollout_metrics(group.trajectories)
    assert (metrics["reward_mean"], metrics["grader_error_rate"]) == (1.5, 0.5)
    for algorithm in (AlgorithmSection(), AlgorithmSection(advantage="grpo", multi_reward="gdpo")):
        rewards_BR, _ = joined([GroupRewards(algorithm, 60).of(group)])
        assert rewards_BR[:, -1].tolist() == [1.0, 2.0]
    # A weighed format is a value that every sample has.
    formed = environment(POOL + "[rubric]\nformat = 0.5\n" + some)
    (group,) = Collector(engine, formed, 400).collect([problem], 4, Sampling(60), (0,)).groups  # type: ignore[arg-type]
    assert [t.grade.score for t in group.trajectories] == [0.5, 1.5, 2.5, 0.5]


@pytest.mark.usefixtures("prompts")
def test_what_nothing_could_reward_is_refused(environment: Make) -> None:
    for nothing in ("", "[rubric]\nefficiency = 1\n", REWARD + "weight = 0\n"):
        with pytest.raises(UserError, match=r"environment.toml:\d+: \[task_pool\]: open problems have no right answer"):
            environment(POOL + nothing)
    assert environment(POOL + "[rubric]\nformat = 1\n").pool.size == 2
    stages = 'name = "a"\nweights = { format = 1.0 }\ngate = { metric = "correctness", at_least = 0.5 }\n'
    last = '[[curriculum.stages]]\nname = "b"\nweights = { format = 1.0 }\n'
    with pytest.raises(UserError, match="open problems have no right answer, so it would never open"):
        environment(POOL + "[[curriculum.stages]]\n" + stages + last)


@pytest.mark.usefixtures("prompts")
def test_no_rate_of_right_ones_is_reported(environment: Make) -> None:
    with pytest.raises(UserError, match="'demo' has open problems, which have no right answer"):
        refuse_open_problems(environment(POOL + REWARD))
    refuse_open_problems(environment('[task_pool]\ntype = "generated"\ntask_type = "sort"\n'))


def test_the_check_of_an_environment_shows_the_prompt_and_grades_nothing(prompts: Path) -> None:
    (prompts / "environment.toml").write_text(f'env_id = "demo"\n{POOL}{REWARD}')
    lines = list(check_environment(prompts / "environment.toml", None))
    assert lines[-2:] == ["", "ok"]
    assert (
        f"reward       long: open_rewards:long, defined in {prompts / 'open_rewards.py'}, not imported: `nmoe preflight` calls it"
        in lines
    )
    assert "reward       1 correctness + 1 long" in lines
    assert any(line.startswith("records      ") and line.endswith("question from 'prompt'") for line in lines)
    assert any("open, so that no answer to it is right or wrong" in line for line in lines)
    assert any("Say something." in line or "Go on." in line for line in lines)
    (prompts / "open_rewards.py").write_text("raise AssertionError('imported')\n")
    with pytest.raises(UserError, match="has no function 'long'"):
        list(check_environment(prompts / "environment.toml", None))
