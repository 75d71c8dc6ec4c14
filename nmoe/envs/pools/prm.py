"""Turns solutions with labelled steps (PRM800K, Math-Shepherd, stepwise records) into problems, read and cleaned as in `nmoe
verifier`.

    prm_step      one problem for each labelled step: the problem and the steps through this one; the gold is its label
    prm_solution  one problem for each solution: the problem and all its steps; the gold is 0, 0.5 or 1

Equal steps of the same problem give only one problem; contradictory labels are dropped (`nmoe.data.prm.settle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from nmoe.config.tables.pools import PrmPool
from nmoe.data.prm import LabelledSteps, read_source
from nmoe.data.prm.labelled import prefix_keys
from nmoe.envs.pools.pool import Order, Shuffled, fingerprint_of
from nmoe.envs.tasks import TASKS
from nmoe.errors import UserError
from nmoe.types import Problem


@dataclass(frozen=True)
class _Judged:
    """A problem of this pool: the first `end` steps of a solution, and the gold, which is a step's label or the solution's
    score."""

    solution: LabelledSteps
    end: int
    gold: str


def prm_order(name: str, settings: PrmPool) -> Order:
    """Builds an order that cycles through the problems of a source with labelled steps, reshuffled each epoch.

    Raises UserError for a source that cannot be read or holds no label of the requested kind, and for a malformed record, with
    its file and line.
    """
    reading = read_source(settings.source, settings.split, settings.prm800k, settings.math_shepherd, None)
    found = _steps(reading.solutions) if settings.task_type == "prm_step" else _solutions(reading.solutions)
    judged = list(islice(found, settings.max_examples))
    if not judged:
        raise UserError(
            f"{settings.source}, split {settings.split!r}: no solution whose steps all have labels to score it by"
        )

    def problem(index: int) -> Problem:
        one = judged[index]
        record = {"steps": list(one.solution.steps[: one.end])}
        question, gold, metadata = TASKS[settings.task_type].pose(one.solution.problem, one.gold, record)
        metadata = {"record": index, "where": one.solution.where, **metadata}
        return Problem(f"{name}/{index}", settings.task_type, question, gold, name, metadata)

    content = fingerprint_of(
        settings.task_type, *((one.solution.problem, one.solution.steps[: one.end], one.gold) for one in judged)
    )
    return Shuffled(name, len(judged), problem, settings.seed, content, "; ".join(reading.lines()))


def _steps(solutions: list[LabelledSteps]) -> Iterator[_Judged]:
    seen = set()
    for solution in solutions:
        keys = prefix_keys(solution.problem, solution.steps)
        for end, (key, label) in enumerate(zip(keys, solution.labels, strict=True), start=1):
            if label is not None and key not in seen:
                seen.add(key)
                yield _Judged(solution, end, label)


def _solutions(solutions: list[LabelledSteps]) -> Iterator[_Judged]:
    seen = set()
    for solution in solutions:
        key = prefix_keys(solution.problem, solution.steps)[-1]
        if solution.score is not None and not solution.alternative and key not in seen:
            seen.add(key)
            yield _Judged(solution, len(solution.steps), f"{solution.score:g}")
