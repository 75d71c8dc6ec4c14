"""Documents to pretrain on: what a row of a dataset becomes, and the token ids of many documents in a few arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmoe.data.spans import Span, SpanReader
from nmoe.errors import UserError
from nmoe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """A document's token ids, of which the first `prompt` are not trained on: `Document(np.array([5, 6, 7, 2]), prompt=2)` learns
    to predict 7 and 2, `Document(np.array([5, 6, 7, 2]))` everything after the first token."""

    ids: NDArray[np.int64]
    prompt: int = 0

    @property
    def positions(self) -> int:
        """The number of positions that the model runs, one less than the tokens."""
        return len(self.ids) - 1

    @property
    def learned(self) -> NDArray[np.bool_]:
        """Whether the token after each position is trained on, bool `[positions]`."""
        return np.arange(1, len(self.ids)) >= self.prompt


@dataclass(frozen=True)
class Pieces:
    """The documents of some spans, cut into pieces that fit into the context, as a sequence of `Document`.

    ids: the token ids of all pieces, one after another.
    ends: where each piece ends in `ids`.
    prompts: the tokens at the start of each piece that are not trained on.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    prompts: NDArray[np.int32]

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        shift = np.cumsum([0, *(len(part.ids) for part in parts)])
        ends = [part.ends + before for part, before in zip(parts, shift, strict=False)]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]),
            np.concatenate([np.empty(0, np.int64), *ends]),
            np.concatenate([np.empty(0, np.int32), *(part.prompts for part in parts)]),
        )

    @property
    def tokens(self) -> int:
        """The number of positions, one less than the tokens of each piece."""
        return len(self.ids) - len(self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Document:
        start = int(self.ends[index - 1]) if index else 0
        return Document(self.ids[start : self.ends[index]].astype(np.int64), int(self.prompts[index]))

    def positions(self, index: int) -> int:
        """Returns the positions of a piece."""
        return int(self.ends[index] - (self.ends[index - 1] if index else 0)) - 1

    def first(self, count: int) -> Pieces:
        """Returns the first pieces."""
        end = int(self.ends[count - 1]) if count else 0
        return Pieces(self.ids[:end], self.ends[:count], self.prompts[:count])


@dataclass(frozen=True)
class Found:
    """The documents of a span: their number, a digest of their texts or token ids, and their pieces (None if they were only
    checked)."""

    documents: int
    digest: str
    pieces: Pieces | None


class DocumentReader:
    """Makes documents of the rows of spans.

    A row is `{"text": "..."}`, which is encoded and ended by <|endoftext|>, or `{"token_ids": [...]}`, taken as it is, for
    documents with control tokens that no text can spell. A further column `"prompt_tokens": 9` says that the first nine tokens are
    read and not learned, such as a question with random digits, from which a model would learn noise.

    Documents of more than `context_tokens` positions are cut into pieces of at most that many, of which those without a learned
    token are left out.
    """

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self.tokenizer, self.context_tokens = tokenizer, context_tokens
        self._end = [tokenizer.special_id("<|endoftext|>")]
        self._spans = SpanReader()

    def read(self, span: Span) -> Found:
        """Reads and encodes the documents of a span. Raises UserError, with file and line, for a row that is none, and for an id
        beyond the vocabulary."""
        return self._read(span, encodes=True)

    def check(self, span: Span) -> Found:
        """Reads the documents of a span as `read` does, with the same errors, and encodes none of them."""
        return self._read(span, encodes=False)

    def _read(self, span: Span, encodes: bool) -> Found:
        digest, documents = hashlib.sha256(), 0
        ids: list[NDArray[np.int32]] = []
        prompts: list[int] = []
        for where, record in self._spans.rows(span):
            documents += 1
            tokens = self._tokens(record, where, encodes, digest)
            prompt = _prompt_tokens(record, len(tokens), where)
            digest.update(b"%d/" % prompt)
            if not encodes:
                continue
            array = np.array(tokens, dtype=np.int32)
            for start in range(0, max(1, len(tokens) - 1), self.context_tokens):
                piece = array[start : start + self.context_tokens + 1]
                if prompt - start < len(piece):
                    ids.append(piece)
                    prompts.append(max(0, prompt - start))
        if not encodes:
            return Found(documents, digest.hexdigest(), None)
        ends = np.cumsum([len(piece) for piece in ids], dtype=np.int64)
        joined = np.concatenate([np.empty(0, np.int32), *ids])
        pieces = Pieces(joined, ends, np.array(prompts, dtype=np.int32))
        return Found(documents, digest.hexdigest(), pieces if span.pieces is None else pieces.first(span.pieces))

    def _tokens(self, record: Mapping[str, Any], where: str, encodes: bool, digest: hashlib._Hash) -> list[int]:
        if (text := _text(record)) is None:
            ids = _given_ids(record, self.tokenizer, where)
            digest.update(np.array(ids, dtype=np.int64).tobytes())
            return ids
        try:
            digest.update(text.encode())
            return self.tokenizer.encode(text) + self._end if encodes else self._end
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: the text has a lone surrogate, {text[error.start]!r}, which is no character; mend or remove the document"
            ) from None


def _text(record: Mapping[str, Any]) -> str | None:
    text = record.get("text")
    return text if isinstance(text, str) and text else None


def _given_ids(record: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> list[int]:
    ids = record.get("token_ids")
    if not isinstance(ids, list) or len(ids) < 2 or not all(type(i) is int for i in ids):
        raise UserError(
            f"{where}: neither `text` (a string) nor `token_ids` (two whole numbers or more); mend or remove the document"
        )
    if wrong := [i for i in ids if not 0 <= i < tokenizer.vocab_size]:
        raise UserError(f"{where}: token id {wrong[0]} is not in the tokenizer's vocabulary of {tokenizer.vocab_size}")
    return ids


def _prompt_tokens(record: Mapping[str, Any], tokens: int, where: str) -> int:
    prompt = record.get("prompt_tokens")
    if prompt is None:  # null: other rows of the table have the column
        return 0
    if type(prompt) is not int or prompt < 0:
        raise UserError(f"{where}: prompt_tokens is {prompt!r}, which is not a count of tokens")
    if prompt and _text(record) is not None:
        raise UserError(f"{where}: prompt_tokens counts `token_ids`, and this document is text")
    if prompt >= tokens:
        raise UserError(f"{where}: prompt_tokens = {prompt} leaves none of {tokens} tokens to learn")
    return prompt
