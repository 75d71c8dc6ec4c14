"""Adding up digits, one after the other: "Sum: 4+7+2+5" -> "18". The difficulty is the number of additions."""

from __future__ import annotations

import random

from nmoe.envs.tasks.numeric import NumericTask


class SumTask(NumericTask):
    bare_final = True

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        # No zeros: every addition changes the total, so that a missing one shows.
        numbers = [rng.randint(1, 9) for _ in range(difficulty + 1)]
        return f"Sum: {'+'.join(map(str, numbers))}", str(sum(numbers))

    def split_key(self, question: str) -> str:
        """Sorts the numbers: the same sum in another order is the same problem."""
        return "+".join(sorted(question.removeprefix("Sum: ").split("+"), key=int))
