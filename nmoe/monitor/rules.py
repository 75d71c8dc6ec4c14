"""Which rules watch a run: those of every recipe, and those of reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nmoe.config.commands.base import RunConfig
from nmoe.config.commands.rl import RLConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.pools import task_types
from nmoe.model.device import choose_device, kind_of, precision_for
from nmoe.model.exactness import numerics_here
from nmoe.monitor.clip import ClipRule
from nmoe.monitor.disk import DiskRule
from nmoe.monitor.entropy import EntropyRule
from nmoe.monitor.experts import ExpertsRule
from nmoe.monitor.flat import FlatRule
from nmoe.monitor.format import FormatRule
from nmoe.monitor.grad_norm import GradNormRule
from nmoe.monitor.grad_norm_rise import GradNormRiseRule
from nmoe.monitor.idle import IdleRule
from nmoe.monitor.kl import KLRule
from nmoe.monitor.length import LengthRule
from nmoe.monitor.memory import MemoryRule
from nmoe.monitor.mismatch import MismatchRule
from nmoe.monitor.monitor import Monitor
from nmoe.monitor.probe import ProbeRule
from nmoe.monitor.ratios import RatiosRule
from nmoe.monitor.reference import ReferenceRule
from nmoe.monitor.reward_hacking import RewardHackingRule, WrongRewardRule
from nmoe.monitor.reward_stuck import RewardStuckRule
from nmoe.monitor.rule import Rule
from nmoe.monitor.slow_disk import SlowDiskRule
from nmoe.monitor.solve_rate import SolveRateRule
from nmoe.monitor.stalled import StalledRule
from nmoe.monitor.truncation import TruncationRule


def monitor_of(config: RunConfig, experts: int, directory: Path) -> Monitor:
    """The monitor of a run. `experts` are the routed experts of a layer, 0 for none; `directory` is where the run is written."""
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
    )


def weighs_format(environment: EnvironmentSettings) -> bool:
    """Whether the reward asks for the format at all."""
    if environment.curriculum is not None:
        return any(stage.weights.format > 0 for stage in environment.curriculum.stages)
    return environment.rubric is not None and environment.rubric.format > 0


def rewards_right_answers_alone(environment: EnvironmentSettings) -> bool:
    """Whether the reward is pure exact match: nothing but correctness, and the efficiency of right answers, has a weight."""
    if environment.curriculum is not None or any(reward.weight for reward in environment.rewards):
        return False
    weights = {} if environment.rubric is None else environment.rubric.model_dump()
    return not any(weight for name, weight in weights.items() if name not in ("correctness", "efficiency"))


def asks_for_box(environment: EnvironmentSettings) -> bool:
    """Whether answers belong in a box: in plain text, and where a system message says so."""
    told = (environment.system, *environment.system_by_format.model_dump().values())
    return environment.format == "boxed" or any(r"\boxed" in text for text in told if text)
