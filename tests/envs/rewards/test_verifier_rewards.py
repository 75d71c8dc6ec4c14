"""Verifiers as rewards: what they are asked, where their steps end among the tokens, and what an empty answer earns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import SORT

from nmoe.envs.environment import Environment
from nmoe.envs.rewards.scored import attach_scorers, step_ends
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.trajectory import Group
from nmoe.types import Message

REWARD = '[[rewards]]\nname = "checked"\ntype = "verifier"\npath = "runs/verifier"\nweight = 0.5\nsteps = STEPS\n'


class Checker:
    """Scores by the number of digits."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], object]] = []

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        self.asked.append(([message.content for message in messages], answer))
        return len(answer) / 100

    async def step_scores(self, messages: Sequence[Message], steps: Sequence[str]) -> list[float]:
        return [len(step) / 10 for step in steps]


@pytest.mark.parametrize("steps", [False, True])
def test_answers_and_steps_are_rewarded(
    environment: Callable[..., Environment], play: Callable[..., Group], steps: bool
) -> None:
    checker, loaded = Checker(), list[Path]()

    def load(path: Path) -> Checker:
        loaded.append(path)
        return checker

    demo = environment(SORT + REWARD.replace("STEPS", str(steps).lower()))
    attach_scorers(demo.rewards, load, load, load)
    group = play(demo, ["12\n\n 345 ", "1", None])
    assert loaded == [Path("runs/verifier")] * (1 + steps)
    assert checker.asked == [(["Sort: 312"], "12\n\n 345 "), (["Sort: 312"], "1")]
    grades = [trajectory.grade for trajectory in group.trajectories]
    assert [grade.components["checked"] for grade in grades] == pytest.approx([0.09, 0.01, 0.0])
    assert [grade.weights["checked"] for grade in grades] == [0.5] * 3
    if not steps:
        assert [grade.step_rewards for grade in grades] == [()] * 3
        return
    assert [[score for _, score in grade.step_rewards] for grade in grades] == [[0.2, 0.3], [0.1], []]
    for trajectory, last in zip(group.trajectories, (["12", "345"], ["1"]), strict=False):
        texts = [demo.tokenizer.decode(trajectory.token_ids[: place + 1]) for place, _ in trajectory.grade.step_rewards]
        assert [text.rpartition("\n")[2].rpartition(">")[2].strip() for text in texts] == last


def test_a_reward_model_rewards_answers_and_silence_earns_the_least(
    environment: Callable[..., Environment], play: Callable[..., Group]
) -> None:
    checker = Checker()

    def load(path: Path) -> Checker:
        assert path == Path("runs/reward")
        return checker

    def refuse(path: Path) -> Checker:
        raise AssertionError("not a verifier")

    text = '[[rewards]]\nname = "liked"\ntype = "reward_model"\npath = "runs/reward"\nweight = 0.5\n'
    demo = environment(SORT + text)
    attach_scorers(demo.rewards, refuse, refuse, load)
    group = play(demo, ["12345", None, "123"])
    assert checker.asked == [(["Sort: 312"], "12345"), (["Sort: 312"], "123")]
    grades = [trajectory.grade for trajectory in group.trajectories]
    assert [grade.components["liked"] for grade in grades] == pytest.approx([0.05, 0.03, 0.03])
    # Correctness has its own weight of 1 beside it.
    assert [grade.score - grade.components["correctness"] for grade in grades] == pytest.approx([0.025, 0.015, 0.015])
    silent = play(demo, [None, None])
    assert all("liked" not in trajectory.grade.components for trajectory in silent.trajectories)


@given(st.lists(st.text("ab é😀1", min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=5))
def test_a_step_ends_where_its_text_is_complete(steps: list[str]) -> None:
    steps = [step.strip() for step in steps]
    tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
    answer = "\n".join(steps)
    ids = [*tokenizer.encode("thought ab 1 "), *tokenizer.encode(answer), tokenizer.special_id("<|return|>")]
    places = step_ends(tokenizer.decode, ids, answer, steps)
    assert places == sorted(set(places))
    for count, place in enumerate(places, start=1):
        said = "thought ab 1 " + "\n".join(steps[:count])
        assert tokenizer.decode(ids[: place + 1]) == said
