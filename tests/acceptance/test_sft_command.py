"""`nmoe sft` and `nmoe data show` as a user meets them, with good data and with bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Result

from nmoe.runs.ledger import read_metrics

Nmoe = Callable[..., Result]

CONFIG = """
[run]
threads = 1
[model]
path = "BASE"
[records]
path = "train.jsonl"
epochs = 2
tokens_per_step = 256
[optimizer]
learning_rate = 1e-3
"""
GOOD = {"prompt": "Reverse: 123", "completion": "321"}
PAIR = {"prompt": "Reverse: 123", "chosen": "321", "rejected": "123"}


def write(path: Path, *lines: object) -> None:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(line + "\n" for line in text))


@pytest.fixture
def train(base: Path, tmp_path: Path, nmoe: Nmoe) -> Callable[..., Result]:
    """Runs `nmoe sft` on lines of train.jsonl."""

    def train(lines: list[object], *overrides: str) -> Result:
        write(tmp_path / "train.jsonl", *lines)
        (tmp_path / "sft.toml").write_text(CONFIG.replace("BASE", str(base)))
        return nmoe("sft", "sft.toml", *overrides)

    return train


def test_fine_tuning_by_the_command(train: Callable[..., Result], tmp_path: Path) -> None:
    lines: list[object] = [{"prompt": f"Reverse: {i}", "completion": str(i)[::-1]} for i in range(100, 140)]
    result = train(lines)
    assert result.code == 0, result.err
    for part in (
        "step: at most 256 tokens in micro-batches of at most 16,384",
        "train.jsonl: records of kind prompt_completion (prompt, completion), rendered as harmony",
        "40 records = 40 sequences of ",
        "packing: 40 sequences in ",
        "= 2.00 epochs",
    ):
        assert part in result.out
    rows = read_metrics(tmp_path / "runs" / "sft")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"learned_tokens", "packing_utilisation", "learning_rate", "grad_norm"} <= rows[0].keys()


@pytest.mark.parametrize(
    ("line", "overrides", "message"),
    [
        ('{"prompt": ', [], "train.jsonl:2: not JSON"),
        ({"prompt": "?"}, [], "train.jsonl:2: a record of kind prompt_completion has 'completion'"),
        ({"prompt": "?", "completion": " "}, [], "train.jsonl:2: 'completion' is empty"),
        ({"prompt": "?", "completion": "a\ud800"}, [], "train.jsonl:2: the text has a lone surrogate"),
        (
            GOOD,
            ["--records.kind=preference"],
            'kind = "preference" cannot be used here; messages or prompt_completion or text is',
        ),
        (GOOD, ["--records.columns.prompt=question"], "prompt from 'question': there is no such column"),
        (GOOD, ["--records.format=chat"], 'format = "chat": the tokenizer has no chat template'),
        (GOOD, ["--records.path=absent.jsonl"], "absent.jsonl: cannot be read: No such file"),
        (GOOD, ["--records.path=train.jsonl@[5:]"], "train.jsonl@[5:]: no records"),
        (GOOD, ["--run.steps=3"], "--run.steps=3: excludes records.epochs = 2; give one of the two"),
        (GOOD, ["--records.held_out=0.5"], "records are held out but never evaluated on"),
    ],
)
def test_bad_input_trains_nothing(
    train: Callable[..., Result], line: object, overrides: list[str], message: str, tmp_path: Path
) -> None:
    result = train([GOOD, line], *overrides)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()


def test_what_the_context_does_not_hold_is_counted(train: Callable[..., Result]) -> None:
    long = {"prompt": "Reverse: " + "1" * 90, "completion": "1"}
    result = train([GOOD, long, GOOD, long])
    assert result.code == 0, result.err
    assert "left out, longer than the model's context: 2 sequences (train.jsonl:2, train.jsonl:4)" in result.out
    result = train([long], "--run.name=none")
    assert result.code == 2
    assert "train.jsonl: no record with a token to train on; 1 are longer than its context of 64 tokens" in result.err


def test_data_show_says_what_is_what(nmoe: Nmoe, base: Path, tmp_path: Path) -> None:
    messages = [
        *({"role": "user", "content": "Reverse: 12"}, {"role": "assistant", "content": "21"}),
        *({"role": "user", "content": "Reverse: 34"}, {"role": "assistant", "content": "43"}),
    ]
    write(tmp_path / "chat.jsonl", {"messages": messages}, {"messages": messages[:2]})
    result = nmoe("data", "show", "chat.jsonl", "--masks", "--records", "1", "--tokenizer", base)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "chat.jsonl: records of kind messages (messages)"
    shown = "".join(line.removeprefix("  | ") for line in lines if line.startswith("  | "))
    assert shown == (
        "<|start|>user<|message|>Reverse: 12<|end|><|start|>assistant⟦<|channel|>final<|message|>21<|end|>⟧"
        "<|start|>user<|message|>Reverse: 34<|end|><|start|>assistant⟦<|channel|>final<|message|>43<|return|>⟧"
    )
    assert any(line.endswith(" learned as <|return|>, which the history shows as <|end|>") for line in lines)
    assert "2 records of kind messages = 2 sequences" in lines
    assert lines[-1].startswith("learned least 6, median 6, 95% at most 6, most 12; 18 in all, ")


def test_data_show_of_pairs_steps_and_other_columns(nmoe: Nmoe, tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", PAIR)
    out = nmoe("data", "show", "pairs.jsonl", "--masks").out
    assert "  chosen:" in out
    assert "⟦<|channel|>final<|message|>321<|return|>⟧" in out
    assert "  rejected:" in out
    assert "1 records of kind preference = 2 sequences" in out
    write(tmp_path / "steps.jsonl", {"prompt": "?", "completions": ["a", "b", "c"], "labels": [True, True, False]})
    assert nmoe("data", "show", "steps.jsonl").out.splitlines()[-1] == "labels +: 2, -: 1"
    (tmp_path / "x.csv").write_text("question,answer\n6 * 7?,42\n")
    out = nmoe("data", "show", "x.csv", "--column", "prompt=question", "--column", "completion=answer").out
    assert "x.csv: records of kind prompt_completion (prompt from 'question', completion from 'answer')" in out


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"question": "?"}, [], "x.jsonl:1: the columns 'question' fit no format (text: text; messages: messages; "),
        (PAIR | {"completion": "a"}, [], 'choose one: kind = "prompt_completion" or kind = "preference"'),
        (PAIR | {"chosen": "123"}, [], "x.jsonl:1: 'chosen' and 'rejected' are equal"),
        (
            {"prompt": "?", "completions": ["a"], "labels": ["perhaps"]},
            [],
            "x.jsonl:1: labels[0] is 'perhaps'; a label is",
        ),
        (GOOD, ["--kind", "pairs"], 'kind = "pairs": must be one of "text", "messages"'),
        (GOOD, ["--column", "prompt"], "--column prompt: write COLUMN=NAME"),
        (GOOD, ["--column", "promt=prompt"], "'promt' is not a column of a format"),
        (GOOD, ["--tokenizer", "nowhere"], "nowhere: neither a tokenizer"),
    ],
)
def test_data_show_names_what_is_wrong(
    nmoe: Nmoe, line: object, options: list[str], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "x.jsonl", line)
    result = nmoe("data", "show", "x.jsonl", *options)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
