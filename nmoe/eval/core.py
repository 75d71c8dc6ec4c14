"""CORE's rules: what a model reads of an item, and when it is right.

They are nanochat's (`nanochat/core_eval.py`), so that scores can be set beside its own. Few-shot examples of item i are drawn by
`Random(1234 + i)` among the others. Multiple choice takes the option whose tokens behind the common beginning have the lowest
mean loss, a schema the context before the common end; in language modelling every token of the continuation is the most likely one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nmoe.eval.core_sets import CoreSet
from nmoe.eval.likelihood import Continuation, Likelihood, common_prefix, likelihoods
from nmoe.model.transformer import Transformer
from nmoe.text.harmony_format import END_OF_TEXT
from nmoe.text.tokenizer import Tokenizer

Item = Mapping[str, Any]

_SHOTS_SEED = 1234


def decisions(
    model: Transformer,
    tokenizer: Tokenizer,
    one: CoreSet,
    items: Sequence[Item],
    count: Callable[[int], None] = lambda _: None,
) -> list[bool]:
    """Whether the model is right, item by item; `count` is told how many are done."""
    right = []
    for item, scored in zip(items, scores(model, tokenizer, one, items), strict=True):
        right.append(_is_right(one, item, scored))
        count(len(right))
    return right


def scores(model: Transformer, tokenizer: Tokenizer, one: CoreSet, items: Sequence[Item]) -> Iterator[list[Likelihood]]:
    """The likelihoods of each item's options; in language modelling of its continuation alone."""
    first, context = beginning(tokenizer), model.config.context_tokens

    def asked() -> Iterator[list[Continuation]]:
        for place in range(len(items)):
            texts = prompts(one, items, place)
            sequences = [[*first, *tokenizer.encode(text)] for text in texts]
            yield [cut(found, context) for found in continuations(one, sequences)]

    return likelihoods(model, asked())


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The token that begins a document: the tokenizer's own, else the one that ends documents; none where it has neither."""
    for name in (tokenizer.named_tokens.get("bos_token"), END_OF_TEXT):
        if name is not None and tokenizer.has_special(name):
            return [tokenizer.special_id(name)]
    return []


def prompts(one: CoreSet, items: Sequence[Item], place: int) -> list[str]:
    """The texts of an item: one for each option; in language modelling without and with the continuation."""
    others = [number for number in range(len(items)) if number != place]
    drawn = random.Random(_SHOTS_SEED + place).sample(others, one.shots) if one.shots else []
    item = items[place]
    shots = "".join(_solved(one, items[number]) + "\n\n" for number in drawn)
    if one.kind == "multiple_choice":
        return [shots + item["query"] + one.delimiter + choice for choice in item["choices"]]
    if one.kind == "schema":
        return [shots + context + one.delimiter + item["continuation"] for context in item["context_options"]]
    asked = shots + item["context"].strip() + one.delimiter
    # A space at the end would be part of the next token.
    return [asked.strip(), asked + item["continuation"]]


def _solved(one: CoreSet, item: Item) -> str:
    if one.kind == "multiple_choice":
        question, answer = item["query"], item["choices"][item["gold"]]
    elif one.kind == "schema":
        question, answer = item["context_options"][item["gold"]], item["continuation"]
    else:
        question, answer = item["context"].strip(), item["continuation"]
    return str(question + one.delimiter + answer)


def continuations(one: CoreSet, sequences: Sequence[Sequence[int]]) -> list[Continuation]:
    """What is scored of the tokens of an item's texts."""
    if one.kind == "schema":
        suffix = common_prefix([sequence[::-1] for sequence in sequences])
        return [Continuation(sequence, max(1, len(sequence) - suffix)) for sequence in sequences]
    start = max(1, common_prefix(sequences))
    return [
        Continuation(sequence, start) for sequence in (sequences[1:] if one.kind == "language_modeling" else sequences)
    ]


def cut(found: Continuation, context: int) -> Continuation:
    """Keeps the end of what is longer than the model's context."""
    beyond = max(0, len(found.token_ids) - context)
    return Continuation(found.token_ids[beyond:], max(1, found.start - beyond))


def _is_right(one: CoreSet, item: Item, scored: Sequence[Likelihood]) -> bool:
    if one.kind == "language_modeling":
        return scored[0].greedy
    losses = [likelihood.mean_loss for likelihood in scored]
    return losses.index(min(losses)) == item["gold"]
