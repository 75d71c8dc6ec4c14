"""Supervised fine-tuning (SFT): trains on the assistant's messages in conversations by cross-entropy. `nmoe sft CONFIG`

Whole sequences are packed into the token budget of a step (best-fit decreasing), and do not attend to each other.
Several sources are mixed by weight.
"""

# Shapes: T predicting positions, N scored positions.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from nmoe.config.commands import SFTConfig
from nmoe.data.examples import Example, ExampleMixture, Examples, read_examples, split_together
from nmoe.data.packing import PackedStream
from nmoe.errors import UserError
from nmoe.learner.batch import Batch, common_prefixes, token_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.parallel.gang import everywhere
from nmoe.recipes.run_loop import HeldOut
from nmoe.recipes.sequence_losses import SequenceLosses, content_keys, loss_note, loss_result
from nmoe.recipes.setup import Start, load_tokenizer, settle, with_steps
from nmoe.recipes.supervised import Supervised, held_out_source, records_source, supervise
from nmoe.text.renderers import IGNORED, make_renderer
from nmoe.text.tokenizer import Tokenizer


def example_batch(examples: Sequence[Example], *, share_prefixes: bool = False) -> Batch:
    """Makes a batch of tokenized conversations; its loss is the mean over their learned tokens.

    With `share_prefixes`, the common prefix of sequences is computed once.
    """
    lengths = tuple(len(example.ids) - 1 for example in examples)
    inputs_T = torch.from_numpy(np.concatenate([example.ids[:-1] for example in examples]).astype(np.int64))
    following_T = torch.from_numpy(np.concatenate([example.ids[1:] for example in examples]).astype(np.int64))
    labels_T = torch.from_numpy(np.concatenate([example.labels[1:] for example in examples]).astype(np.int64))
    scored_T = labels_T != IGNORED
    return Batch(
        lengths=lengths,
        inputs_T=inputs_T,
        targets_T=torch.where(scored_T, labels_T, following_T),
        scored_T=scored_T,
        weights_T=token_weights("token", scored_T, lengths),
        prefixes=common_prefixes([example.ids[:-1] for example in examples]) if share_prefixes else None,
    )


def held_out_loss(learner: Learner, examples: Sequence[Example], source: str) -> HeldOut:
    """Computes the mean loss over the learned tokens of held-out examples, with its 95% interval over sequences if
    there are enough."""
    batch = example_batch(examples)
    logprobs_N = learner.logprobs(batch).result().double().cpu()
    loss = float(-logprobs_N.mean())
    keys = content_keys(example.ids.tobytes() + example.labels.tobytes() for example in examples)
    losses = SequenceLosses.of(batch, logprobs_N, keys)
    result = loss_result(source, loss, [(1.0, losses)])
    return HeldOut({"held_out_loss": loss}, loss_note(result), [result])


def sft(config: SFTConfig) -> Path:
    """Fine-tunes a model on conversations until the configuration's last step, and returns the run directory."""
    config, threads = settle(config)
    tokenizer = load_tokenizer(config.model)
    start = everywhere(Start.of, config, tokenizer)
    sources, held_out, notes = _read(config, tokenizer, start.model.config.context_tokens)
    if config.records.sources:
        stream: _Mixed | _Packed = _Mixed(config, sources)
    else:
        stream = _Packed(config, sources[0])
        config = with_steps(config, stream.steps_per_epoch)
    learner = everywhere(start.learner, config)
    notes += stream.notes(config.run.steps)

    def next_batch() -> Batch:
        return example_batch(stream.next_examples(), share_prefixes=config.records.share_prefixes)

    recipe = Supervised(
        config,
        learner,
        tokenizer,
        cross_entropy,
        stream,
        records_source(config.records),
        next_batch=next_batch,
        data_notes=notes,
        held_out=None
        if held_out is None
        else lambda: held_out_loss(learner, held_out, held_out_source(config.records)),
        metrics=lambda batch, result: {
            "learned_tokens": float(batch.scored_T.sum()),
            "packing_utilisation": batch.tokens / config.records.tokens_per_step,
            **stream.tokens_of_sources,
        },
    )
    return supervise(recipe, threads)


class _Packed(PackedStream):
    """The batches of a single dataset, packed into steps."""

    tokens_of_sources: Mapping[str, float] = MappingProxyType({})

    def __init__(self, config: SFTConfig, examples: Examples) -> None:
        super().__init__(examples.lengths, config.records.tokens_per_step, config.run.seed, examples.fingerprint)
        self._examples = examples

    def next_examples(self) -> list[Example]:
        return [self._examples[index] for index in self.take()]

    def notes(self, steps: int) -> list[str]:
        return [
            f"packing: {len(self._examples):,} sequences in {self.steps_per_epoch:,} steps an epoch, {self.utilisation:.1%} full; "
            f"{steps:,} steps = {steps / self.steps_per_epoch:.2f} epochs"
        ]


class _Mixed(ExampleMixture):
    """The batches of several datasets, mixed by weight. `tokens_of_sources` counts the tokens of each dataset in the
    last batch."""

    def __init__(self, config: SFTConfig, sources: Sequence[Examples]) -> None:
        self._names = [source.label for source in config.records.sources]
        weights = [source.weight for source in config.records.sources]
        super().__init__(sources, weights, config.run.seed)
        self._shares = [weight / sum(weights) for weight in weights]
        self._budget = config.records.tokens_per_step
        self.tokens_of_sources: dict[str, float] = {}

    def next_examples(self) -> list[Example]:
        taken = self.take(self._budget)
        self.tokens_of_sources = {f"source_tokens/{name}": 0.0 for name in self._names}
        for source, example in taken:
            self.tokens_of_sources[f"source_tokens/{self._names[source]}"] += len(example.ids) - 1
        return [example for _, example in taken]

    def notes(self, steps: int) -> list[str]:
        described = zip(self._names, self._shares, self.sequences_and_tokens, strict=True)
        return [
            f"{name}, {share:.1%} of the tokens: {sequences:,} sequences of {tokens:,} tokens: "
            f"{share * steps * self._budget / tokens:.2f} epochs"
            for name, share, (sequences, tokens) in described
        ]


def _read(
    config: SFTConfig, tokenizer: Tokenizer, context_tokens: int
) -> tuple[list[Examples], list[Example] | None, list[str]]:
    """Reads the data; returns the training examples of each source, the held-out examples (or None), and notes to print."""
    records = config.records
    renderer = make_renderer(tokenizer, records.format)
    sources = [read_examples(dataset, renderer, tokenizer, context_tokens) for dataset in records.datasets]
    notes = [note for examples in sources for note in examples.notes()]
    if (settings := records.held_out_dataset) is not None:
        others = read_examples(settings, renderer, tokenizer, context_tokens)
        return sources, others.listed(), [*notes, *(f"held out: {note}" for note in others.notes())]
    if records.held_out > 0:
        parts = split_together(sources, records.held_out, config.run.seed)
        for dataset, (training, _) in zip(records.datasets, parts, strict=True):
            if not len(training):
                raise UserError(f"{dataset.path}: records.held_out = {records.held_out:g} leaves none to train on")
        held_out = [example for _, held in parts for example in held.listed()]
        count = sum(held.records for _, held in parts)
        note = f"held out: {count:,} records = {len(held_out):,} sequences"
        return [training for training, _ in parts], held_out, [*notes, note]
    return sources, None, notes
