"""Puzzles of the package reasoning-gym, each scored by its own dataset's verifier (Stojanovski et al. 2025, arXiv:2505.24760)."""

from __future__ import annotations

import threading

from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask
from nmoe.grading.gym import SEVERAL_ANSWERS
from nmoe.grading.workers.pool import WorkerPool
from nmoe.types import Problem, Verdict


class ReasoningGymTask(QuestionTask):
    """Scores with the dataset's verifier, in worker processes with a deadline (`nmoe.grading.gym`).

    Only 1 is correct; the scores between 0 and 1 that some datasets give count where the pool asks for them (`partial`). The
    answer is the whole final message.
    """

    answer_form: AnswerForm = "final"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: WorkerPool | None = None

    def check_gold(self, problem: Problem) -> None:
        """Accepts any gold: every dataset of the package makes golds that its verifier reads."""

    def has_one_answer(self, problem: Problem) -> bool:
        return problem.metadata["dataset"] not in SEVERAL_ANSWERS

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, "?"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        known = problem.metadata
        entry = known["dataset"], known["config"], known["dataset_seed"], known["dataset_size"], known["index"]
        reply = await self._pool().call(*entry, attempt.answer, known.get("partial", False))
        if reply.status == "lost":
            return Verdict("error", 0.0, "score_answer", reply.value)
        if reply.status != "value":
            return Verdict.of(False, "score_answer", f"{reply.status}: {reply.value}")
        outcome = Verdict.of(reply.value == 1.0, "score_answer", "").outcome
        return Verdict(outcome, reply.value, "score_answer", f"{known['dataset']} gives {reply.value:g}")

    def _pool(self) -> WorkerPool:
        with self._lock:
            if self._workers is None:
                self._workers = WorkerPool("nmoe.grading.gym:score", memory_mb=4096)
            return self._workers
