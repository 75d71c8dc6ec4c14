"""Conversations in which all that `five_stages.toml` rewards occurs, and none of it reliably: the corpus of its mid-training.

Every document asks for a sum of the environment, and calls the tool as in the whole conversations of `tool_corpus`: mostly in vain.
Some think before they speak, at more or less length, and some answer on no channel, where it does not count.
Reinforcement learning finds out stage by stage what earns a reward.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from nmoe.speedrun.tool_corpus import ToolDocuments, new_problem
from nmoe.text.harmony_format import MESSAGE, RETURN, HarmonyTokenizer
from nmoe.types import Message

# Shares of the documents that think first, and whose answer is on no channel. An answer left in the analysis would do as well, but
# then thinking and broken form go together, and the first stage unlearns what the second rewards.
THINKS, UNANSWERED = 0.5, 0.15
# From terse to wordy, so that efficiency has something to choose from.
THOUGHTS = ("let me see", "well let me see now", "well let me see now well let me see now")


class StageDocuments(ToolDocuments):
    """Makes the documents of one environment, whose pool is generated sums and whose only tool is python."""

    def __init__(self, environment: Path, tokenizer: HarmonyTokenizer) -> None:
        super().__init__(environment, tokenizer)
        self._rng = random.Random(0)
        self._opening = self._harmony.render_prompt([])

    def documents(self, seed: int, count: int) -> Iterator[list[int]]:
        self._rng = rng = random.Random(f"stages/{seed}")
        for _ in range(count):
            problem, copied = new_problem(rng, self._settings), new_problem(rng, self._settings)
            yield self._environment.prompt_ids(problem) + self._conversation(rng, problem, copied)

    def _said(self, message: Message, *, opens: bool) -> list[int]:
        rng = self._rng
        thoughts = [Message("assistant", rng.choice(THOUGHTS), "analysis")] if opens and rng.random() < THINKS else []
        if message.channel != "final" or rng.random() >= UNANSWERED:
            return self._harmony.render_completion([*thoughts, message])
        tokenizer = self._harmony.tokenizer
        return [
            *self._harmony.render(thoughts)[len(self._opening) if thoughts else 0 :],
            *(self._opening if thoughts else ()),
            tokenizer.special_id(MESSAGE),
            *tokenizer.encode(message.content),
            tokenizer.special_id(RETURN),
        ]
