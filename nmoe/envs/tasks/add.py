"""Adding two numbers: "Add: 47 + 85" -> "132". The difficulty is the number of digits of each."""

from __future__ import annotations

import random

from nmoe.envs.tasks.numeric import NumericTask


class AddTask(NumericTask):
    bare_final = True

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        smallest = 0 if difficulty == 1 else 10 ** (difficulty - 1)  # no leading zeros
        left, right = (rng.randrange(smallest, 10**difficulty) for _ in range(2))
        return f"Add: {left} + {right}", str(left + right)

    def split_key(self, question: str) -> str:
        """Sorts the operands: "Add: 47 + 85" held out and "Add: 85 + 47" trained on would be a leak."""
        return " + ".join(sorted(question.removeprefix("Add: ").split(" + "), key=int))
