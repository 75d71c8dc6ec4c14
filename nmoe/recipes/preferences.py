"""Pairs for the recipes that learn from preferences: reading, batches, the metrics of a step, and the accuracy on held-out pairs.

Each side of a pair is its own sequence; the two share the rows of their common beginning.
"""

# Shapes: T predicting positions, B sequences, two of each of P pairs, the preferred one first.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nmoe.config.commands import PreferenceConfig
from nmoe.data.packing import PackedStream
from nmoe.data.pairs import MakePair, Pair, read_pairs
from nmoe.eval.evaluate import Evaluation
from nmoe.learner.batch import Batch, alike, token_weights
from nmoe.recipes.run_loop import HeldOut
from nmoe.recipes.sequence_losses import content_keys
from nmoe.recipes.supervised import held_out_source
from nmoe.statistics import outcomes_interval
from nmoe.text.renderers import IGNORED, make_renderer
from nmoe.text.tokenizer import Tokenizer


def completion_batch(pairs: Sequence[Pair]) -> Batch:
    """Scores every learned token of both sides, with weights such that every pair counts 1 / (number of pairs)."""
    sides = [side for pair in pairs for side in pair.sides]
    scored = [[label != IGNORED for label in side.labels[1:]] for side in sides]
    targets = [
        [token if label == IGNORED else label for token, label in zip(side.ids[1:], side.labels[1:], strict=True)]
        for side in sides
    ]
    return _in_pairs([side.ids[:-1] for side in sides], targets, scored)


def reward_batch(pairs: Sequence[Pair]) -> Batch:
    """Scores the position that reads the last token of each sequence, with weights as in `completion_batch`."""
    sides = [side.ids for pair in pairs for side in pair.sides]
    return _in_pairs(sides, *_last_tokens(sides))


def last_token_batch(sequences: Sequence[Sequence[int]]) -> Batch:
    """Sequences that are no pairs, each scored at the position that reads its last token."""
    return _batch(sequences, *_last_tokens(sequences))


def _last_tokens(sequences: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[bool]]]:
    return [[0] * len(ids) for ids in sequences], [[False] * (len(ids) - 1) + [True] for ids in sequences]


def _in_pairs(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]]
) -> Batch:
    """A batch whose sequences 2 p and 2 p + 1 are pair p, the preferred one first."""
    shared = [alike(inputs[i], inputs[i + 1]) for i in range(0, len(inputs), 2)]
    return replace(
        _batch(inputs, targets, scored),
        prefixes=tuple((pair, rows) for pair, rows in enumerate(shared) for _ in range(2)),
        pairs=tuple((pair, preferred) for pair in range(len(shared)) for preferred in (True, False)),
    )


def _batch(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]]
) -> Batch:
    lengths = tuple(map(len, inputs))
    scored_T = torch.tensor([position for sequence in scored for position in sequence])
    return Batch(
        lengths=lengths,
        inputs_T=torch.tensor([token for sequence in inputs for token in sequence]),
        targets_T=torch.tensor([token for sequence in targets for token in sequence]),
        scored_T=scored_T,
        weights_T=token_weights("sequence", scored_T, lengths),
    )


@dataclass(frozen=True)
class Preferences:
    """Pairs to train on, the stream that hands out their indices, held-out pairs (possibly none), and notes to print about them."""

    pairs: list[Pair]
    stream: PackedStream
    held_out: list[Pair]
    notes: list[str]

    def take(self) -> list[int]:
        """The indices of the next step's pairs."""
        return self.stream.take()


def read_preferences(
    config: PreferenceConfig, tokenizer: Tokenizer, make: MakePair, context_tokens: int
) -> Preferences:
    """Reads the pairs and divides them into training and held-out pairs. Raises UserError as `nmoe.data.pairs.read_pairs` does."""
    records, seed = config.records, config.run.seed
    renderer = make_renderer(tokenizer, records.format)
    read = read_pairs(records, renderer, make, context_tokens)
    notes, held_out = list(read.notes), []
    if (settings := records.held_out_dataset) is not None:
        other = read_pairs(settings, renderer, make, context_tokens)
        held_out = other.pairs
        notes += [f"held out: {note}" for note in other.notes]
    elif records.held_out > 0:
        read, drawn = read.split(records.held_out, seed)
        held_out = drawn.pairs
        notes.append(f"held out: {len(held_out):,} of them")
    lengths = [sum(pair.positions) for pair in read.pairs]
    stream = PackedStream(lengths, records.tokens_per_step, seed, read.fingerprint)
    notes.append(
        f"packing: {len(read.pairs):,} pairs in {stream.steps_per_epoch:,} steps an epoch, {stream.utilisation:.1%} full"
    )
    return Preferences(read.pairs, stream, held_out, notes)


def reward_metrics(rewards_B: Tensor) -> dict[str, float]:
    """Mean rewards of both sides of a step's pairs, their mean difference, and the share of pairs in the right order."""
    chosen_P, rejected_P = rewards_B[0::2].double(), rewards_B[1::2].double()
    return {
        "rewards/chosen": float(chosen_P.mean()),
        "rewards/rejected": float(rejected_P.mean()),
        "rewards/margins": float((chosen_P - rejected_P).mean()),
        "rewards/accuracies": float((chosen_P > rejected_P).double().mean()),
        "pairs": float(len(chosen_P)),
    }


def held_out_pairs(rewards_B: Tensor, pairs: Sequence[Pair], config: PreferenceConfig) -> HeldOut:
    """The share of pairs whose preferred side has the higher reward, with its 95% interval over prompts. A tie counts as half, and
    the interval holds the share whichever way the ties are broken: at the start of DPO, where all rewards are 0, it is 50%
    [0%, 100%]."""
    margins: Sequence[float] = (rewards_B[0::2].double() - rewards_B[1::2].double()).tolist()
    shares = [(1 + (margin > 0) - (margin < 0)) / 2 for margin in margins]
    prompts = [pair.prompt for pair in pairs]
    ties = sum(margin == 0 for margin in margins)
    low = outcomes_interval([margin > 0 for margin in margins], prompts).low
    high = outcomes_interval([margin >= 0 for margin in margins], prompts).high
    accuracy = Evaluation(
        "pair_accuracy",
        held_out_source(config.records),
        len(margins),
        sum(shares) / len(shares),
        low,
        high,
        outcomes=dict(zip(_keys(pairs), shares, strict=True)),
    )
    figures = {"held_out_accuracy": accuracy.value, "held_out_margin": sum(margins) / len(margins)}
    tied = f", {ties:,} of them ties" if ties else ""
    return HeldOut(figures, f"held-out {accuracy}{tied}", [accuracy.record()])


def _keys(pairs: Sequence[Pair]) -> list[str]:
    return content_keys(json.dumps([[side.ids, side.labels] for side in pair.sides]).encode() for pair in pairs)
