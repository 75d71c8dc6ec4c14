"""The demonstration: a model trained from nothing to reinforcement learning, on a laptop, in minutes. `nmoe speedrun`"""

from nmoe.speedrun.speedrun import speedrun

__all__ = ["speedrun"]
