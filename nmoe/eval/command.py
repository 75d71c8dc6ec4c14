"""`nmoe eval`: evaluates a checkpoint, prints the results and, with `--out`, writes them with every answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nmoe.config.environment import load_environment
from nmoe.config.modes import mode_of
from nmoe.envs.scorer import Scorer
from nmoe.errors import UserError
from nmoe.eval.asked import Asked, effortful
from nmoe.eval.best_of_n import best_of_n, score_groups
from nmoe.eval.evaluate import Evaluation, refuse_open_problems, summarise
from nmoe.eval.outcomes import is_correct
from nmoe.eval.overlap import refuse_overlap
from nmoe.eval.subject import SamplingInterruptedError, open_subject
from nmoe.runs.resolve import resolve_checkpoint, trained_on
from nmoe.runs.storage import write_atomically
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group


def evaluate_command(
    checkpoint: Path,
    environment: Path,
    asked: Asked,
    load_scorer: Callable[[Path, str], Scorer],
    best_of: Path | None = None,
    out: Path | None = None,
) -> None:
    """Prints one line per evaluation, and writes them to `out` with the answers to every problem.

    With `best_of`, the scorer that `load_scorer` loads from it chooses among the samples.

    Raises UserError for a checkpoint or environment that cannot be loaded or sampled, and a device that is not there. After Ctrl-C,
    the finished problems are evaluated, printed and written, then SamplingInterruptedError is raised.
    """
    problems, mode, seed = asked.problems, asked.mode, asked.seed
    if best_of is not None and (mode.samples < 2 or mode.is_of_nondeterminism):
        raise UserError("--best-of chooses among several samples of a problem; ask for them with --samples N")
    if out is not None and out.is_dir():
        raise UserError(f"{out}: is a directory; --out names a file to write")
    scorer = None if best_of is None else load_scorer(best_of, asked.device)
    interrupted: SamplingInterruptedError | None = None
    directory = resolve_checkpoint(checkpoint)
    settings = effortful(load_environment(environment), asked.reasoning_effort)
    with open_subject(
        checkpoint,
        settings,
        problems,
        on_held_out=True,
        device=asked.device,
        expert_weights=asked.expert_weights,
        max_tokens=asked.max_tokens,
    ) as subject:
        refuse_open_problems(subject.environment)
        refuse_overlap(
            subject.environment, trained_on(checkpoint), problems, str(checkpoint), Tokenizer.load(directory)
        )
        env_id = subject.environment.settings.env_id
        groups: Sequence[Group] = ()
        results: list[Evaluation] = []
        try:
            groups = subject.sample(problems, mode, seed)
            if scorer is not None:
                greedy = subject.sample(problems, mode_of(), seed)
                scores = score_groups(subject.environment, groups, scorer)
                results = best_of_n(greedy, groups, scores, env_id, mode.temperature)
        except SamplingInterruptedError as error:
            groups, interrupted = groups or error.groups, error
        if groups and not results:
            results = summarise(groups, env_id, mode.temperature)
    for result in results:
        print(result)
    if out is not None:
        record = {
            "checkpoint": str(checkpoint),
            "environment": str(environment),
            "problems": problems,
            "mode": mode.name,
            "samples": mode.samples,
            "temperature": mode.temperature,
            "max_tokens": asked.max_tokens,
            "reasoning_effort": settings.reasoning_effort,
            "seed": seed,
            "best_of": None if best_of is None else str(best_of),
        }
        write_atomically(out, _record(record, results, groups, interrupted is not None).encode())
    if interrupted is not None:
        raise interrupted


def _record(settings: dict[str, Any], results: Sequence[Evaluation], groups: Sequence[Group], interrupted: bool) -> str:
    """The JSON that `--out` writes: the arguments, the evaluations and an entry for each problem."""
    problems = [
        {
            "id": group.problem.id,
            "question": group.problem.question,
            "gold": group.problem.gold,
            "answers": [trajectory.grade.answer for trajectory in group.trajectories],
            "correct": [is_correct(trajectory) for trajectory in group.trajectories],
            "failures": [trajectory.grade.failure for trajectory in group.trajectories],
        }
        for group in groups
    ]
    head = {
        **settings,
        "interrupted": interrupted,
        "evaluations": [replace(result, outcomes=None).record() for result in results],
    }
    return json.dumps({**head, "answers": problems}, indent=2) + "\n"
