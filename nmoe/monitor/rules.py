"""Chooses the rules that watch a run: some for all runs, others only for reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nmoe.config.commands import RLConfig, RunConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.pools import task_types
from nmoe.model.device import choose_device, kind_of, precision_for
from nmoe.model.exactness import numerics_here
from nmoe.monitor.machine import DiskRule, IdleRule, MemoryRule, SlowDiskRule, StalledRule
from nmoe.monitor.mismatch import MismatchRule
from nmoe.monitor.monitor import Monitor, Rule
from nmoe.monitor.rewards import FlatRule, ProbeRule, RewardHackingRule, RewardStuckRule, SolveRateRule, WrongRewardRule
from nmoe.monitor.samples import EntropyRule, FormatRule, LengthRule, TruncationRule
from nmoe.monitor.update import ClipRule, ExpertsRule, GradNormRiseRule, GradNormRule, KLRule, RatiosRule, ReferenceRule


def monitor_of(config: RunConfig, experts: int, directory: Path) -> Monitor:
    """Makes the monitor of a run. `experts` is the number of routed experts per layer, 0 for a dense model. `directory` is the
    run's, whose disk is watched."""
    watch = config.monitor
    rules: list[Rule[Any]] = [
        GradNormRule(watch.grad_norm),
        GradNormRiseRule(watch.grad_norm_rise),
        DiskRule(watch.disk, directory),
        SlowDiskRule(watch.slow_disk),
        StalledRule(watch.stalled),
    ]
    device = choose_device(config.model.device)
    if not kind_of(device).on_host:
        rules += [MemoryRule(watch.memory, device), IdleRule(watch.idle, device)]
    if experts:
        rules.append(ExpertsRule(watch.experts, experts))
    if isinstance(config, RLConfig):
        own, exact = config.monitor, rewards_right_answers_alone(config.environment)
        rules += [
            RewardStuckRule(own.reward_stuck),
            FlatRule(own.flat),
            SolveRateRule(own.solve_rate),
            TruncationRule(own.truncation),
            ClipRule(own.clip),
            KLRule(own.kl),
            RatiosRule(own.ratios),
            ReferenceRule(own.reference),
            EntropyRule(own.entropy),
            LengthRule(own.length),
            ProbeRule(own.probe),
            (WrongRewardRule if exact else RewardHackingRule)(own.reward_hacking),
            _mismatch_rule(config, experts, device),
        ]
        if weighs_format(config.environment) or task_types(config.environment.task_pool) != {"open"}:
            rules.append(FormatRule(own.format, boxes=exact and asks_for_box(config.environment)))
        return Monitor(rules, own.first_steps)
    return Monitor(rules)


def _mismatch_rule(config: RLConfig, experts: int, device: torch.device) -> MismatchRule:
    model, sampling = config.model, config.sampling
    return MismatchRule(
        config.monitor.mismatch,
        precision_for(device, model.precision, model.numerics == "exact"),
        exact=numerics_here(model.numerics, device) == "exact",
        routes=bool(experts),
        truncates=sampling.top_p < 1 or sampling.top_k > 0,
        corrects=config.algorithm.correction != "none",
        servers=config.engine.on_servers,
    )


def weighs_format(environment: EnvironmentSettings) -> bool:
    """Returns whether the format of an answer has a weight in the rubric, or in any stage of the curriculum."""
    if environment.curriculum is not None:
        return any(stage.weights.format > 0 for stage in environment.curriculum.stages)
    return environment.rubric is not None and environment.rubric.format > 0


def rewards_right_answers_alone(environment: EnvironmentSettings) -> bool:
    """Returns whether only correctness, and the efficiency of right answers, are rewarded.

    Returns False for an environment with a curriculum, because its stages may reward more.
    """
    if environment.curriculum is not None or any(reward.weight for reward in environment.rewards):
        return False
    weights = {} if environment.rubric is None else environment.rubric.model_dump()
    return not any(weight for name, weight in weights.items() if name not in ("correctness", "efficiency"))


def asks_for_box(environment: EnvironmentSettings) -> bool:
    r"""Returns whether answers belong in a \boxed{}: the format is plain text (`boxed`), or a system message mentions a box."""
    systems = (environment.system, *environment.system_by_format.model_dump().values())
    return environment.format == "boxed" or any(r"\boxed" in text for text in systems if text)
