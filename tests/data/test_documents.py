"""Pretraining documents: lines that are read and refused, their order, and a tokenizer trained on files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from nmoe.data.corpus import _passages, train_tokenizer
from nmoe.data.documents import Document, DocumentReader
from nmoe.data.spans import spans_of
from nmoe.errors import UserError
from nmoe.text.tokenizer import PIECE_PATTERN, SMALLEST_VOCABULARY, Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a small cat"] * 3, 300)


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("".join(line + "\n" for line in text).encode(errors="surrogateescape"))
    return path


def documents_of(path: Path, tokenizer: Tokenizer, context_tokens: int) -> list[Document]:
    found = [DocumentReader(tokenizer, context_tokens).read(span).pieces for span in spans_of(str(path), 1 << 20)]
    return [document for pieces in found if pieces is not None for document in pieces]


def read(path: Path, tokenizer: Tokenizer, context_tokens: int = 8) -> list[list[int]]:
    return [document.ids.tolist() for document in documents_of(path, tokenizer, context_tokens)]


def test_text_is_encoded_and_ended_and_ids_are_taken_as_they_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    end = tokenizer.special_id("<|endoftext|>")
    path = write(
        tmp_path / "d.jsonl", {"text": "a<|endoftext|>"}, "", {"token_ids": [3, end, 4]}, "  ", {"text": "cat"}
    )
    assert read(path, tokenizer, 100) == [
        [*tokenizer.encode("a<|endoftext|>"), end],  # the text cannot spell the control token
        [3, end, 4],
        [*tokenizer.encode("cat"), end],
    ]
    assert end not in tokenizer.encode("a<|endoftext|>")


def test_a_long_document_is_cut_so_that_every_token_is_predicted_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{"token_ids": list(range(20, 20 + length))} for length in (2, 5, 6, 9, 10)]
    assert read(write(tmp_path / "d.jsonl", *lines), tokenizer, context_tokens=4) == [
        [20, 21],
        [20, 21, 22, 23, 24],  # 4 read, 4 predicted: as much as the context holds
        [20, 21, 22, 23, 24],
        [24, 25],
        [20, 21, 22, 23, 24],
        [24, 25, 26, 27, 28],
        [20, 21, 22, 23, 24],
        [24, 25, 26, 27, 28],
        [28, 29],
    ]


NEITHER = r"neither `text` \(a string\) nor `token_ids` \(two whole numbers or more\)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "not JSON: "),
        ("\udcff", "not UTF-8: "),
        ("[" * 100_000, "not JSON: "),
        ("[1, 2]", "an array, not an object"),
        ("null", "null, not an object"),
        ({"texts": "a"}, NEITHER),
        ({"text": 7}, NEITHER),
        ({"text": ""}, NEITHER),
        ({"token_ids": [1]}, NEITHER),
        ({"token_ids": [1, 2.0]}, NEITHER),
        ({"token_ids": [1, True]}, NEITHER),
        ({"token_ids": "12"}, NEITHER),
        ({"token_ids": [1, 300]}, "token id 300 is not in the tokenizer's vocabulary of 27[0-9]"),
        ({"token_ids": [1, -1]}, "token id -1 is not in the tokenizer's vocabulary"),
        ({"text": "a\ud800b"}, "lone surrogate"),
    ],
)
def test_a_line_that_is_no_document_is_named(line: object, message: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "d.jsonl", {"text": "a"}, "", line, {"text": "b"})
    reader = DocumentReader(tokenizer, 8)
    for begin in (reader.read, reader.check):
        with pytest.raises(UserError, match=rf"d\.jsonl:3: .*{message}"):
            begin(spans_of(str(path), 1 << 20)[0])


def test_a_file_that_is_not_there(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"absent\.jsonl: cannot be read: No such file"):
        read(tmp_path / "absent.jsonl", tokenizer)


def test_prompts_are_read_and_not_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "d.jsonl", {"token_ids": [5, 6, 7, 8, 9], "prompt_tokens": 3})
    (whole,) = documents_of(path, tokenizer, 64)
    assert (whole.prompt, whole.positions, whole.learned.tolist()) == (3, 4, [False, False, True, True])
    # Cut after two positions: the first piece would be prompt alone.
    (rest,) = documents_of(path, tokenizer, 2)
    assert (rest.ids.tolist(), rest.prompt, rest.learned.tolist()) == ([7, 8, 9], 1, [True, True])


def test_a_null_says_that_there_is_no_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"token_ids": [5, 6, 7], "prompt_tokens": None}, {"token_ids": [5, 6, 7], "prompt_tokens": 2}]
    documents = documents_of(write(tmp_path / "d.jsonl", *rows), tokenizer, 64)
    assert [document.prompt for document in documents] == [0, 2]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"token_ids": [5, 6], "prompt_tokens": 2}, "prompt_tokens = 2 leaves none of 2 tokens to learn"),
        ({"token_ids": [5, 6], "prompt_tokens": -1}, "prompt_tokens is -1, which is not a count of tokens"),
        ({"token_ids": [5, 6], "prompt_tokens": True}, "prompt_tokens is True"),
        ({"text": "ab", "prompt_tokens": 1}, "prompt_tokens counts `token_ids`, and this document is text"),
    ],
)
def test_prompt_tokens_that_count_nothing(
    tmp_path: Path, tokenizer: Tokenizer, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"d\.jsonl:1: {message}"):
        documents_of(write(tmp_path / "d.jsonl", record), tokenizer, 64)


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


CODE = "def f(x):\n    if x:\n        return 1\n\n\n    return 2\r\n\r\n  \n\t\ndef g(y):\n\n    return 3;\n}\n\n"


def test_tokens_with_several_line_breaks_are_learned_from_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "code.md").write_bytes(CODE.encode() * 5)
    list(train_tokenizer([str(tmp_path / "code.md")], tmp_path / "out", SMALLEST_VOCABULARY + 40))
    trained = Tokenizer.load(tmp_path / "out")
    assert trained.fingerprint == Tokenizer.train([CODE * 5], SMALLEST_VOCABULARY + 40).fingerprint
    assert len(trained.encode("\n\n\n")) == 1


@given(st.text(alphabet="aB7.'é \t\n\r\x0b\x1c\x85\xa0\u2028", max_size=60))
@settings(max_examples=300, deadline=None)
def test_passages_of_a_text_file_have_the_pieces_of_the_whole(text: str) -> None:
    pattern = Regex(PIECE_PATTERN)

    def pieces(one: str) -> list[str]:
        return [piece for piece, _ in pre_tokenizers.Split(pattern, behavior="isolated").pre_tokenize_str(one)]

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "a.txt")
        file.write_bytes(text.encode())
        found = list(_passages(file))
    assert "".join(found) == text
    assert [piece for passage in found for piece in pieces(passage)] == pieces(text)


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
