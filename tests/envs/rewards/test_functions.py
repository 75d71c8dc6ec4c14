"""Reward functions in TRL's signature: what they are given, what becomes of what they return, and what stops a run."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reward_cases import PROBLEM, SORT, reward
from rollout.test_replay import trajectory_of
from scripted_engine import ScriptedEngine

from nmoe.envs.environment import Environment
from nmoe.envs.grade import COMPONENTS
from nmoe.envs.rewards.conversation import samples_of
from nmoe.envs.rewards.reward import RewardError
from nmoe.envs.rewards.rewards import rated
from nmoe.errors import UserError
from nmoe.rl.metrics import rollout_metrics
from nmoe.rollout.collector import Collector, GradingError, UserCodeFailedError
from nmoe.trajectory import Group
from nmoe.types import Sampling, TrainerState

Make = Callable[..., Environment]
Play = Callable[..., Group]
Module = Callable[[str], str]


def test_a_function_gets_what_trl_gives_and_its_values_are_weighed_into_the_score(
    environment: Make, play: Play, module: Module
) -> None:
    name = module("""
calls = []
def f(prompts, completions, **columns):
    calls.append((prompts, completions, columns))
    return [0.25 * len(completion[-1]["content"]) for completion in completions]
""")
    demo = environment(SORT + reward(f"{name}:f", weight=-2.0))
    group = play(demo, ["123", "9", None])
    ((prompts, completions, columns),) = importlib.import_module(name).calls
    assert prompts == [[{"role": "user", "content": "Sort: 312"}]] * 3
    said = [{"role": "assistant", "content": "123", "reasoning_content": "hm"}]
    assert completions == [said, [said[0] | {"content": "9"}], [{"role": "assistant", "content": ""}]]
    assert columns.pop("completion_ids") == [trajectory.token_ids for trajectory in group.trajectories]
    state = columns.pop("trainer_state")
    assert (state.global_step, state.max_steps) == (6, 100)
    assert columns == {"answer": ["123"] * 3, "tags": [["a", "b"]] * 3, "gold": ["123"] * 3, "difficulty": [3] * 3}
    grades = [trajectory.grade for trajectory in group.trajectories]
    assert [grade.components["mine"] for grade in grades] == [0.75, 0.25, 0.0]
    assert [grade.weights["mine"] for grade in grades] == [-2.0] * 3
    assert [grade.score for grade in grades] == [1.0 - 1.5, -0.5, 0.0]
    assert [grade.failure for grade in grades] == ["ok", "ok", "truncated"]
    for grade in grades:
        assert grade.components.keys() == grade.weights.keys() == {*COMPONENTS, "mine"}
    metrics = rollout_metrics(group.trajectories)
    assert metrics["reward/mine"] == pytest.approx(1 / 3)
    assert metrics["reward_left_out/mine"] == 0
    assert metrics["reward_mean"] == pytest.approx(-1 / 3)


def test_plain_text_goes_in_as_strings(environment: Make, module: Module, tokenizer: object) -> None:

    name = module(
        "def f(prompts, completions):\n    return [len(p) + 100 * len(c) for p, c in zip(prompts, completions)]\n"
    )
    demo = environment('format = "boxed"\nsystem = "Sort."\n' + SORT + reward(f"{name}:f"))
    ids = demo.grader.answer_ids(PROBLEM, "123")
    collector = Collector(ScriptedEngine(lambda _, index: ids), demo, 400)  # type: ignore[arg-type]
    (group,) = collector.collect([PROBLEM], 1, Sampling(60), (0,)).groups
    samples = samples_of(demo, group.trajectories, TrainerState())
    assert (samples.prompt, samples.completions) == ("Sort.\n\nSort: 312\n", [r"The answer follows. \boxed{123}"])
    assert group.trajectories[0].grade.components["mine"] == 17 + 100 * 31


def test_none_leaves_the_component_out_of_that_sample_alone(environment: Make, play: Play, module: Module) -> None:
    name = module("def f(completions, **_):\n    return [None, 2, True]\n")
    group = play(environment(SORT + reward(f"{name}:f")), ["123", "123", "9"])
    assert [t.grade.score for t in group.trajectories] == [1.0, 3.0, 1.0]
    assert [t.grade.components.get("mine") for t in group.trajectories] == [None, 2.0, 1.0]
    metrics = rollout_metrics(group.trajectories)
    assert (metrics["reward/mine"], metrics["reward_left_out/mine"]) == (1.5, pytest.approx(1 / 3))


def test_a_sample_that_no_reward_has_a_value_for_is_masked(environment: Make, play: Play, module: Module) -> None:
    name = module("def f(completions, **_):\n    return [None, 1.0]\n")
    group = play(environment(SORT + "[rubric]\ncorrectness = 0\n" + reward(f"{name}:f")), ["123", "9"])
    masked, judged = group.trajectories
    assert (masked.grade.failure, masked.trainable, judged.trainable) == ("grader_error", False, True)
    assert "mine returned None" in masked.grade.reason
    assert judged.grade.score == 1.0


def test_async_functions_run_side_by_side(environment: Make, play: Play, module: Module) -> None:
    name = module("""
