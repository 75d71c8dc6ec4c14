"""Direct preference optimization (DPO): trains a policy on preference pairs without a reward model. `nmoe dpo CONFIG`

The method is by Rafailov et al. 2023 (arXiv:2305.18290), with the losses in `nmoe.learner.objectives.dpo`. The
reference model is the policy at the start of the run, with its adapter if one is trained. It computes the
log-probabilities of every pair once, before the first step.
"""

# Shapes: N scored tokens, B sequences, two of each pair.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nmoe.config.commands import DPOConfig
from nmoe.data.pairs import Pair, completion_pair
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives.dpo import dpo as dpo_objective
from nmoe.learner.objectives.dpo import implicit_rewards
from nmoe.learner.passes import PassResult
from nmoe.parallel.gang import everywhere
from nmoe.recipes.preferences import completion_batch, held_out_pairs, read_preferences, reward_metrics
from nmoe.recipes.run_loop import HeldOut
from nmoe.recipes.setup import Start, load_tokenizer, settle, with_steps
from nmoe.recipes.supervised import Supervised, supervise

# The most tokens of one batch of pairs that the reference scores.
REFERENCE_TOKENS = 2**20


def dpo(config: DPOConfig) -> Path:
    """Trains a policy by DPO until the configuration's last step, and returns the run directory."""
    config, threads = settle(config)
    tokenizer = load_tokenizer(config.model)
    start = everywhere(Start.of, config, tokenizer)
    data = read_preferences(config, tokenizer, completion_pair, start.model.config.context_tokens)
    config = with_steps(config, data.stream.steps_per_epoch)
    learner = everywhere(start.learner, config)
    # Scored before a resumed run loads its checkpoint: these are the weights at the start of the run.
    reference = [logprobs_N for part in _parts(data.pairs) for logprobs_N in _logprobs(learner, part)]
    held_out = _with_logprobs(learner, data.held_out) if data.held_out else None
    settings = config.preference

    def next_batch() -> Batch:
        taken = data.take()
        batch = completion_batch([data.pairs[number] for number in taken])
        return batch.with_reference(torch.cat([reference[number] for number in taken]))

    def rewards(batch: Batch, logprobs_N: Tensor) -> Tensor:
        assert batch.reference_logprobs_T is not None, "every batch has the reference's word on it"
        return implicit_rewards(
            logprobs_N,
            batch.reference_logprobs_T[batch.scored_T],
            batch.sequence_ids()[batch.scored_T],
            len(batch.lengths),
            settings.loss,
            settings.beta,
        )

    def metrics(batch: Batch, result: PassResult) -> dict[str, float]:
        return reward_metrics(rewards(batch, result.tokens["logprobs"]))

    def evaluate() -> HeldOut:
        assert held_out is not None, "called where pairs are held out"
        return held_out_pairs(rewards(held_out, learner.logprobs(held_out).result()), data.held_out, config)

    recipe = Supervised(
        config,
        learner,
        tokenizer,
        dpo_objective(settings.loss, settings.beta, settings.label_smoothing, settings.sft_weight),
        data.stream,
        config.records.path,
        next_batch=next_batch,
        data_notes=data.notes,
        held_out=None if held_out is None else evaluate,
        metrics=metrics,
    )
    return supervise(recipe, threads)


def _parts(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    part: list[Pair] = []
    tokens = 0
    for pair in pairs:
        if part and tokens + sum(pair.positions) > REFERENCE_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(pair)
        tokens += sum(pair.positions)
    yield part


def _with_logprobs(learner: Learner, pairs: Sequence[Pair]) -> Batch:
    batch = completion_batch(pairs)
    return batch.with_reference(learner.logprobs(batch).result())


def _logprobs(learner: Learner, pairs: Sequence[Pair]) -> Sequence[Tensor]:
    """Computes the log-probabilities of the answers of each pair under the current weights.

    Returns one tensor per pair: the learned tokens of the preferred answer, then of the other answer.
    """
    batch = completion_batch(pairs)
    scored_B = [int(part.sum()) for part in batch.scored_T.split(list(batch.lengths))]
    per_pair = [chosen + rejected for chosen, rejected in zip(scored_B[0::2], scored_B[1::2], strict=True)]
    return learner.logprobs(batch).result().split(per_pair)
