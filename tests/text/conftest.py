"""Tokenizers that the text tests share: one trained here, small, and the real o200k_harmony vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer

# Repeats control token names and headers, so that training has every chance to merge them into one token.
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "<|start|>assistant<|channel|>final<|message|>the answer is 42<|return|>",
    "<|end|><|end|><|end|> to=functions.add <|constrain|>json <|call|>",
    "Wie schön, dass du da bist! 你好，世界 😀😀 42 1234567 99",
] * 20


class ReferenceTokenizer:
    """The o200k_harmony vocabulary of the reference implementation, as the protocol HarmonyTokenizer."""

    vocab_size = 201089  # one more than the largest id, a reserved control token

    def __init__(self, encoding: HarmonyEncoding) -> None:
        self.encoding = encoding

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode(ids)

    def special_id(self, token: str) -> int:
        (token_id,) = self.encoding.encode(token, allowed_special="all")
        return token_id


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, 500)


@pytest.fixture(scope="session")
def harmony(tokenizer: Tokenizer) -> Harmony:
    return Harmony(tokenizer)


@pytest.fixture(scope="session")
def reference() -> ReferenceTokenizer:
    return ReferenceTokenizer(load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS))


@pytest.fixture(scope="session")
def reference_harmony(reference: ReferenceTokenizer) -> Harmony:
    return Harmony(reference)
