"""Preference pairs as tokens: what each side holds, what is left out and counted, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.pairs import Pairs, answer_pair, completion_pair, read_pairs
from nmoe.errors import UserError
from nmoe.text.renderers import make_renderer
from nmoe.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["Sort: 12 assistant final analysis system user"] * 3, 300)


def turn(thought: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": thought, "channel": "analysis"},
        {"role": "assistant", "content": answer, "channel": "final"},
    ]


def read(
    path: Path, tokenizer: Tokenizer, *records: dict[str, Any], make: Any = completion_pair, context: int = 64
) -> Pairs:
    path.write_text("\n".join(map(json.dumps, records)))
    return read_pairs(DatasetSettings(path=str(path)), make_renderer(tokenizer), make, context)


PLAIN = {"prompt": "Sort: 21", "chosen": "12", "rejected": "21"}


def test_a_policy_learns_the_whole_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    record = {"prompt": "Sort: 21", "chosen": turn("up", "12"), "rejected": turn("down", "21")}
    (pair,) = read(tmp_path / "p.jsonl", tokenizer, record).pairs
    prompt = "<|start|>user<|message|>Sort: 21<|end|><|start|>assistant"
    said = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
    assert [tokenizer.decode(side.ids) for side in pair.sides] == [
        prompt + said.format("up", "12"),
        prompt + said.format("down", "21"),
    ]
    learned = [token for token in pair.chosen.labels if token >= 0]
    # What opens a second message is sampled too.
    assert tokenizer.decode(learned) == said.format("up", "12")
    assert pair.where == f"{tmp_path}/p.jsonl:1"


@pytest.mark.parametrize("thought", ["up", None])
def test_a_reward_model_reads_the_answer_alone(thought: str | None, tmp_path: Path, tokenizer: Tokenizer) -> None:
    chosen = "12" if thought is None else turn(thought, "12")
    record = {"prompt": "Sort: 21", "chosen": chosen, "rejected": "<think>down</think>21"}
    (pair,) = read(tmp_path / "p.jsonl", tokenizer, record, make=answer_pair).pairs
    assert [tokenizer.decode(side.ids).partition("<|start|>assistant")[2] for side in pair.sides] == [
        "<|channel|>final<|message|>12<|return|>",
        "<|channel|>final<|message|>21<|return|>",
    ]


def test_what_is_of_no_use_is_left_out_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = PLAIN | {"rejected": "2 1 " * 40}
    data = read(tmp_path / "p.jsonl", tokenizer, PLAIN, long, long)
    assert [pair.where for pair in data.pairs] == [f"{tmp_path}/p.jsonl:1"]
    assert data.notes[0].endswith("records of kind preference (chosen, rejected, prompt): 1 pairs, as harmony")
    assert data.notes[1] == (
        f"left out: 2 pairs longer than the model's context of 64 tokens, the first at {tmp_path}/p.jsonl:2"
    )
    alike = {"prompt": "Sort: 21", "chosen": turn("up", "12"), "rejected": turn("down", "12")}
    data = read(tmp_path / "p.jsonl", tokenizer, alike, PLAIN, make=answer_pair)
    assert len(data.pairs) == 1
    assert data.notes[1] == (
        f"left out: 1 pairs with equal answers once reasoning is left out, the first at {tmp_path}/p.jsonl:1"
    )
    with pytest.raises(UserError, match=r"no pair is left to train on; left out: 1 pairs longer than"):
        read(tmp_path / "p.jsonl", tokenizer, long)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "Sort: 21", "chosen": "12", "rejected": "12"}, "'chosen' and 'rejected' are equal"),
        ({"prompt": "Sort: 21", "chosen": "", "rejected": "12"}, "'chosen' is empty"),
        ({"prompt": "Sort: 21", "chosen": "12", "rejected": " \n"}, "'rejected' is empty"),
        ({"prompt": "", "chosen": "12", "rejected": "21"}, "'prompt' is empty"),
        ({"question": "Sort: 21", "answer": "12"}, "preference"),
        ({"prompt": "Sort: 21", "chosen": "12"}, "rejected"),
    ],
)
def test_bad_records_are_named_by_their_place(
    record: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=message) as first:
        read(tmp_path / "p.jsonl", tokenizer, record)
    assert str(first.value).startswith(f"{tmp_path}/p.jsonl:1: ")
    with pytest.raises(UserError, match=message if "question" not in record else "there are|columns are") as second:
        read(tmp_path / "p.jsonl", tokenizer, PLAIN, record)
    assert str(second.value).startswith(f"{tmp_path}/p.jsonl:2: ")


def test_a_side_of_reasoning_alone_has_nothing_to_judge(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"p\.jsonl:1: the last message of a side has no text apart from reasoning"):
        read(tmp_path / "p.jsonl", tokenizer, PLAIN | {"chosen": "<think>12</think>"}, make=answer_pair)


def test_pairs_are_held_out_by_the_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [PLAIN | {"prompt": f"Sort: {number}", "rejected": str(number)} for number in range(100, 120)]
    pairs = read(tmp_path / "p.jsonl", tokenizer, *records)
    kept, held_out = pairs.split(0.25, seed=1)
    assert len(held_out.pairs) == 5
    assert sorted(pair.where for part in (kept, held_out) for pair in part.pairs) == sorted(
        pair.where for pair in pairs.pairs
    )
    assert pairs.split(0.25, seed=1)[1].pairs == held_out.pairs != pairs.split(0.25, seed=2)[1].pairs
    assert (
        len({pairs.fingerprint, kept.fingerprint, held_out.fingerprint, pairs.split(0.25, seed=1)[0].fingerprint}) == 3
    )
    with pytest.raises(UserError, match=r"of 20 pairs a share of 0\.99 held out leaves none to train on"):
        pairs.split(0.99, seed=1)


def test_no_prompt_is_on_both_sides(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [
        PLAIN | {"prompt": f"Sort: {number % 8}", "rejected": str(rejected)}
        for number in range(100, 140)
        for rejected in (number, number, 77)
    ]
    pairs = read(tmp_path / "p.jsonl", tokenizer, *records)
    for make in (completion_pair, answer_pair):
        pairs = read(tmp_path / "p.jsonl", tokenizer, *records, make=make)
        for seed in range(5):
            kept, held_out = pairs.split(0.25, seed)
            asked, asked_again = ({pair.prompt for pair in part.pairs} for part in (kept, held_out))
            assert (len(asked), len(asked_again), len(held_out.pairs)) == (6, 2, 30)
            assert not asked & asked_again
    with pytest.raises(
        UserError, match="all 3 pairs have one prompt, which is trained on or evaluated on and not both"
    ):
        read(tmp_path / "p.jsonl", tokenizer, *records[:3]).split(0.3, seed=0)
