"""A tokenizer trained on files: the same as trained on their texts, whatever the files' format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nmoe.data.corpus import train_tokenizer
from nmoe.errors import UserError
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

TEXTS = ["the cat sat on the mat\n", "the hat sat on the cat\n", "Grüße, the 42 cats\n"] * 4
SIZE = SMALLEST_VOCABULARY + 20


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("".join(TEXTS), encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": text} for text in TEXTS]}) + "\n"
    )
    (tmp_path / "sharegpt.jsonl").write_text(
        json.dumps({"conversations": [{"from": "human", "value": text} for text in TEXTS]}) + "\n"
    )
    for part in (0, 1):
        pq.write_table(pa.table({"text": TEXTS[part::2]}), tmp_path / f"part-{part}.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "chat.jsonl", "sharegpt.jsonl", "part-*.parquet"])
def test_the_same_as_of_the_texts(files: Path, name: str) -> None:
    lines = list(train_tokenizer([str(files / name)], files / "out", SIZE))
    trained = Tokenizer.load(files / "out")
    assert trained.fingerprint == Tokenizer.train(TEXTS, SIZE).fingerprint
    assert lines[0] == f"12 texts of {sum(map(len, TEXTS))} characters"
    assert lines[1] == f"{SIZE:,} tokens"
    read = sum(len(text.encode()) for text in TEXTS)
    tokens = sum(len(trained.encode(text)) for text in TEXTS)
    assert lines[2] == f"{read / tokens:.2f} bytes a token on the first {read} bytes"


def test_several_files_and_a_limit(files: Path) -> None:
    first = len(TEXTS[0]) + 4
    lines = list(train_tokenizer([str(files / "a.jsonl"), str(files / "a.txt")], files / "out", SIZE, most_chars=first))
    assert lines[0] == f"2 texts of {first} characters, and more left out"
    assert Tokenizer.load(files / "out").same_ids(Tokenizer.train([TEXTS[0], TEXTS[1][:4]], SIZE))
    assert "no other pair occurs twice" in lines[1]


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (
            '{"body": "x"}\n',
            None,
            r"a.jsonl:1: no text in 'text' or .*; the columns are 'body'; name one with --column",
        ),
        ('{"body": "x"}\n', "txt", r"a.jsonl:1: no text in 'txt'; the columns are 'body'"),
        ("", None, r"a.jsonl: no text"),
        ("not JSON\n", None, r"a.jsonl:1: not JSON"),
    ],
)
def test_what_is_no_corpus(tmp_path: Path, content: str, column: str | None, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        list(train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "out", SIZE, column))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_not_overwritten(files: Path) -> None:
    list(train_tokenizer([str(files / "a.txt")], files / "out", SIZE))
    before = (files / "out/tokenizer.json").read_bytes()
    with pytest.raises(UserError, match="has a tokenizer already"):
        list(train_tokenizer([str(files / "a.txt")], files / "out", SIZE + 1))
    assert (files / "out/tokenizer.json").read_bytes() == before


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"a.txt: cannot be read as text in UTF-8"):
        list(train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "out", SIZE))
