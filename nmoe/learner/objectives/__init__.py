"""Objectives: pure functions from a model's outputs and a batch's scored tokens to a weighted sum and per-token statistics."""

from nmoe.learner.objectives.base import Objective, Outputs, Scored
from nmoe.learner.objectives.cross_entropy import cross_entropy
from nmoe.learner.objectives.policy_gradient import policy_gradient

__all__ = ["Objective", "Outputs", "Scored", "cross_entropy", "policy_gradient"]
