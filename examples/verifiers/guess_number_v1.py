"""TextArena's GuessTheNumber for verifiers 0.4 (v1), whose own taskset names other games only. It knows nothing of nmoe."""

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena.taskset import TextArenaData, TextArenaEnv, TextArenaTask


class GuessConfig(vf.TasksetConfig):
    game: Literal["GuessTheNumber-v0", "GuessTheNumber-v0-hardcore"] = "GuessTheNumber-v0"
    seeds: int = 100


class GuessTaskset(vf.Taskset[TextArenaTask, GuessConfig]):
    def load(self) -> Iterator[TextArenaTask]:
        prompt = "Guess a number from 1 to 20, as [5]."
        for seed in range(self.config.seeds):
            info = {"game": self.config.game, "seed": seed}
            yield TextArenaTask(TextArenaData(name=f"guess-{seed}", prompt=prompt, info=info), self.config.task)


__all__ = ["GuessTaskset", "TextArenaEnv"]
