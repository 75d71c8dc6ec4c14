"""Sorting digits: "Sort: 53914" -> "13459". The difficulty is the number of digits."""

from __future__ import annotations

import random

from nmoe.envs.tasks.digits import DigitsTask, random_digits


class SortTask(DigitsTask):
    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        digits = random_digits(rng, difficulty)
        return f"Sort: {digits}", "".join(sorted(digits))

    def split_key(self, question: str) -> str:
        """Sorts the digits: "Sort: 312" held out and "Sort: 321" trained on, with the same answer, would be a leak."""
        return "".join(sorted(question.removeprefix("Sort: ")))