import asyncio
async def slow(completions, **_):
    await asyncio.sleep(0.3)
    return [1.0] * len(completions)
class Judge:
    async def __call__(self, completions, **_):
        return await slow(completions)
judge = Judge()
""")
    demo = environment(SORT + reward(f"{name}:slow", "a") + reward(f"{name}:slow", "b") + reward(f"{name}:judge", "c"))
    began = time.perf_counter()
    (trajectory,) = play(demo, ["9"]).trajectories
    assert time.perf_counter() - began < 0.8
    assert [trajectory.grade.components[name] for name in "abc"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "said", "index"),
    [
        ("[1.0]", "returned 1 values for 2 completions, [1.0]", 0),
        ("[1.0] * 3", "returned 3 values for 2 completions", 0),
        ("[0.0, float('nan')]", "returned nan as value 2 of 2", 1),
        ("[float('inf'), 0.0]", "returned inf as value 1 of 2", 0),
        ("[0.0, 10**400]", "returned 1000000000", 1),
        ("[0.0, -10**5000]", "returned what cannot be shown (ValueError) as value 2 of 2; a reward is finite", 1),
        ("[0.0, 1e30]", "returned 1e+30 as value 2 of 2; a reward is finite and at most 1e+18", 1),
        ("[0.0, '1']", "returned '1', a str, as value 2 of 2", 1),
        ("[[0.0], 1]", "returned [0.0], a list, as value 1 of 2", 0),
        ("None", "returned None, a NoneType, for 2 completions", 0),
        ("0.5", "returned 0.5, a float, for 2 completions", 0),
        ("{'rewards': [0, 1]}", "a dict, for 2 completions", 0),
        ("1 / 0", "raised ZeroDivisionError: division by zero, at", 0),
    ],
)
def test_what_is_no_reward_stops_the_run_with_its_sample(
    environment: Make, play: Play, module: Module, tmp_path: Path, returned: str, said: str, index: int
) -> None:
    name = module(f"\n\ndef f(completions, **_):\n    return {returned}\n")
    with pytest.raises(UserCodeFailedError) as caught:
        play(environment(SORT + reward(f"{name}:f")), ["123", "9"])
    message = str(caught.value)
    assert said in message
    assert f"reward 'mine' ({tmp_path / name}.py:3, {name}:f)" in message
    assert "problem demo/0" in message
    assert isinstance(caught.value, UserError), "a command prints the message alone and exits with 2"
    assert isinstance(caught.value, GradingError), "the recipe saves the sample"
    trajectory = caught.value.trajectory
    assert (trajectory.index, trajectory.grade.failure) == (index, "grader_error")
    assert said in trajectory.grade.reason


def test_numbers_of_numpy_and_torch_are_numbers(environment: Make, play: Play, module: Module) -> None:
    name = module("""
import numpy, torch
def array(completions, **_):
    return numpy.array([0.5, 2.0], dtype=numpy.float32)
def tensor(completions, **_):
    return [torch.tensor([0.5]), torch.tensor(2)]
def scalar(completions, **_):
    return torch.tensor(2.0)
