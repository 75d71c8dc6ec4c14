"""Reversing digits: "Reverse: 53914" -> "41935". The difficulty is the number of digits."""

from __future__ import annotations

import random

from nmoe.envs.tasks.digits import DigitsTask, random_digits


class ReverseTask(DigitsTask):
    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        digits = random_digits(rng, difficulty)
        return f"Reverse: {digits}", digits[::-1]
