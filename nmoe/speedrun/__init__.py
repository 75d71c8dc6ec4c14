"""The demonstration `nmoe speedrun`: trains a released or a new small model by reinforcement learning, on a laptop, in minutes."""

from nmoe.speedrun.speedrun import speedrun

__all__ = ["speedrun"]
