"""Bounds the work of one step: the tokens of its largest micro-batch, and the sequences that the engine samples at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from nmoe.config.commands import (
    PretrainConfig,
    ProbedConfig,
    RecordsConfig,
    RLConfig,
    RunConfig,
    SelfplayConfig,
    VerifierConfig,
)
from nmoe.config.environment import EnvironmentSettings, reseeded
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.recipes.setup import load_tokenizer

# Problems whose prompts are rendered to learn how long prompts are.
_PROBLEMS = 64


@dataclass(frozen=True)
class Prompts:
    """The lengths in tokens of a run's longest prompts: in the training environment, and by the number of each [[eval]] table.

    A table without an entry uses the training environment.
    """

    training: int
    probes: dict[int, int]


@dataclass(frozen=True)
class Work:
    """Upper bounds on the tokens that a step processes.

    `tokens` counts the largest micro-batch, with the prompt of each sequence. `rows` counts its tokens without
    repetition, because the samples of a group share the computation of their prompt. `scored` counts tokens whose
    logits are computed. Between two weight updates, the engine samples `sampled` sequences, which have at most
    `sampled_tokens` tokens in all, each prompt counted once per group.
    """

    tokens: int
    rows: int
    scored: int
    sampled: int = 0
    sampled_tokens: int = 0


def prompts_of(config: RunConfig) -> Prompts | None:
    """Measures the longest prompts among the first problems of the run's environments.

    Returns None if the run samples nothing, or if an environment cannot be read now.
    """
    with suppress(UserError):
        if isinstance(config, RLConfig):
            training = _longest(config, reseeded(config.environment, config.run.seed))
            return Prompts(training, dict(_probes(config)))
        if isinstance(config, ProbedConfig) and config.probes:
            return Prompts(0, dict(_probes(config)))
    return None


def _probes(config: RLConfig | ProbedConfig) -> Iterator[tuple[int, int]]:
    for number, probe in enumerate(config.eval):
        if probe.environment is not None:
            yield number, _longest(config, probe.environment)


def _longest(config: RunConfig, settings: EnvironmentSettings) -> int:
    environment = Environment.from_settings(settings, load_tokenizer(config.model))
    order, limit = environment.pool.order, settings.budget.prompt_tokens or 2**62
    problems = (order.at(position) for position in range(order.size or _PROBLEMS))
    lengths = [len(environment.prompts.ids(problem)) for problem in islice(problems, _PROBLEMS)]
    return max((length for length in lengths if length <= limit), default=limit)


def work_of(config: RunConfig, context: int, prompts: Prompts | None = None, ranks: int = 1) -> Work:
    """Bounds the work of one rank in one step. Prompts of unknown length are as long as `context` and the environment's
    budget permit."""
    budget = config.batch.tokens_per_microbatch
    if not isinstance(config, RLConfig | SelfplayConfig):
        tokens = min(budget, math.ceil(_tokens_of_step(config) / ranks))
        return Work(tokens, tokens, tokens, *_asked(config, context, prompts))
    samples = config.batch.prompts_per_step * config.batch.group_size
    if isinstance(config, SelfplayConfig):
        # Its prompts are proofs and judgements that the model writes itself.
        return Work(budget, budget, budget, samples, samples * context)
    batch = config.batch
    prompt, longest = lengths(config, context, None if prompts is None else prompts.training)
    of_update = math.ceil(samples / batch.updates_per_step / ranks)
    together = max(1, min(of_update, budget // longest))
    groups = math.ceil(together / batch.group_size)
    drawn = math.ceil(batch.prompts_per_step * batch.oversampling) * (1 + batch.max_refills)
    asked = drawn * batch.group_size, drawn * (prompt + batch.group_size * (longest - prompt))
    rows = groups * prompt + together * (longest - prompt)
    sampled = max(asked, _asked(config, context, prompts), key=lambda one: one[1])
    return Work(together * longest, rows, together * (longest - prompt), *sampled)


def lengths(config: RLConfig, context: int, known: int | None = None) -> tuple[int, int]:
    """Returns the tokens of the longest prompt, `known` or as long as it may be, and of the longest sequence."""
    environment, new = config.environment, config.sampling.max_new_tokens
    new = min(new, environment.budget.completion_tokens or new)
    prompt = _prompt(environment, context, new, known)
    # What tools say is part of a sequence, and is not known.
    return prompt, context if environment.tools is not None else min(context, prompt + new)


def _prompt(environment: EnvironmentSettings, context: int, new: int, known: int | None) -> int:
    room = max(1, context - new)
    return min(room, environment.budget.prompt_tokens or room, known or room)


def _asked(config: RunConfig, context: int, prompts: Prompts | None) -> tuple[int, int]:
    """Returns the number of sequences, and of their tokens, for the [[eval]] table that samples the most."""
    found = [(0, 0)]
    for number, probe in enumerate(config.eval if isinstance(config, RLConfig | ProbedConfig) else ()):
        environment = probe.environment
        if environment is None:
            if not isinstance(config, RLConfig):
                continue
            environment = config.environment
        known = None if prompts is None else prompts.probes.get(number, prompts.training)
        new = probe.max_tokens or (config.sampling.max_new_tokens if isinstance(config, RLConfig) else context - 1)
        prompt, samples = _prompt(environment, context, new, known), probe.sampled.samples
        found.append((probe.problems * samples, probe.problems * (prompt + samples * new)))
    return max(found, key=lambda one: one[1])


def _tokens_of_step(config: RunConfig) -> int:
    if isinstance(config, PretrainConfig):
        return config.data.tokens_per_step
    if isinstance(config, VerifierConfig):
        return config.verifier.tokens_per_step
    assert isinstance(config, RecordsConfig), "every other run samples"
    return config.records.tokens_per_step
