"""`Environment` under its documented older name; it lives in `nmoe.envs.environment`."""

from nmoe.envs.environment import Environment

__all__ = ["Environment"]
