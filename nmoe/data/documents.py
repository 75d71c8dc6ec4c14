"""Documents to pretrain on: read from datasets, shuffled each epoch, mixed by weight, and handed out up to a token budget."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmoe.data.packing import Mixture
from nmoe.data.rows import read_rows
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


def read_documents(path: str, tokenizer: Tokenizer, context_tokens: int) -> list[Document]:
    """Reads a document from each row of a dataset (`nmoe.data.rows`): `{"text": "..."}`, which is encoded and ended by
    <|endoftext|>, or `{"token_ids": [...]}`, taken as it is, for documents with control tokens that no text can spell. A further
    column `"prompt_tokens": 9` says that the first nine tokens are read and not learned, such as a question with random digits,
    from which a model would learn noise.

    Documents of more than `context_tokens` positions are cut into pieces of at most that many, of which those without a learned
    token are left out.
    Raises UserError, with file and line, for a row that is neither, an id beyond the vocabulary, or a file without documents.
    """
    end = [tokenizer.special_id("<|endoftext|>")]
    documents: list[Document] = []
    for where, record in read_rows(path):
        ids = _ids(record, tokenizer, end, where)
        prompt = _prompt_tokens(record, len(ids), where)
        for start in range(0, max(1, len(ids) - 1), context_tokens):
            piece = np.array(ids[start : start + context_tokens + 1], dtype=np.int64)
            if prompt - start < len(piece):
                documents.append(Document(piece, max(0, prompt - start)))
    if not documents:
        raise UserError(f"{path}: holds no documents; each line must be a JSON object with `text` or `token_ids`")
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


def _prompt_tokens(record: Mapping[str, Any], tokens: int, where: str) -> int:
    prompt = record.get("prompt_tokens")
    if prompt is None:  # null: other rows of the table have the column
        return 0
    if type(prompt) is not int or prompt < 0:
        raise UserError(f"{where}: prompt_tokens is {prompt!r}, which is not a count of tokens")
    if prompt and record.get("token_ids") is None:
        raise UserError(f"{where}: prompt_tokens counts `token_ids`, and this document is text")
    if prompt >= tokens:
        raise UserError(f"{where}: prompt_tokens = {prompt} leaves none of {tokens} tokens to learn")
    return prompt


@dataclass(frozen=True)
class DocumentSource:
    """The documents of one source, with its weight in a mixture."""

    name: str
    documents: Sequence[Document]
    weight: float = 1.0

    @property
    def tokens(self) -> int:
        """The number of positions in one epoch."""
        return sum(document.positions for document in self.documents)


class DocumentMixture(Mixture):
    """Hands out documents of several sources in proportion to their weights. `fingerprint` is a digest of all documents, source by
    source, and of the weights."""

    def __init__(self, sources: Sequence[DocumentSource], seed: int) -> None:
        self._sources = sources
        digest = hashlib.sha256()
        for source in sources:
            digest.update(f"{source.weight!r}/{len(source.documents)}/".encode())
            digest.update(b"".join(document.ids.tobytes() for document in source.documents))
            digest.update(np.array([document.prompt for document in source.documents], dtype=np.int64).tobytes())
        lengths = [[document.positions for document in source.documents] for source in sources]
        super().__init__(lengths, [source.weight for source in sources], seed, digest.hexdigest())

    def take(self, tokens: int) -> list[tuple[int, Document]]:
        """Returns the next documents, each with the index of its source: as many as stay within `tokens` positions, at least
        one."""
        return [(source, self._sources[source].documents[index]) for source, index in self.next_indices(tokens)]
