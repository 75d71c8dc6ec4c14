"""The demonstration: reinforcement learning on a laptop, in minutes, of a released model or of one from nothing. `nmoe speedrun`"""

from nmoe.speedrun.speedrun import speedrun

__all__ = ["speedrun"]
