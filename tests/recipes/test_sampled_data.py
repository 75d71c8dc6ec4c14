"""Data from a policy's samples: preference pairs and solve rates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tiny_models import DENSE

from nmoe.cli.data import solve_rates
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.recipes.sampled_data import _pair, with_rates
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
        grade = asyncio.run(environment.grader.grade(SORT, turn, 40))
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


RECORDS = [{"problem": f"Sort: {digits}", "answer": "12", "origin": digits} for digits in ("21", "12", "0012")]
POOL = 'env_id = "p"\n[task_pool]\ntype = "jsonl"\npath = "records.jsonl"\ntask_type = "sort"\n'


@pytest.fixture
def pool_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.chdir(tmp_path)
    Path("records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    Path("mine.toml").write_text(POOL)
    return Tokenizer.train(["Sort: 12 assistant final"] * 3, 300)


def test_a_record_gets_the_share_of_its_right_samples(pool_tokenizer: Tokenizer) -> None:
    environment, harmony = Environment.from_toml(Path("mine.toml"), pool_tokenizer), Harmony(pool_tokenizer)
    answers = {"Sort: 21": ["12", "21", "12", "12"], "Sort: 0012": ["2", "12", "1", "21"], "Sort: 12": ["0"] * 4}
    groups = []
    for problem in environment.pool.take(3):
        trajectories = []
        for index, answer in enumerate(answers[problem.question]):
            turn = single_turn(harmony.render_completion([Message("assistant", answer, channel="final")]))
            grade = asyncio.run(environment.grader.grade(problem, turn, 40))
            trajectories.append(Trajectory(problem, index, (0,), turn, grade, Sampling(40)))
        groups.append(Group(problem, trajectories))
    rated = list(with_rates(RECORDS, groups))
    assert rated == [record | {"solve_rate": rate} for record, rate in zip(RECORDS, (0.75, 0.0, 0.25), strict=True)]
    Path("records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rated))
    Path("mine.toml").write_text(POOL + 'easy_first = "-solve_rate"\n')
    ordered = Environment.from_toml(Path("mine.toml"), pool_tokenizer).pool.take(3)
    assert [problem.question for problem in ordered] == ["Sort: 21", "Sort: 0012", "Sort: 12"]


def test_the_command_writes_every_record_of_the_pool(
    pool_tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    pool_tokenizer.save(base)
    config = ModelConfig(**DENSE | {"vocab_size": pool_tokenizer.vocab_size})
    save_model(Transformer(config).initialize(0), base)
    # documented: nmoe data solve-rates runs/base mine.toml rated.jsonl --samples 8
    solve_rates(base, Path("mine.toml"), Path("rated.jsonl"), samples=2, device="cpu")
    assert capsys.readouterr().out.endswith("rated.jsonl: 3 of 3 records, solved in 0.0% of 2 samples each\n")
    written = [json.loads(line) for line in Path("rated.jsonl").read_text().splitlines()]
    assert written == [record | {"solve_rate": 0.0} for record in RECORDS]
    with pytest.raises(UserError, match='this pool is of type "generated"; write its records to a file'):
        solve_rates(base, Path("sort"), Path("rated.jsonl"))
