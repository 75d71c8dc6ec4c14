"""Pairs from graded samples: which samples make one, and that its record can be read again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nmoe.envs.environment import Environment
from nmoe.recipes.sampled_pairs import _pair
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Message, Problem, Sampling, single_turn

SORT = Problem("sort/0", "sort", "Sort: 21", "12", "sort")
ENVIRONMENT = 'env_id = "p"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\ndifficulty = [4, 4]\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["Sort: 12 assistant final"] * 3, 300)


def pair(tokenizer: Tokenizer, tmp_path: Path, *samples: tuple[str | None, str]) -> list[dict[str, object]]:
    """What becomes of samples of these thoughts and answers; without a thought, the answer alone."""
    (tmp_path / "e.toml").write_text(ENVIRONMENT)
    environment, harmony = Environment.from_toml(tmp_path / "e.toml", tokenizer), Harmony(tokenizer)
    trajectories = []
    for index, (thought, answer) in enumerate(samples):
        messages = [] if thought is None else [Message("assistant", thought, channel="analysis")]
        channel = "final" if answer else "analysis"
        turn = single_turn(harmony.render_completion([*messages, Message("assistant", answer, channel=channel)]))
        grade = asyncio.run(environment.grade(SORT, turn, 40))
        trajectories.append(Trajectory(SORT, index, (0,), turn, grade, Sampling(40)))
    return list(_pair(environment, Group(SORT, trajectories)))


def test_the_first_right_one_is_preferred_to_the_first_wrong_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    samples = [("down", "21"), ("up", "12"), ("no", "2"), (None, "12")]
    assert pair(tokenizer, tmp_path, *samples) == [
        {
            "problem": "sort/0",
            "prompt": [{"role": "user", "content": "Sort: 21"}],
            "chosen": [
                {"role": "assistant", "content": "up", "channel": "analysis"},
                {"role": "assistant", "content": "12", "channel": "final"},
            ],
            "rejected": [
                {"role": "assistant", "content": "down", "channel": "analysis"},
                {"role": "assistant", "content": "21", "channel": "final"},
            ],
        }
    ]


@pytest.mark.parametrize(
    "samples",
    [
        [("up", "12"), (None, "12")],  # all right
        [("up", "12"), ("down", "")],  # the other is out of form
        [("up", "12"), (" ", "21")],  # a message that says nothing is no record
    ],
)
def test_no_pair(samples: list[tuple[str | None, str]], tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert pair(tokenizer, tmp_path, *samples) == []
