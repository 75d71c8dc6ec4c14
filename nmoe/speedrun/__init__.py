"""From nothing to a model that learned by reinforcement learning, on a laptop, in minutes. `nmoe speedrun`"""

from nmoe.speedrun.speedrun import speedrun

__all__ = ["speedrun"]
