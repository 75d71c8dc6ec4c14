"""Trains a reward model on preference pairs: a language model with a scalar head on the last token. `nmoe reward CONFIG`

The loss is Bradley-Terry, as in Ouyang et al. 2022 (arXiv:2203.02155, section 3.5). A checkpoint has the model's files
and `head.safetensors`; `nmoe.verifier.scorers` scores answers with it.
"""

# Shapes: N scored positions, the last of each of two sequences of a pair.

from __future__ import annotations

from pathlib import Path

from nmoe.config.commands import RewardConfig
from nmoe.data.pairs import answer_pair
from nmoe.learner.batch import Batch
from nmoe.learner.objectives.bradley_terry import bradley_terry
from nmoe.model.head import Head
from nmoe.parallel.gang import everywhere
from nmoe.recipes.preferences import held_out_pairs, read_preferences, reward_batch, reward_metrics
from nmoe.recipes.run_loop import HeldOut
from nmoe.recipes.setup import Start, load_tokenizer, settle, with_steps
from nmoe.recipes.supervised import Supervised, supervise


def train_reward_model(config: RewardConfig) -> Path:
    """Trains a reward model until the configuration's last step, and returns the run directory."""
    config, threads = settle(config)
    tokenizer = load_tokenizer(config.model)
    start = everywhere(Start.of, config, tokenizer)
    data = read_preferences(config, tokenizer, answer_pair, start.model.config.context_tokens)
    config = with_steps(config, data.stream.steps_per_epoch)
    learner = everywhere(start.learner, config, Head(start.model.config.hidden_size, 1, "reward"), head_only=True)
    held_out = reward_batch(data.held_out) if data.held_out else None

    def next_batch() -> Batch:
        return reward_batch([data.pairs[number] for number in data.take()])

    def evaluate() -> HeldOut:
        assert held_out is not None, "called where pairs are held out"
        return held_out_pairs(learner.head_outputs(held_out).result()[:, 0], data.held_out, config)

    recipe = Supervised(
        config,
        learner,
        tokenizer,
        bradley_terry(config.reward_model.margin, config.reward_model.centering),
        data.stream,
        config.records.path,
        next_batch=next_batch,
        data_notes=data.notes,
        held_out=None if held_out is None else evaluate,
        metrics=lambda batch, result: reward_metrics(result.tokens["reward"]),
    )
    return supervise(recipe, threads)
