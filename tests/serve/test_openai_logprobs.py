"""Where the tokens of a completion begin in its text."""

from __future__ import annotations

from typing import cast

import pytest

from nmoe.serve.openai.logprobs import TextLogprobs
from nmoe.serve.openai.names import TokenNames
from nmoe.text.tokenizer import Tokenizer

BYTES = [b"<s>", b" Hello", b" world", b"\xc3", b"\xa9", b"abc"]


class Words:
    """A tokenizer in the style of SentencePiece, whose words begin with their spaces."""

    def bytes_of(self, id_: int) -> bytes:
        return BYTES[id_]


@pytest.mark.parametrize(
    ("prompt", "text_from", "text", "sampled", "offsets"),
    [
        ([1, 2], 0, "Hello world", [2, 5], ([0, 5], [11, 17])),  # the tokenizer puts a space before the text
        ([0, 1, 2], 1, "Hello world", [2], ([0, 0, 5], [11])),
        ([1, 2], 0, " Hello world", [2], ([0, 6], [12])),
        ([1, 0, 2], 0, "Hello<s>world", [2], ([0, 5, 8], [13])),  # and before the text behind a control token
        ([3], 0, "\ufffd", [5, 2, 5], ([0], [1, 4, 10])),  # half a character
        ([5, 3], 0, "abc\ufffd", [4, 5], ([0, 3], [4, 5])),
        ([5, 3, 4, 5], 0, "abc\u00e9abc", [3, 4, 5], ([0, 3, 3, 4], [7, 7, 8])),
    ],
)
def test_offsets_point_into_the_text(
    prompt: list[int], text_from: int, text: str, sampled: list[int], offsets: tuple[list[int], list[int]]
) -> None:
    names = TokenNames(cast(Tokenizer, Words()))
    table = TextLogprobs(names, (), ids_as_tokens=False)
    begun = table.prompt([(one, None) for one in prompt], text_from, text)["text_offset"]
    assert (begun, table.sampled([(one, None) for one in sampled])["text_offset"]) == offsets
