"""The question of a problem, in the one form in which problems are compared: to hold records out, to find evaluated problems in
training data, and to drop duplicates.

A question is the user's words, without the system message, template or format around them. Unicode's compatible forms (NFKC), case
and white space do not count: `Add  1 + 1` and `add １ + 1` are one question.

Generated problems are split by the text that their generator writes (`nmoe.envs.pools.pool.split_by`), which has one form.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from typing import Protocol


class Said(Protocol):
    """A message of a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


def question_key(question: str) -> str:
    """A question in the form in which it is compared with others."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def conversation_key(messages: Sequence[Said]) -> str:
    """The question of a conversation, as it is compared: the user's turns or, without any, all messages."""
    turns = [message.content for message in messages if message.role == "user"]
    return "\x1e".join(map(question_key, turns or [message.content for message in messages]))


def digest_of(key: str) -> bytes:
    """16 bytes for a key, because a million long questions would not fit in memory."""
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()