""")
    for function in ("array", "tensor"):
        group = play(environment(SORT + reward(f"{name}:{function}")), ["9", "9"])
        assert [t.grade.score for t in group.trajectories] == [0.5, 2.0]
    with pytest.raises(UserCodeFailedError, match="a Tensor, for 1 completions"):
        play(environment(SORT + reward(f"{name}:scalar")), ["9"])


def test_a_function_gets_the_arguments_it_names(environment: Make, play: Play, module: Module) -> None:
    name = module("def f(completions, answer, weight=3):\n    return [float(a) + weight for a in answer]\n")
    (trajectory,) = play(environment(SORT + reward(f"{name}:f")), ["9"]).trajectories
    assert trajectory.grade.components["mine"] == 126.0
    name = module("def f(completions, solution, **columns):\n    return [0]\n")


def test_a_column_that_the_record_lacks_is_named(environment: Make, play: Play, module: Module) -> None:
    name = module("def f(completions, solution, **columns):\n    return [0]\n")
    with pytest.raises(
        UserError, match=r"takes 'solution', and the problem's record has no such column; there are .*answer"
    ):
        play(environment(SORT + reward(f"{name}:f")), ["9"])


def test_an_async_function_that_is_late_or_has_nobody_to_ask_masks_its_group(
    environment: Make, play: Play, module: Module
) -> None:
    name = module("""
import asyncio
from nmoe.envs.rewards.reward import UnavailableError
async def late(completions, **_):
    await asyncio.sleep(30)
def alone(completions, **_):
    raise UnavailableError("the judge sleeps")
""")
    for function, reason in (("late", "took longer than its timeout_s = 0.1"), ("alone", "the judge sleeps")):
        group = play(environment(SORT + reward(f"{name}:{function}", timeout_s=0.1)), ["123", "9"])
        assert [t.grade.failure for t in group.trajectories] == ["grader_error"] * 2
        assert all(reason in t.grade.reason for t in group.trajectories)
        assert group.trainable == []
        assert "mine" not in group.trajectories[0].grade.components


def test_a_plain_function_that_hangs_stops_the_run(environment: Make, play: Play, module: Module) -> None:
    name = module("import time\ndef f(completions, **_):\n    time.sleep(3)\n")
    with pytest.raises(
        UserCodeFailedError, match=r"took longer than its timeout_s = 0\.1; raise the limit, or make it an"
    ):
        play(environment(SORT + reward(f"{name}:f", timeout_s=0.1)), ["123"])


def test_a_timeout_of_the_function_s_own_is_an_exception_like_any(
    environment: Make, play: Play, module: Module
) -> None:
    name = module("async def f(completions, **_):\n    raise TimeoutError('mine')\n")
    with pytest.raises(UserCodeFailedError, match="raised TimeoutError: mine"):
        play(environment(SORT + reward(f"{name}:f")), ["123"])


@pytest.mark.parametrize(
    ("source", "function", "said"),
    [
        ("def f(completions): ...\n", "g", "has no 'g'"),
        ("raise OSError('no')\n", "f", "importing .* failed: OSError: no"),
        ("def f(completions, /): ...\n", "f", "takes 'completions' by position alone"),
    ],
)
def test_a_function_that_is_not_there_ends_the_load(
    environment: Make, module: Module, source: str, function: str, said: str
) -> None:
    name = module(source)
    with pytest.raises(UserError, match=said):
        environment(SORT + reward(f"{name}:{function}"))


def test_settings_that_can_not_work_are_refused_with_their_line(environment: Make) -> None:
    with pytest.raises(UserError) as caught:
        environment(SORT + reward("no_colon") + reward("a:b", "format"))
    # Names that the program registered stand between the two parts.
    assert 'environment.toml:8: [rewards[0]] call = "no_colon": must be ' in str(caught.value)
    assert "a reward of your own as `package.module:Name`" in str(caught.value)
    assert 'environment.toml:10: [rewards[1]] name = "format": is a component of the rubric' in str(caught.value)
    with pytest.raises(UserError, match=r'toml:10: \[rewards\[1\]\] name = "mine": is used before'):
        environment(SORT + reward("a:b") + reward("a:b"))
    with pytest.raises(UserError, match="all weights are 0"):
        environment(SORT + "[rubric]\ncorrectness = 0\n" + reward("a:b", weight=0))


def test_columns_of_a_record_reach_the_function_whatever_their_type(
    environment: Make, play: Play, module: Module, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(
        '{"q": "Sort: 312", "a": "123", "rubric": {"points": [1, null]}, "gold": "mine"}\n'
    )
    name = module("""
def f(rubric, gold, q, **_):
    assert rubric == [{"points": [1, None]}] and gold == ["mine"] and q == ["Sort: 312"], (rubric, gold, q)
    return [1]
