"""Supervised fine-tuning: cross-entropy on the assistant's messages in conversations. `nmoe sft CONFIG`

Whole sequences are packed into the token budget of a step (best-fit decreasing); none attends to another.
"""

# Shapes: T predicting positions, N scored positions.

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nmoe.config.commands.supervised import SFTConfig
from nmoe.data.examples import Example, Examples, read_examples
from nmoe.data.packing import PackedStream
from nmoe.learner.batch import Batch, common_prefixes, token_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.recipes.run_loop import HeldOut
from nmoe.recipes.setup import add_adapter, build_model, load_tokenizer, optimizer_settings, settle, with_steps
from nmoe.recipes.supervised import Supervised, held_out_source, supervise
from nmoe.text.renderers import IGNORED, make_renderer
from nmoe.text.tokenizer import Tokenizer


def example_batch(examples: Sequence[Example], *, share_prefixes: bool = False) -> Batch:
    """Predicts the learned tokens after the first of each sequence. The loss is the mean over all of them. With `share_prefixes`,
    sequences with a common beginning run it once."""
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


def held_out_loss(learner: Learner, examples: Examples, source: str) -> HeldOut:
    """The mean loss over all learned tokens, with its 95% interval over sequences. It is a ratio of means, whose error is that of
    each sequence's loss in excess of the mean (Cochran, Sampling Techniques, 1977, section 6.4)."""
    batch = example_batch([examples[index] for index in range(len(examples))])
    logprobs_N = learner.logprobs(batch).result().double().cpu()
    loss = float(-logprobs_N.mean())
    beyond_T = torch.zeros(batch.tokens, dtype=torch.float64)
    beyond_T[batch.scored_T] = -logprobs_N - loss
    error = math.sqrt(sum(float(part.sum()) ** 2 for part in beyond_T.split(list(batch.lengths)))) / len(logprobs_N)
    result = {
        "mode": "held_out_loss",
        "dataset": source,
        "problems": len(examples),
        "value": loss,
        "low": loss - 1.96 * error,
        "high": loss + 1.96 * error,
        "lower_is_better": True,
    }
    return HeldOut({"held_out_loss": loss}, f"held-out loss {loss:.4f} +- {1.96 * error:.4f}", [result])


def sft(config: SFTConfig) -> Path:
    """Runs the configuration to its last step and returns the run directory."""
    config, threads = settle(config)
    tokenizer = load_tokenizer(config.model)
    model = build_model(config.model, tokenizer, config.run.seed)
    lora = add_adapter(config, model)
    examples, held_out, notes = _read(config, tokenizer, model.config.context_tokens)
    stream = PackedStream(examples.lengths, config.records.tokens_per_step, config.run.seed, examples.fingerprint)
    config = with_steps(config, stream.steps_per_epoch)
    learner = Learner(
        model, optimizer_settings(config), config.run.steps, config.batch.tokens_per_microbatch, lora=lora
    )
    notes.append(
        f"packing: {len(examples):,} sequences in {stream.steps_per_epoch:,} steps an epoch, {stream.utilisation:.1%} full; "
        f"{config.run.steps:,} steps = {config.run.steps / stream.steps_per_epoch:.2f} epochs"
    )

    def next_batch() -> Batch:
        chosen = [examples[index] for index in stream.take()]
        return example_batch(chosen, share_prefixes=config.records.share_prefixes)

    recipe = Supervised(
        config,
        learner,
        tokenizer,
        cross_entropy,
        stream,
        config.records.path,
        next_batch=next_batch,
        data_notes=notes,
        held_out=None
        if held_out is None
        else lambda: held_out_loss(learner, held_out, held_out_source(config.records)),
        metrics=lambda batch, result: {
            "learned_tokens": float(batch.scored_T.sum()),
            "packing_utilisation": batch.tokens / config.records.tokens_per_step,
        },
    )
    return supervise(recipe, threads)


def _read(config: SFTConfig, tokenizer: Tokenizer, context_tokens: int) -> tuple[Examples, Examples | None, list[str]]:
    """Training examples, held-out examples, and notes to print about both."""
    records = config.records
    renderer = make_renderer(tokenizer, records.format)
    examples = read_examples(records, renderer, tokenizer, context_tokens)
    notes = examples.notes()
    if (settings := records.held_out_dataset) is not None:
        held_out = read_examples(settings, renderer, tokenizer, context_tokens)
        return examples, held_out, [*notes, *(f"held out: {note}" for note in held_out.notes())]
    if records.held_out > 0:
        examples, held_out = examples.split(records.held_out, config.run.seed)
        return examples, held_out, [*notes, f"held out: {held_out.records:,} records = {len(held_out):,} sequences"]
    return examples, None, notes
