"""A taskset for verifiers 0.4 (v1): write a text backwards. It knows nothing of nmoe."""

import itertools
import random
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf


class ReverseTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def backwards(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.prompt_text.split()[-1][::-1])


class ReverseConfig(vf.TasksetConfig):
    split: Literal["train", "eval"] = "train"


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self) -> Iterator[ReverseTask]:
        texts = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
        random.Random(0).shuffle(texts)
        for text in texts[200:] if self.config.split == "train" else texts[:200]:
            yield ReverseTask(vf.TaskData(prompt=f"Write backwards: {text}"), self.config.task)


__all__ = ["ReverseTaskset"]
