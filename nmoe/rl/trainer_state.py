"""How far a run is, as rewards are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerState:
    """Of TRL's state of the same name what a reward can depend on: `TrainerState(global_step=7, max_steps=100)`."""

    global_step: int = 0  # optimizer steps taken
    max_steps: int = 0  # those of the whole run, 0 where nothing is trained
