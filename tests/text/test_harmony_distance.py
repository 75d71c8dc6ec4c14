"""How far completions are from a well-formed answer: hand-counted distances, and attacks on the reward that follows from them."""

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from nmoe.text.harmony import CONTROL_TOKENS, Harmony
from nmoe.text.harmony_distance import HarmonyDistance, share_of_form
from nmoe.text.renderers import HarmonyRenderer
from nmoe.text.tokenizer import Tokenizer

WORDS = ("final", "analysis", "commentary", "assistant", "42", " ", "Final", "The")
# The tokens that attacks are made of: every control token with a meaning, names, text, and text that is blank.
ALPHABET = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
    "final",
    "assistant",
    "42",
    " ",
    "Final",
)
VALID = ("<|channel|>", "final", "<|message|>", "42", "<|return|>")


class Words:
    """A tokenizer of whole words."""

    vocab_size = len(CONTROL_TOKENS) + len(WORDS)

    def encode(self, text: str) -> list[int]:
        return [] if not text else [len(CONTROL_TOKENS) + WORDS.index(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join((*CONTROL_TOKENS, *WORDS)[token_id] for token_id in ids)

    def special_id(self, token: str) -> int:
        return CONTROL_TOKENS.index(token)


def ids_of(tokens: Sequence[str]) -> list[int]:
    return [(*CONTROL_TOKENS, *WORDS).index(token) for token in tokens]


RENDERER, DISTANCE = HarmonyRenderer(Words()), HarmonyDistance(Harmony(Words()))


@cache
def paid(tokens: tuple[str, ...]) -> float:
    return RENDERER.parse([ids_of(tokens)]).structure


def is_valid(tokens: Sequence[str]) -> bool:
    return RENDERER.parse([ids_of(tokens)]).well_formed is True


def edits(tokens: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every sequence that one insertion, deletion or replacement makes of it."""
    for place in range(len(tokens) + 1):
        for token in ALPHABET:
            yield (*tokens[:place], token, *tokens[place:])
            if place < len(tokens):
                yield (*tokens[:place], token, *tokens[place + 1 :])
        if place < len(tokens):
            yield (*tokens[:place], *tokens[place + 1 :])


def drawn(rng: random.Random, longest: int) -> tuple[str, ...]:
    return tuple(rng.choice(ALPHABET) for _ in range(rng.randrange(longest + 1)))


@pytest.mark.parametrize(
    ("completion", "distance"),
    [
        ("<|channel|> final <|message|> 42 <|return|>", 0),
        (
            "<|channel|> analysis <|message|> The <|end|> <|start|> assistant <|channel|> final <|message|> 42 <|return|>",
            0,
        ),
        ("<|channel|> analysis <|message|> <|end|> <|start|> assistant <|channel|> final <|message|> 42 <|return|>", 0),
        # One token is missing, too many, or another.
        ("final <|message|> 42 <|return|>", 1),
        ("<|start|> final <|message|> 42 <|return|>", 1),
        ("<|channel|> final 42 <|return|>", 1),
        ("<|channel|> final <|message|> 42", 1),
        ("<|channel|> final <|message|> 42 <|end|>", 1),
        ("<|channel|> final <|message|> 42 <|return|> 42", 1),
        ("<|channel|> <|channel|> final <|message|> 42 <|return|>", 1),
        ("<|channel|> final <|message|> <|return|>", 1),
        # A name is worse than wrong where it is lacking; a word in its place counts by its letters.
        ("<|channel|> <|message|> 42 <|return|>", 2),
        ("<|channel|> The <|message|> 42 <|return|>", 1),  # no letter of `final`
        ("<|channel|> Final <|message|> 42 <|return|>", 1 / 10),  # one letter of five in the other case
        # Samples of a model that has seen some of the form.
        ("<|end|> final 42 <|return|>", 2),
        ("<|channel|> final", 3),
        ("<|return|>", 5),
        ("42", 5),
        ("42 The The 42 The The The The 42 The The The", 4),  # one of the words is another name
        ("", 6),
        # Text before the form has to go, or the form has to come before it.
        ("The The <|channel|> final <|message|> 42 <|return|>", 2),
        # The first message is read as one on another channel (six letters of eight), and the last end is another token.
        ("<|channel|> final <|message|> 42 <|end|> <|start|> assistant <|channel|> final <|message|> 42 <|end|>", 1.75),
    ],
)
def test_the_distance_is_the_fewest_edits(completion: str, distance: float) -> None:
    tokens = completion.split()
    assert DISTANCE(ids_of(tokens)) == pytest.approx(distance)
    assert paid(tuple(tokens)) == pytest.approx(share_of_form(distance))


def test_more_of_the_skeleton_is_paid_more() -> None:
    grown = [VALID[:length] for length in range(len(VALID) + 1)]
    shares = [paid(tokens) for tokens in grown]
    assert shares == [pytest.approx(share) for share in (5 / 36, 1 / 6, 3 / 6, 4 / 6, 5 / 6, 1)]


def test_no_sequence_of_up_to_three_tokens_is_a_local_maximum() -> None:
    level: list[tuple[str, ...]] = [()]
    for _ in range(4):
        for tokens in level:
            best = max(paid(edited) for edited in edits(tokens))
            assert best > paid(tokens), tokens
            assert paid(tokens) <= 5 / 6
        level = [(*tokens, token) for tokens in level for token in ALPHABET] if len(level[0]) < 3 else []
        if not level:
            break


def test_no_search_finds_an_invalid_sequence_that_pays_like_the_form() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        tokens = drawn(rng, 9)
        assert (paid(tokens) == 1) == is_valid(tokens), tokens
    # Nor among the nearest neighbours of the form itself.
    for tokens in edits(VALID):
        assert paid(tokens) == 1 if is_valid(tokens) else paid(tokens) <= share_of_form(1 / 10)
    # What a farmer would try, against the nearest honest near miss, which lacks one token.
    honest = paid(VALID[:-1])
    for tokens in (
        ("<|channel|>",) * 12,
        ("<|channel|>", "final", "<|message|>") * 4,
        (*VALID[:-1], *VALID[:-1], *VALID),
        (*VALID, *VALID),
        ("<|channel|>", "final", "<|message|>", " ", "<|return|>"),
        ALPHABET,
        tuple(reversed(VALID)),
        ("final",) * 12,
        ("<|message|>", "<|return|>") * 6,
    ):
        assert not is_valid(tokens)
        assert paid(tokens) <= honest, tokens
    assert paid(("<|channel|>",) * 12) < paid(("<|channel|>",) * 3) <= paid(("<|channel|>",))


def test_climbing_by_single_edits_ends_in_the_form_from_any_start() -> None:
    rng = random.Random(1)
    for _ in range(12):
        tokens = drawn(rng, 8)
        while not is_valid(tokens):
            better = [edited for edited in edits(tokens) if paid(edited) > paid(tokens)]
            assert better, tokens
            tokens = rng.choice(better)
        assert paid(tokens) == 1


def test_long_texts_cost_no_more_than_short_ones() -> None:
    text = ids_of(["The"])
    opened, ended = ids_of(VALID[:3]), ids_of(VALID[-1:])
    assert DISTANCE(text * 5000) == DISTANCE(text * 3) == 4
    assert DISTANCE([*opened, *text * 5000]) == 1
    # The form begins before the text, which costs 4 at most, or the text goes; the later header becomes text.
    assert DISTANCE([*text * 5000, *opened, *text, *ended]) == 5


def test_a_name_counts_once_however_many_tokens_spell_it() -> None:
    letters = Tokenizer.train(["ab"], 264)  # a token for each byte
    assert len(letters.encode("final")) == 5
    distance = HarmonyDistance(Harmony(letters))

    def of(text: str) -> float:
        return distance(letters.encode(text, control_tokens=True))

    assert of("<|channel|>final<|message|>42<|return|>") == 0
    assert of("<|channel|>fial<|message|>42<|return|>") == pytest.approx(2 / 5)
    assert of("<|channel|>fimal<|message|>42<|return|>") == pytest.approx(1 / 5)
    assert of("<|channel|><|message|>42<|return|>") == pytest.approx(2)
    assert of("") == pytest.approx(6)
    assert of("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>") == 0


def test_ids_outside_the_vocabulary_are_out_of_place() -> None:
    opened, ended = ids_of(VALID[:3]), ids_of(VALID[-1:])
    answer = RENDERER.parse([[*opened, 10_000, *ended]])
    assert (answer.well_formed, answer.structure) == (False, pytest.approx(5 / 6))
    assert RENDERER.parse([[*opened, -1, *ids_of(["42"]), *ended]]).structure == pytest.approx(5 / 6)
