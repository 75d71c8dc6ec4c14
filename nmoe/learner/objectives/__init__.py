"""Objectives (losses): pure functions from a model's outputs and a batch's scored tokens to a weighted sum and per-token
statistics."""

from nmoe.learner.objectives.base import Objective, Outputs, Scored, total
from nmoe.learner.objectives.cispo import cispo
from nmoe.learner.objectives.classification import classification
from nmoe.learner.objectives.clip import clip
from nmoe.learner.objectives.cross_entropy import cross_entropy
from nmoe.learner.objectives.divergence import reference_divergence
from nmoe.learner.objectives.dppo import dppo
from nmoe.learner.objectives.dro import dro
from nmoe.learner.objectives.entropy import entropy_bonus
from nmoe.learner.objectives.gspo import gspo
from nmoe.learner.objectives.step_classification import step_classification, step_logprobs
from nmoe.learner.objectives.value import value_loss

__all__ = [
    "Objective",
    "Outputs",
    "Scored",
    "cispo",
    "classification",
    "clip",
    "cross_entropy",
    "dppo",
    "dro",
    "entropy_bonus",
    "gspo",
    "reference_divergence",
    "step_classification",
    "step_logprobs",
    "total",
    "value_loss",
]
