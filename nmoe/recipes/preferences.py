"""Preference pairs for DPO and reward models: reading, batches, metrics of a step, and accuracy on held-out pairs.

The two answers of a pair are two sequences of a batch; their common prefix is computed once.
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
    """Makes a batch of preference pairs for DPO; its loss covers the learned tokens of both answers of each pair.

    The weights of tokens are such that every pair has the weight 1 / (number of pairs).
    """
    sides = [side for pair in pairs for side in pair.sides]
    scored = [[label != IGNORED for label in side.labels[1:]] for side in sides]
    targets = [
        [token if label == IGNORED else label for token, label in zip(side.ids[1:], side.labels[1:], strict=True)]
        for side in sides
    ]
    return _in_pairs([side.ids[:-1] for side in sides], targets, scored)


def reward_batch(pairs: Sequence[Pair]) -> Batch:
    """Makes a batch of preference pairs for a reward model, whose head reads only the last token of each answer.

    Weights are as in `completion_batch`.
    """
    sides = [side.ids for pair in pairs for side in pair.sides]
    return _in_pairs(sides, *_last_tokens(sides))


def last_token_batch(sequences: Sequence[Sequence[int]]) -> Batch:
    """Makes a batch of single sequences, not pairs, for a reward model, whose head reads only the last token of each."""
    return _batch(sequences, *_last_tokens(sequences))


def _last_tokens(sequences: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[bool]]]:
    return [[0] * len(ids) for ids in sequences], [[False] * (len(ids) - 1) + [True] for ids in sequences]


def _in_pairs(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]]
) -> Batch:
    """Makes a batch in which sequences 2 p and 2 p + 1 are pair p, the preferred answer first."""
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
    """Preference pairs to train on, with a stream of their indices, the held-out pairs (possibly none), and notes to print."""

    pairs: list[Pair]
    stream: PackedStream
    held_out: list[Pair]
    notes: list[str]

    def take(self) -> list[int]:
        """Returns the indices of the pairs of the next step."""
        return self.stream.take()


def read_preferences(
    config: PreferenceConfig, tokenizer: Tokenizer, make: MakePair, context_tokens: int
) -> Preferences:
    """Reads the preference pairs and divides them into training and held-out pairs.

    `make` turns a record into a tokenized pair. Raises UserError as `nmoe.data.pairs.read_pairs` does.
    """
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
    """Computes the metrics of a step on pairs: the mean reward of both answers, their mean difference, and the accuracy.

    `rewards_B` alternates between preferred and rejected answers. The accuracy is the share of pairs whose preferred
    answer has the higher reward.
    """
    chosen_P, rejected_P = rewards_B[0::2].double(), rewards_B[1::2].double()
    return {
        "rewards/chosen": float(chosen_P.mean()),
        "rewards/rejected": float(rejected_P.mean()),
        "rewards/margins": float((chosen_P - rejected_P).mean()),
        "rewards/accuracies": float((chosen_P > rejected_P).double().mean()),
        "pairs": float(len(chosen_P)),
    }


def held_out_pairs(rewards_B: Tensor, pairs: Sequence[Pair], config: PreferenceConfig) -> HeldOut:
    """Computes the accuracy on held-out pairs: the share whose preferred answer has the higher reward, with a 95%
    interval over prompts.

    A tie counts as half. The interval contains the accuracy for any way to break the ties: at the start of DPO, where
    all rewards are 0, the result is 50% [0%, 100%].
    """
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
