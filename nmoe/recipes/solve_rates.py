"""How often a policy solves each problem of a pool: `nmoe data solve-rates RUN ENVIRONMENT FILE`.

With `easy_first = "-solve_rate"` a pool that reads the written file begins with what this policy solves most often.
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
from nmoe.errors import UserError
from nmoe.eval.evaluate import refuse_open_problems
from nmoe.eval.outcomes import is_correct
from nmoe.eval.subject import SamplingInterruptedError, open_subject
from nmoe.runs.storage import write_atomically
from nmoe.trajectory import Group
from nmoe.types import ExpertWeightsForm

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
    """Writes the records of the environment's pool, in their order, with the share of right samples as `solve_rate`; those of the
    first `problems` problems that the pool draws, or of all. Returns a line that says how many, and their mean.

    Raises UserError for a pool that is not a JSONL file, and for problems without a right answer. After Ctrl-C the records of
    finished problems are written before SamplingInterruptedError is raised.
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
    """The record of each group's problem, in the order of the records. A problem that several have is that of the first."""
    rates = {
        int(group.problem.metadata["record"]): sum(map(is_correct, group.trajectories)) / len(group.trajectories)
        for group in groups
    }
    for place in sorted(rates):
        yield {**records[place], FIELD: rates[place]}
