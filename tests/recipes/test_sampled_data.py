"""Data from recipes: preference pairs and solve rates from samples, and the masks of `nmoe data export`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from tiny_models import DENSE

from nmoe.cli.data import solve_rates
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import read_examples
from nmoe.data.show import export_masked
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.recipes.sampled_data import _pair, with_rates
from nmoe.recipes.sft import example_batch
from nmoe.text.harmony import Harmony
from nmoe.text.renderers import RenderFormat, make_renderer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
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


CHAT = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "6 * 7?"},
            {"role": "assistant", "content": "42", "reasoning": "7 sixes are 42."},
            {"role": "user", "content": "And 6 * 8?"},
            {"role": "assistant", "content": "48"},
        ]
    },
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi " * 200}]},
]
PAIRS = [{"prompt": "6 * 7?", "completion": "42"}, {"prompt": "1 + 1?", "completion": "It is 2."}]
TEXTS = [{"text": "Once upon a time."}, {"text": "The end."}]


@pytest.mark.parametrize(
    ("rows", "form"),
    [(CHAT, "harmony"), (PAIRS, "harmony"), (PAIRS, "text"), (TEXTS, "auto")],
)
def test_what_is_exported_is_what_is_trained(tmp_path: Path, rows: list[object], form: RenderFormat) -> None:
    """The loss that transformers computes of a line, labels shifted by one, is over the targets of SFT's batch."""
    file, out = tmp_path / "train.jsonl", tmp_path / "out/masked.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DatasetSettings(path=str(file))
    list(export_masked(settings, out, None, form, 300))
    lines = [json.loads(line) for line in out.open()]

    tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
    examples = read_examples(settings, make_renderer(tokenizer, form), tokenizer, 300)
    batch = example_batch([examples[index] for index in range(len(examples))])
    assert list(batch.lengths) == [len(line["input_ids"]) - 1 for line in lines]
    inputs = torch.tensor([token for line in lines for token in line["input_ids"][:-1]])
    shifted = torch.tensor([label for line in lines for label in line["labels"][1:]])
    mask = torch.tensor([one for line in lines for one in line["loss_mask"][1:]], dtype=torch.bool)
    assert torch.equal(inputs, batch.inputs_T)
    assert torch.equal(mask, batch.scored_T)
    assert torch.equal(shifted[mask], batch.targets_T[batch.scored_T])
    assert torch.equal(shifted == -100, ~mask)
    for line in lines:
        assert len(line["input_ids"]) == len(line["labels"]) == len(line["loss_mask"])
        assert (line["labels"][0], line["loss_mask"][0]) == (-100, 0)
    learned = sum(sum(line["loss_mask"]) for line in lines)
    assert learned == examples.learned > 0
    if rows is CHAT:
        assert examples.overlong == [f"{file}:2"]


def test_a_completion_by_hand(tmp_path: Path) -> None:
    """Of a prompt and its completion as plain text, the bytes of the completion and the end of the text are learned."""
    file, out = tmp_path / "train.jsonl", tmp_path / "masked.jsonl"
    file.write_text('{"prompt": "ab", "completion": "cd"}\n')
    notes = list(export_masked(DatasetSettings(path=str(file)), out, None, "text", None))
    tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
    a, b, c, d = (tokenizer.encode(letter)[0] for letter in "abcd")
    end = tokenizer.special_id("<|endoftext|>")
    assert json.loads(out.read_text()) == {
        "input_ids": [a, b, c, d, end],
        "labels": [-100, -100, c, d, end],
        "loss_mask": [0, 0, 1, 1, 1],
    }
    assert notes[-1] == f"{out}: 1 sequences"


def test_a_bad_record_leaves_no_file(tmp_path: Path) -> None:
    file, out = tmp_path / "train.jsonl", tmp_path / "masked.jsonl"
    file.write_text('{"prompt": "ab", "completion": "cd"}\n{"prompt": "ab"}\n')
    with pytest.raises(UserError, match=r"train.jsonl:2: .* has 'completion'"):
        list(export_masked(DatasetSettings(path=str(file)), out, None, "text", None))
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize(
    "path", ["{}/data.jsonl", "{}/data.jsonl@[:1]", "{}", "{}/*.jsonl", "{}/*.jsonl@[:1]", "{}/**/*.jsonl"]
)
def test_what_is_read_is_not_written_over(tmp_path: Path, path: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(TEXTS[0]) + "\n")
    settings = DatasetSettings(path=path.format(tmp_path))
    with pytest.raises(UserError, match=r"data.jsonl: is among the files that are read, .*; name another file"):
        list(export_masked(settings, file, None, "auto", None))
    assert file.read_text() == json.dumps(TEXTS[0]) + "\n"
    if "*" in path:
        with pytest.raises(UserError, match=r"new.jsonl: is among the files that are read"):
            list(export_masked(settings, tmp_path / "new.jsonl", None, "auto", None))
        out = tmp_path / "new.masked"
        list(export_masked(settings, out, None, "auto", None))
        assert out.exists(), "the pattern does not stand for it"
