"""Makes data from a policy's samples: preference pairs (`nmoe data pairs`) and solve rates (`nmoe data solve-rates`).

A pair consists of a correct and an incorrect sample of one problem. Both are well-formed, so that they differ in their
answers and not in their format; a problem without both gives no pair. Solve rates order a pool of problems: with
`easy_first = "-solve_rate"` it begins with the problems that this policy solves most often.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.config.loader import load_environment
from nmoe.config.modes import mode_of
from nmoe.config.tables.pools import JsonlPool
from nmoe.data.rows import read_rows
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.evaluate import refuse_open_problems
from nmoe.eval.outcomes import is_correct
from nmoe.eval.subject import SamplingInterruptedError, open_subject
from nmoe.runs.storage import write_atomically
from nmoe.trajectory import Group, Trajectory
from nmoe.types import ExpertWeightsForm


def write_pairs(
    checkpoint: Path,
    environment: Path,
    out: Path,
    problems: int,
    samples: int,
    temperature: float,
    seed: int,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
) -> str:
    """Samples problems and writes preference pairs to the file `out`; returns a line that says how many.

    Each pair is a JSON line with `prompt`, `chosen` and `rejected`, which are lists of messages. Raises UserError if no
    problem gives a pair, and for an environment whose format has no messages. After Ctrl-C, writes the pairs of the
    finished problems and raises SamplingInterruptedError.
    """
    with open_subject(
        checkpoint, environment, problems, on_held_out=False, device=device, expert_weights=expert_weights
    ) as subject:
        if subject.environment.settings.format == "boxed":
            raise UserError(f'{environment}: format = "boxed" has no messages to write a pair as')
        interrupted: SamplingInterruptedError | None = None
        groups: Sequence[Group]
        try:
            groups = subject.sample(problems, mode_of(None, samples, temperature), seed)
        except SamplingInterruptedError as error:
            groups, interrupted = error.groups, error
        lines = [json.dumps(record) + "\n" for group in groups for record in _pair(subject.environment, group)]
    if interrupted is not None and not lines:
        raise interrupted
    if not lines:
        raise UserError(
            f"{environment}: none of {len(groups)} problems has both a right and a wrong sample in good form; take more "
            "samples, or a policy that is neither perfect nor hopeless"
        )
    write_atomically(out, "".join(lines).encode())
    written = f"{out}: {len(lines)} pairs from {len(groups)} problems of {samples} samples each"
    if interrupted is not None:
        print(written)
        raise interrupted
    return written


def _pair(environment: Environment, group: Group) -> Iterator[dict[str, Any]]:
    sides: dict[bool, list[dict[str, str]]] = {}
    for trajectory in group.trajectories:
        if trajectory.grade.extras["format_ok"] == 1 and len(trajectory.turns) == 1:
            messages = _messages(environment, trajectory)
            # An empty message is well-formed, but a record with one would be refused.
            if all(message["content"].strip() for message in messages):
                sides.setdefault(is_correct(trajectory), messages)
    if len(sides) == 2:
        prompt = [{"role": m.role, "content": m.content} for m in environment.prompts.messages(group.problem)]
        yield {"problem": group.problem.id, "prompt": prompt, "chosen": sides[True], "rejected": sides[False]}


def _messages(environment: Environment, trajectory: Trajectory) -> list[dict[str, str]]:
    """Returns the sampled turn as messages in OpenAI's format, with Harmony's channels."""
    said = environment.renderer.transcript(trajectory.turns[-1].sample.token_ids)
    kept = [{key: value for key, value in message.items() if value is not None} for message in said]
    return [{"role": "assistant"} | message for message in kept if "content" in message]


FIELD = "solve_rate"


def write_solve_rates(
    checkpoint: Path,
    environment: Path,
    out: Path,
    problems: int | None,
    samples: int,
    temperature: float,
    seed: int,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
) -> str:
    """Samples problems, and writes the records of their file with an added `solve_rate`, the share of right samples, to `out`.

    `problems` limits this to the first problems that the environment draws. Records keep their order. Returns a line
    with their number and their mean solve rate. Raises UserError if the environment's pool is not a JSONL file, and for
    problems without a right answer. After Ctrl-C, writes the records of the finished problems and raises
    SamplingInterruptedError.
    """
    settings = load_environment(environment)
    pool = settings.task_pool
    if not isinstance(pool, JsonlPool):
        raise UserError(
            f'{environment}: solve rates are written beside the records of a file, and this pool is of type "{pool.type}"; write '
            'its records to a file, and name that with type = "jsonl"'
        )
    records = [record for _, record in read_rows(pool.path, form="jsonl")]
    with open_subject(
        checkpoint, settings, problems or len(records), on_held_out=False, device=device, expert_weights=expert_weights
    ) as subject:
        refuse_open_problems(subject.environment)
        interrupted: SamplingInterruptedError | None = None
        groups: Sequence[Group]
        try:
            groups = subject.sample(problems or len(records), mode_of(None, samples, temperature), seed)
        except SamplingInterruptedError as error:
            groups, interrupted = error.groups, error
    rated = list(with_rates(records, groups))
    if rated:
        write_atomically(out, "".join(json.dumps(record) + "\n" for record in rated).encode())
        mean = sum(record[FIELD] for record in rated) / len(rated)
        written = f"{out}: {len(rated):,} of {len(records):,} records, solved in {mean:.1%} of {samples} samples each"
    if interrupted is not None:
        if rated:
            print(written)
        raise interrupted
    return written


def with_rates(records: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yields the record of each group's problem with its solve rate, in the order of the records.

    If several records have the same problem, only the first of them is returned.
    """
    rates = {
        int(group.problem.metadata["record"]): sum(map(is_correct, group.trajectories)) / len(group.trajectories)
        for group in groups
    }
    for index in sorted(rates):
        yield {**records[index], FIELD: rates[index]}
