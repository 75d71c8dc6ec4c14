"""Documents to pretrain on: read from a dataset, shuffled anew each epoch, handed out by a token budget."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmoe.data.rows import read_rows
from nmoe.errors import UserError
from nmoe.text.tokenizer import Tokenizer

Document = NDArray[np.int64]


def read_documents(path: str, tokenizer: Tokenizer, context_tokens: int) -> list[Document]:
    """One document per row of what `nmoe.data.rows` reads: `{"text": "..."}`, which is encoded and ended by <|endoftext|>, or
    `{"token_ids": [...]}`, taken as it is, for documents with control tokens that no text can spell.

    Documents longer than `context_tokens` are cut into pieces of that length. Raises UserError, with file and line, for a
    row that is neither, an id beyond the vocabulary, or a file without documents.
    """
    end = [tokenizer.special_id("<|endoftext|>")]
    documents: list[Document] = []
    for where, record in read_rows(path):
        ids = _ids(record, tokenizer, end, where)
        for start in range(0, max(1, len(ids) - 1), context_tokens):
            documents.append(np.array(ids[start : start + context_tokens + 1], dtype=np.int64))
    if not documents:
        raise UserError(f"{path}: holds no documents; each line is a JSON object with `text` or `token_ids`")
    return documents


def _ids(record: Mapping[str, Any], tokenizer: Tokenizer, end: list[int], where: str) -> list[int]:
    text = record.get("text")
    if isinstance(text, str) and text:
        try:
            return tokenizer.encode(text) + end
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    ids = record.get("token_ids")
    if not isinstance(ids, list) or len(ids) < 2 or not all(type(i) is int for i in ids):
        raise UserError(f"{where}: neither `text` (a string) nor `token_ids` (two whole numbers or more)")
    if wrong := [i for i in ids if not 0 <= i < tokenizer.vocab_size]:
        raise UserError(f"{where}: token id {wrong[0]} is not in the tokenizer's vocabulary of {tokenizer.vocab_size}")
    return ids


class DocumentStream:
    """Documents in an order that is a pure function of (seed, epoch). `position` counts the documents handed out;
    `fingerprint` is a digest of their tokens."""

    def __init__(self, documents: Sequence[Document], seed: int) -> None:
        self._documents = documents
        self._seed = seed
        self.fingerprint = hashlib.sha256(b"".join(document.tobytes() for document in documents)).hexdigest()
        self._epoch = -1
        self._order: list[int] = []
        self.position = 0

    def take(self, tokens: int) -> list[Document]:
        """The next documents, as many as stay within `tokens` predicted tokens, at least one."""
        taken: list[Document] = []
        budget = tokens
        while True:
            document = self._at(self.position)
            if taken and len(document) - 1 > budget:
                return taken
            taken.append(document)
            budget -= len(document) - 1
            self.position += 1

    def _at(self, position: int) -> Document:
        epoch, place = divmod(position, len(self._documents))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._documents)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._documents[self._order[place]]
