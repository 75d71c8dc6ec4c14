"""Evaluates several models on several benchmarks, and prints a table with paired tests against the first model.

One model on one benchmark prints all its results instead of a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nmoe.config.environment import held_out
from nmoe.config.listing import columns
from nmoe.config.loader import load_environment
from nmoe.config.modes import mode_of, why_not_comparable
from nmoe.envs.rewards.reward import Scorer
from nmoe.errors import UserError
from nmoe.eval.best_of_n import best_of_n
from nmoe.eval.evaluate import NO_LABELS, Asked, Evaluation, effortful, label_of
from nmoe.eval.outcomes import Outcome
from nmoe.eval.overlap import TrainedOn
from nmoe.eval.pair import Pair, in_order
from nmoe.generation import sampling_notes
from nmoe.runs.progress import counting
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import make_directory, write_atomically
from nmoe.statistics import paired_difference, paired_p_value


@dataclass(frozen=True)
class Cell:
    """A table cell: the results of one model on one benchmark, of its parts and in its modes of sampling (`nmoe eval --mode`).
    `result` is the one that the table shows: over all problems, in the mode that the table was asked for."""

    checkpoint: Path
    benchmark: str
    evaluations: Sequence[Evaluation]
    result: Evaluation


@dataclass(frozen=True)
class Comparison:
    """The result of a model minus the first model's on the same problems, with the paired 95% interval and p-value."""

    checkpoint: Path
    benchmark: str
    problems: int
    difference: float
    low: float
    high: float
    p_value: float


def sweep(checkpoints: Sequence[Path], benchmarks: Sequence[Path], asked: Asked, results: Path) -> list[Cell]:
    """Evaluates every model on every benchmark; problems that are finished in the files in `results` are not sampled again.

    Raises UserError if a model or benchmark cannot be loaded (before anything is sampled), if a results file is
    damaged, and if a model was trained on a benchmark. At Ctrl-C raises SweepInterruptedError; finished problems are
    kept.
    """
    pairs = _pairs(checkpoints, benchmarks, asked, results)
    done = _finish(pairs)
    cells = []
    for pair, outcomes in zip(pairs, done, strict=True):
        evaluations = pair.evaluations(outcomes)
        result = next(one for one in evaluations if one.mode == asked.mode.name)
        cells.append(Cell(pair.checkpoint, pair.settings.env_id, evaluations, result))
    return cells


def _pairs(checkpoints: Sequence[Path], benchmarks: Sequence[Path], asked: Asked, results: Path) -> list[Pair]:
    directories = [resolve_checkpoint(one) for one in checkpoints]  # reported before a missing benchmark
    settings = [effortful(load_environment(one), asked.reasoning_effort) for one in benchmarks]
    if len({one.env_id for one in settings}) < len(settings):
        raise UserError(f"two benchmarks have the same env_id: {', '.join(one.env_id for one in settings)}")
    make_directory(results, "name another directory with --results")
    return [
        Pair(results, checkpoint, directory, one, asked)
        for checkpoint, directory in zip(checkpoints, directories, strict=True)
        for one in settings
    ]


def _finish(pairs: Sequence[Pair]) -> list[list[Outcome]]:
    """Samples all unfinished problems; returns the outcomes of each pair of model and benchmark."""
    for name in dict.fromkeys(pair.settings.env_id for pair in pairs if held_out(pair.settings) is not None):
        several = f"{name}: " if len({pair.settings.env_id for pair in pairs}) > 1 else ""
        print(f"{several}on the eval split, which training never meets")
    done = [pair.read() for pair in pairs]
    for directory, temperature in dict.fromkeys(
        (pair.directory, pair.asked.mode.temperature) for pair in pairs if not pair.is_complete
    ):
        for line in sampling_notes(directory, temperature):
            print(line)
    with counting("problems", sum(pair.asked.problems for pair in pairs)) as count:
        trained: TrainedOn | None = None
        for number, pair in enumerate(pairs):
            # The pairs of a model follow each other, so that its training data is read once.
            if trained is None or trained.who != pair.checkpoint:
                trained = TrainedOn(pair.checkpoint, pair.directory)
            before = sum(map(len, done[:number]))
            done[number] = pair.finish(done[number], partial(_count_on, count, before), trained)
    return done


def compare(cells: Sequence[Cell]) -> list[Comparison]:
    """Compares every model with the first one, by benchmark, on the problems that both have outcomes for.

    Raises UserError if two results are not comparable, as in different sampling modes.
    """
    first = {cell.benchmark: cell.result for cell in cells if cell.checkpoint == cells[0].checkpoint}
    found = []
    for cell in cells:
        base = first[cell.benchmark]
        if cell.checkpoint == cells[0].checkpoint:
            continue
        if (why := why_not_comparable(base.record(), cell.result.record())) is not None:
            raise UserError(f"{cell.checkpoint} and {cells[0].checkpoint} on {cell.benchmark}: {why}")
        left, right = base.outcomes or {}, cell.result.outcomes or {}
        both = [key for key in left if key in right]
        if len(both) < 2:
            continue
        a, b = [left[key] for key in both], [right[key] for key in both]
        estimate, p_value = paired_difference(a, b), paired_p_value(a, b)
        bounds = estimate.interval.low, estimate.interval.high
        found.append(Comparison(cell.checkpoint, cell.benchmark, len(both), estimate.value, *bounds, p_value))
    return found


