"""`nmoe data export`: its tokens, labels and masks are those of SFT's batch, value by value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import read_examples
from nmoe.data.show import export_masked
from nmoe.errors import UserError
from nmoe.recipes.sft import example_batch
from nmoe.text.renderers import RenderFormat, make_renderer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

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
