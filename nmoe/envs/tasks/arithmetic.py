"""Evaluating an expression: "Compute: 3 + 4 * 2" -> "11". The difficulty is the number of operators."""

from __future__ import annotations

import random

from nmoe.envs.tasks.numeric import NumericTask


class ArithmeticTask(NumericTask):
    """Operands are digits. * binds before + and -, which are evaluated from left to right. The answer is an integer."""

    bare_final = True

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        operands = [rng.randrange(10) for _ in range(difficulty + 1)]
        operators = [rng.choice("+-*") for _ in range(difficulty)]
        expression = str(operands[0])
        done, product = 0, operands[0]  # the value so far is `done` plus a product that may still grow
        for operator, operand in zip(operators, operands[1:], strict=True):
            expression += f" {operator} {operand}"
            if operator == "*":
                product *= operand
            else:
                done, product = done + product, operand if operator == "+" else -operand
        return f"Compute: {expression}", str(done + product)
