"""The task of environments that play themselves in a separate process (`nmoe.envs.outside`): they have given the reward."""

from __future__ import annotations

from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask
from nmoe.types import Problem, Verdict


class OutsideTask(QuestionTask):
    """Judges nothing: the reward came with the episode, as its only exchange."""

    answer_form: AnswerForm = "whole"

    def check_gold(self, problem: Problem) -> None:
        return

    def knows_answer(self, problem: Problem) -> bool:
        return False

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return "An answer.", "Another answer."

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        reward = sum(exchange.reward for exchange in attempt.exchanges)
        return Verdict(
            "correct" if reward >= 1 else "incorrect", reward, "environment", f"the environment gave {reward:g}"
        )
