"""The edit distance of a completion from the nearest well-formed Harmony answer: the lowest price of tokens to insert, delete or
replace.

A well-formed answer is

    (<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant)* <|channel|>final<|message|>TEXT<|return|>

where `commentary` may stand for `analysis`. Well-formed answers have distance 0, and every other completion has an edit that lowers
its distance: a reward that falls with the distance has no local maximum and cannot be farmed with stray control tokens.
"""

# States of the automaton are numbers; an edge is (state, label, state after it, price of another token instead, price of its lack).

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from nmoe.text.harmony import CHANNEL, CHANNELS, END, MESSAGE, RETURN, START, Harmony

# A run of text is content for the price of the few tokens around it, so that it is never worth more deletions than these.
_LONGEST_RUN = 24

# A name that is lacking costs twice as much as a wrong one. Where it did not, policies learned the form without a name, whose
# rewards are all alike, before they met a word that is nearer to the name than none.
_NAME = 2

# What an answer from nothing costs: <|channel|>, the name, <|message|>, a text, <|return|>.
_PARTS = 4 + _NAME


def share_of_form(distance: float) -> float:
    """Converts a distance to partial credit for the format: 1 for a well-formed answer, 5/6 where a control token is missing, 1/3
    for a text without a letter of a channel name in its first words, and ever less for more errors."""
    return 1 - distance / _PARTS if distance <= _PARTS - 1 else (_PARTS - 1) / _PARTS / distance


class HarmonyDistance:
    """Measures completions of one tokenizer by the edit distance to a regular language (Wagner 1974, Communications of the ACM 17).

    An insertion, a deletion and a replacement cost 1. A missing channel name costs 2, and a word in its place the share of letters
    that are wrong: `Final` is nearer to `final` than `The` is, and `The` nearer than nothing. A name's price is divided among its
    tokens.
    """

    def __init__(self, harmony: Harmony) -> None:
        self._tokenizer, self._control_tokens = harmony.tokenizer, harmony.control_tokens
        self._texts: dict[int, str | None] = {}
        self._differences: dict[tuple[int, int], float] = {}
        self._edges: list[tuple[int, int | None, int, float, float]] = []
        self._loops: list[tuple[int, bool]] = []  # a state of content, and whether only blank text stays in it
        self._states = 1
        tokenizer, special = self._tokenizer, self._tokenizer.special_id
        for name in CHANNELS:
            named = self._path(self._path(0, [special(CHANNEL)]), tokenizer.encode(name))
            opened = self._path(named, [special(MESSAGE)])
            if name == "final":
                said = self._state()
                self._edges.append((opened, None, said, 1.0, 1.0))
                self._loops += [(opened, True), (said, False)]
                self._done = self._path(said, [special(RETURN)])
            else:
                self._loops.append((opened, False))
                self._path(self._path(opened, [special(END), special(START)]), tokenizer.encode("assistant"), 0)
        self._start = self._with_insertions([0.0, *[float("inf")] * (self._states - 1)])

    def __call__(self, token_ids: Sequence[int]) -> float:
        """Returns the price of the edits that would make the tokens sampled after <|start|>assistant a well-formed completion.
        Never raises: any integers have a distance. A channel's name counts as wrong if it is not encoded as the tokenizer
        encodes it."""
        costs = self._start
        for token_id in self._without_long_runs(token_ids):
            costs = self._after(costs, token_id)
        return costs[self._done]

    def _after(self, costs: list[float], token_id: int) -> list[float]:
        text = self._text(token_id)
        after = [cost + 1 for cost in costs]
        for state, only_blank in self._loops:
            if text is not None and (not only_blank or not text.strip()):
                after[state] = min(after[state], costs[state])
        for state, label, following, price, lack in self._edges:
            # Only text is nearer to a name than nothing is, or a control token said twice would be paid.
            cost = price * self._difference(token_id, text, label) if text is not None or price == lack else lack
            after[following] = min(after[following], costs[state] + cost)
        return self._with_insertions(after)

    def _difference(self, token_id: int, text: str | None, label: int | None) -> float:
        """Returns how much a token differs from an edge's label, from 0 to 1. The label None stands for any text that is not
        blank."""
        if label is None:
            return 0.0 if text is not None and text.strip() else 1.0
        if token_id == label:
            return 0.0
        if text is None or label in self._control_tokens:
            return 1.0
        key = (token_id, label)
        if key not in self._differences:
            wanted = self._text(label) or ""
            self._differences[key] = _edits(text, wanted) / max(len(text), len(wanted), 1)
        return self._differences[key] or 1.0  # the same letters in another token are another token

    def _with_insertions(self, costs: list[float]) -> list[float]:
        # Edges are in the order of their paths, and only the last of a path leads back: twice reaches everything.
        for _ in range(2):
            for state, _label, following, _price, lack in self._edges:
                if costs[state] + lack < costs[following]:
                    costs[following] = costs[state] + lack
        return costs

    def _without_long_runs(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Yields the tokens, leaving out the middle of long runs of text."""
        for is_text, run in groupby(token_ids, lambda token_id: self._text(token_id) is not None):
            tokens = list(run)
            if is_text and len(tokens) > _LONGEST_RUN:
                tokens = tokens[: _LONGEST_RUN // 2] + tokens[-_LONGEST_RUN // 2 :]
            yield from tokens

    def _text(self, token_id: int) -> str | None:
        """Returns the text of a token; None for a control token, and for an id outside the vocabulary."""
        if token_id not in self._texts:
            known = token_id not in self._control_tokens and 0 <= token_id < self._tokenizer.vocab_size
            self._texts[token_id] = self._tokenizer.decode([token_id]) if known else None
        return self._texts[token_id]

    def _path(self, state: int, labels: Sequence[int], end: int | None = None) -> int:
        """Adds a chain of edges from a state, labelled with control tokens or with the tokens of one name; returns the last
        state."""
        named = not self._control_tokens.keys() & set(labels)
        price, lack = (1 / len(labels), _NAME / len(labels)) if named else (1.0, 1.0)
        for index, label in enumerate(labels, 1):
            following = self._state() if end is None or index < len(labels) else end
            self._edges.append((state, label, following, price, lack))
            state = following
        return state

    def _state(self) -> int:
        self._states += 1
        return self._states - 1


def _edits(one: str, other: str) -> float:
    """Returns the edit distance of two short texts (Levenshtein), where a letter in the other case costs half."""
    row = [float(length) for length in range(len(other) + 1)]
    for index, letter in enumerate(one, 1):
        diagonal, row[0] = row[0], index
        for column, wanted in enumerate(other, 1):
            other_letter = 0.0 if letter == wanted else 0.5 if letter.casefold() == wanted.casefold() else 1.0
            least = min(row[column] + 1, row[column - 1] + 1, diagonal + other_letter)
            diagonal, row[column] = row[column], least
    return row[-1]