""")
    pool = '[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "sort"\nproblem_field = "q"\nanswer_field = "a"\n'
    demo = environment(pool + reward(f"{name}:f"))
    (problem,) = demo.pool.take(1)
    assert play(demo, ["123"], problem).trajectories[0].grade.score == 2.0
    assert environment(pool).pool.order.at(0).columns == {}, "nothing is kept that nobody reads"


def test_evaluations_do_not_ask(environment: Make, module: Module, harmony: object) -> None:

    name = module("def f(completions, **_):\n    raise AssertionError('asked')\n")
    demo = environment(SORT + reward(f"{name}:f"))
    engine = ScriptedEngine(lambda _, index: demo.grader.answer_ids(PROBLEM, "123"))
    (group,) = Collector(engine, demo, 400).collect([PROBLEM], 1, Sampling(60), (0,), state=None).groups  # type: ignore[arg-type]
    assert (group.trajectories[0].grade.score, group.trajectories[0].trainer_state) == (1.0, None)


def test_a_plain_function_has_one_caller_at_a_time(environment: Make, module: Module) -> None:
    name = module("""
import threading, time
inside, overlapped = threading.Lock(), []
def f(completions, **_):
    overlapped.append(not inside.acquire(blocking=False))
    time.sleep(0.03)
    inside.release()
    return [0.0]
""")
    demo = environment(SORT + reward(f"{name}:f", timeout_s=0.3))
    engine = ScriptedEngine(lambda *_: demo.grader.answer_ids(PROBLEM, "123"))
    collector = Collector(engine, demo, 400)  # type: ignore[arg-type]
    for batch in range(2):  # each has an event loop of its own
        assert len(collector.collect([PROBLEM] * 12, 1, Sampling(60), (batch,)).groups) == 12
    assert importlib.import_module(name).overlapped == [False] * 24


def test_a_group_whose_rewards_are_cancelled_leaves_nothing_running(environment: Make, module: Module) -> None:
    name = module("""
import asyncio
ended = []
async def slow(completions, **_):
    try:
        await asyncio.sleep(30)
    finally:
        ended.append(True)
async def wrong(completions, **_):
    await asyncio.sleep(0.05)
    return []
""")

    demo = environment(SORT + reward(f"{name}:slow", "a") + reward(f"{name}:wrong", "b"))
    trajectory = trajectory_of(demo, demo.grader.answer_ids(PROBLEM, "123"))
    with pytest.raises(RewardError, match="reward 'b'"):
        asyncio.run(rated(demo.rewards, samples_of(demo, [trajectory], TrainerState())))
    assert importlib.import_module(name).ended == [True]


def test_a_score_that_the_weights_make_infinite_stops_the_run(environment: Make, play: Play, module: Module) -> None:
    name = module("def f(completions, **_):\n    return [0.0, 1e18]\n")
    demo = environment(SORT + reward(f"{name}:f", weight=1e300) + reward(f"{name}:f", "other", weight=-1e300))
    with pytest.raises(UserCodeFailedError) as caught:
        play(demo, ["123", "9"])
    assert "1e+300 * 1e+18 (mine) + -1e+300 * 1e+18 (other) comes to nan; a score is finite" in str(caught.value)
    assert caught.value.trajectory.index == 1


def test_what_a_function_changes_nobody_else_sees(environment: Make, play: Play, module: Module) -> None:
    """Neither the other completions of the call, nor a later reward, nor the same record in a later epoch."""
    name = module("""
import copy
def spoil(prompts, completions, completion_ids, tags, **columns):
    tags[0].append("spoilt")
    prompts[0][0]["content"] = "spoilt"
    completions[0][-1]["content"] = "spoilt"
    completion_ids[0].clear()
    for value in columns.values():
        if isinstance(value, list):
            value.clear()
    return [float(len(tags[1]) + len(prompts[1][0]["content"]))] * len(prompts)
seen = []
def look(prompts, completions, completion_ids, **columns):
    columns.pop("trainer_state")
    seen.append(copy.deepcopy((prompts, completions, completion_ids, columns)))
    return [0.0] * len(prompts)
""")
    demo = environment(
        SORT + reward(f"{name}:look", "before") + reward(f"{name}:spoil") + reward(f"{name}:look", "after")
    )
    for _ in range(2):
        group = play(demo, ["123", "9"])
        assert [t.grade.components["mine"] for t in group.trajectories] == [2.0 + len("Sort: 312")] * 2
        assert all(trajectory.token_ids for trajectory in group.trajectories)
    seen = importlib.import_module(name).seen
    assert len(seen) == 4
    assert all(one == seen[0] for one in seen)
    assert seen[0][3]["tags"] == [["a", "b"]] * 2
    assert PROBLEM.columns == {"answer": "123", "tags": ["a", "b"]}