def table(
    cells: Sequence[Cell], comparisons: Sequence[Comparison], labels: Mapping[Path, str] = NO_LABELS
) -> Iterator[str]:
    """Yields the lines to print: a row for each model, by its label or path, and a column for each benchmark, then the
    differences from the first model."""
    names = list(dict.fromkeys(cell.benchmark for cell in cells))
    models = list(dict.fromkeys(cell.checkpoint for cell in cells))
    shown = {(cell.checkpoint, cell.benchmark): cell.result for cell in cells}
    yield f"{cells[0].result.mode} with 95% intervals, of how many problems"
    rows = [("model", *names)]
    for model in models:
        results = [shown[model, name] for name in names]
        rows.append(
            (
                labels.get(model, str(model)),
                *(f"{r.value:.1%} [{r.low:.1%}, {r.high:.1%}] of {r.problems}" for r in results),
            )
        )
    yield from columns(rows)
    for (model, name), result in shown.items():
        if result.trained_on is not None:
            yield f"{labels.get(model, model)} was trained on {result.trained_on} of the {result.problems} problems of {name}"
    if not comparisons:
        return
    yield f"minus {labels.get(models[0], models[0])}, paired by problem"
    differences = {(one.checkpoint, one.benchmark): one for one in comparisons}
    rows = [("model", *names)]
    for model in models[1:]:
        pairs = [differences.get((model, name)) for name in names]
        rows.append((labels.get(model, str(model)), *("" if one is None else _difference(one) for one in pairs)))
    yield from columns(rows)


def _difference(one: Comparison) -> str:
    return f"{one.difference:+.1%} [{one.low:+.1%}, {one.high:+.1%}] p = {one.p_value:.3f}"


def table_json(
    cells: Sequence[Cell], comparisons: Sequence[Comparison], labels: Mapping[Path, str] = NO_LABELS
) -> dict[str, Any]:
    """Returns the table as JSON, with all results of every model and benchmark, and the labels of models that have one."""
    return {
        "results": [
            {"checkpoint": str(cell.checkpoint), **label_of(cell.checkpoint, labels), "benchmark": cell.benchmark}
            | {"evaluations": [replace(one, outcomes=None).record() for one in cell.evaluations]}
            for cell in cells
        ],
        "comparisons": [
            asdict(one) | {"checkpoint": str(one.checkpoint), **label_of(one.checkpoint, labels)} for one in comparisons
        ],
    }


def sweep_command(
    checkpoints: Sequence[Path],
    benchmarks: Sequence[Path],
    asked: Asked,
    results: Path,
    out: Path | None,
    load_scorer: Callable[[Path, str], Scorer],
    labels: Mapping[Path, str] = NO_LABELS,
) -> None:
    """Evaluates models on benchmarks, prints the table (or all results of a single pair), and writes JSON to `out`.

    With `asked.best_of`, `load_scorer` loads a scorer from this path, which chooses among the samples. Raises the
    errors of `sweep` and `compare`, and UserError if `out` is a directory or best-of is not possible.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{out}: is a directory; --out names a file to write")
    single = len(checkpoints) == len(benchmarks) == 1
    if asked.best_of is not None:
        if not single:
            raise UserError("--best-of is of one checkpoint on one benchmark")
        if asked.mode.samples < 2 or asked.mode.is_of_nondeterminism:
            raise UserError("--best-of chooses among several samples of a problem; ask for them with --samples N")
        (pair,) = _pairs(checkpoints, benchmarks, asked, results)
        pair = replace(pair, scorer=load_scorer(asked.best_of, asked.device))
        greedy = replace(pair, asked=replace(asked, mode=mode_of(), best_of=None), scorer=None)
        first, drawn = map(in_order, _finish([greedy, pair]))
        found: Sequence[Evaluation] = best_of_n(first, drawn, pair.settings.env_id, asked.mode.temperature)
        lines, record = list(map(str, found)), _single(pair, found, labels)
    elif single:
        (pair,) = _pairs(checkpoints, benchmarks, asked, results)
        (outcomes,) = _finish([pair])
        found = pair.evaluations(outcomes)
        lines, record = list(map(str, found)), _single(pair, found, labels)
    else:
        cells = sweep(checkpoints, benchmarks, asked, results)
        comparisons = compare(cells)
        lines, record = list(table(cells, comparisons, labels)), table_json(cells, comparisons, labels)
    for line in lines:
        print(line)
    if out is not None:
        write_atomically(out, json.dumps(record, indent=2).encode() + b"\n")


def _single(pair: Pair, evaluations: Sequence[Evaluation], labels: Mapping[Path, str]) -> dict[str, Any]:
    """Returns the results of one model on one benchmark as JSON: the settings, the results, and an entry for each problem."""
    shown = ("id", "question", "gold", "answers", "correct", "failures")
    answers = sorted(pair.records(), key=lambda record: record["key"])
    return {
        **pair.header(),
        **label_of(pair.checkpoint, labels),
        **pair.servers,
        "samples": pair.asked.mode.samples,
        "evaluations": [replace(one, outcomes=None).record() for one in evaluations],
        "answers": [{key: record[key] for key in shown} for record in answers],
    }


def _count_on(count: Callable[[int], None], before: int, more: int) -> None:
    count(before + more)
