"""A sweep: several models on several benchmarks in one mode, as a table with paired tests against the first model.

Each pair has a file of its own, to which every problem is appended when it is done. A sweep that was interrupted goes on where it
was, and gives what an uninterrupted one would have given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nmoe.config.environment import EnvironmentSettings, load_environment
from nmoe.config.listing import columns
from nmoe.config.modes import why_not_comparable
from nmoe.envs.pools.order import fingerprint_of
from nmoe.errors import UserError
from nmoe.eval.asked import Asked, effortful, sampling_record
from nmoe.eval.evaluate import Evaluation, refuse_open_problems, summarise_outcomes
from nmoe.eval.outcomes import Outcome, outcomes_of
from nmoe.eval.overlap import refuse_overlap
from nmoe.eval.subject import open_subject
from nmoe.runs.progress import counting
from nmoe.runs.resolve import resolve_checkpoint, trained_on
from nmoe.runs.storage import append_whole, make_directory, write_atomically
from nmoe.statistics import paired_difference, paired_p_value
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group


class SweepInterruptedError(UserError):
    """Ctrl-C during a sweep, which the same command goes on with."""

    exit_code = 130


@dataclass(frozen=True)
class Cell:
    """The results of one model on one benchmark; the one of the sweep's mode over all problems is `result`."""

    checkpoint: Path
    benchmark: str
    evaluations: Sequence[Evaluation]
    result: Evaluation


@dataclass(frozen=True)
class Comparison:
    """A model's result minus the first model's on the same problems, with the paired 95% interval and t test."""

    checkpoint: Path
    benchmark: str
    problems: int
    difference: float
    low: float
    high: float
    p_value: float


def models_and_benchmarks(named: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Divides `CHECKPOINT... BENCHMARK...`: the first is a model, and so are those behind it that hold one. Raises UserError where
    no benchmark is left."""
    count = 1
    while count < len(named) - 1 and _holds_a_model(named[count]):
        count += 1
    if len(named) < 2:
        raise UserError("eval needs a BENCHMARK behind the checkpoints: a TOML file, a directory or a packaged name")
    return list(named[:count]), list(named[count:])


def _holds_a_model(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        resolve_checkpoint(path)
    except UserError:
        return False
    return True


def sweep(checkpoints: Sequence[Path], benchmarks: Sequence[Path], asked: Asked, results: Path) -> list[Cell]:
    """Evaluates every model on every benchmark; what the files in `results` hold already is not done again.

    Raises UserError for what cannot be loaded, before anything is sampled; for a file of other settings; for a benchmark that a
    model was trained on. At Ctrl-C raises SweepInterruptedError; what is done is kept.
    """
    settings = [effortful(load_environment(one), asked.reasoning_effort) for one in benchmarks]
    if len({one.env_id for one in settings}) < len(settings):
        raise UserError(f"two benchmarks have the same env_id: {', '.join(one.env_id for one in settings)}")
    directories = [resolve_checkpoint(one) for one in checkpoints]
    make_directory(results, "name another directory with --results")
    pairs = [
        _Pair(results, checkpoint, directory, one, asked)
        for checkpoint, directory in zip(checkpoints, directories, strict=True)
        for one in settings
    ]
    done = [pair.read() for pair in pairs]
    with counting("problems", asked.problems * len(pairs)) as count:
        for place, pair in enumerate(pairs):
            before = sum(map(len, done[:place]))
            done[place] = pair.finish(done[place], partial(_count_on, count, before))
    return [pair.cell(outcomes) for pair, outcomes in zip(pairs, done, strict=True)]


@dataclass(frozen=True)
class _Pair:
    """One model and benchmark, with its file: a line that says what was asked, one for each problem, and one at the end."""

    results: Path
    checkpoint: Path
    directory: Path
    settings: EnvironmentSettings
    asked: Asked

    @property
    def file(self) -> Path:
        name = f"{self.checkpoint}__{self.settings.env_id}__{self.asked.mode.name}"
        plain = re.sub(r"[^\w.@+=-]+", "_", name).strip("_.")
        return self.results / f"{plain}.jsonl"

    def header(self) -> dict[str, Any]:
        weights = sorted(self.directory.glob("*.safetensors"))
        return {
            "checkpoint": str(self.checkpoint),
            "weights": fingerprint_of(*((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in weights)),
            "benchmark": self.settings.env_id,
            "environment": fingerprint_of(self.settings.model_dump_json()),
            "problems": self.asked.problems,
            "mode": self.asked.mode.name,
            "temperature": self.asked.mode.temperature,
            "max_tokens": self.asked.max_tokens,
            "reasoning_effort": self.settings.reasoning_effort,
            "seed": self.asked.seed,
        }

    def read(self) -> list[Outcome]:
        """The outcomes that the file holds; it is begun where there is none. A line torn by a kill is removed."""
        if not self.file.exists():
            write_atomically(self.file, _line(self.header()))
            return []
        *lines, torn = self.file.read_bytes().split(b"\n")
        if torn:
            write_atomically(self.file, b"\n".join([*lines, b""]))
        try:
            known, *records = map(json.loads, lines)
            found = [_outcome(record) for record in records if "key" in record]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.file}: not the results of a sweep ({error!r}); remove the file") from error
        header = self.header()
        if differing := [key for key in header if known.get(key) != header[key]]:
            named = ", ".join(f"{key} {known.get(key)} instead of {header[key]}" for key in differing)
            raise UserError(f"{self.file}: results with {named}; remove the file, or name another --results")
        return found

    @property
    def is_complete(self) -> bool:
        return b'\n{"complete"' in self.file.read_bytes()

    def finish(self, done: list[Outcome], count: Callable[[int], None]) -> list[Outcome]:
        """Samples the problems that are left, appending each to the file, and returns all outcomes."""
        if self.is_complete:
            return done
        found, mode = list(done), self.asked.mode

        def on_group(group: Group) -> None:
            (outcome,) = outcomes_of([group])
            append_whole(self.file, _line(_record(group, outcome)))
            found.append(outcome)
            count(len(found))

        with open_subject(
            self.directory,
            self.settings,
            self.asked.problems,
            on_held_out=True,
            device=self.asked.device,
            expert_weights=self.asked.expert_weights,
            max_tokens=self.asked.max_tokens,
        ) as subject:
            refuse_open_problems(subject.environment)
            trained, tokenizer = trained_on(self.checkpoint), Tokenizer.load(self.directory)
            refuse_overlap(subject.environment, trained, self.asked.problems, str(self.checkpoint), tokenizer)
            try:
                subject.collect(self.asked.problems, mode, self.asked.seed, on_group, {one.key for one in done})
            except KeyboardInterrupt as error:
                raise SweepInterruptedError(
                    f"interrupted at {self.checkpoint} on {self.settings.env_id} after {len(found):,} of "
                    f"{self.asked.problems:,} problems; {self.results} keeps what is done, and the same command goes on"
                ) from error
        append_whole(self.file, _line({"complete": len(found)}))
        return found

    def cell(self, outcomes: Sequence[Outcome]) -> Cell:
        sampling = sampling_record(self.asked.mode, self.asked.max_tokens, self.settings.reasoning_effort)
        # Files hold problems in the order in which they were done; the table is the same in every order.
        ordered = sorted(outcomes, key=lambda one: one.key)
        evaluations = [
            replace(one, sampling=sampling)
            for one in summarise_outcomes(ordered, self.settings.env_id, self.asked.mode.temperature)
        ]
        result = next(one for one in evaluations if one.mode == self.asked.mode.name)
        return Cell(self.checkpoint, self.settings.env_id, evaluations, result)


def compare(cells: Sequence[Cell]) -> list[Comparison]:
    """Every model against the first one, by benchmark, over the problems that both were asked. Raises UserError for results that
    may not be compared."""
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
        low, high = max(-1.0, estimate.interval.low), min(1.0, estimate.interval.high)
        found.append(Comparison(cell.checkpoint, cell.benchmark, len(both), estimate.value, low, high, p_value))
    return found


def table(cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> Iterator[str]:
    """The lines to print: a row for each model and a column for each benchmark, and the differences from the first model."""
    names = list(dict.fromkeys(cell.benchmark for cell in cells))
    models = list(dict.fromkeys(cell.checkpoint for cell in cells))
    shown = {(cell.checkpoint, cell.benchmark): cell.result for cell in cells}
    yield f"{cells[0].result.mode} with 95% intervals, of how many problems"
    rows = [("model", *names)]
    for model in models:
        results = [shown[model, name] for name in names]
        rows.append((str(model), *(f"{r.value:.1%} [{r.low:.1%}, {r.high:.1%}] of {r.problems}" for r in results)))
    yield from columns(rows)
    if not comparisons:
        return
    yield f"minus {models[0]}, paired by problem"
    differences = {(one.checkpoint, one.benchmark): one for one in comparisons}
    rows = [("model", *names)]
    for model in models[1:]:
        pairs = [differences.get((model, name)) for name in names]
        rows.append((str(model), *("" if one is None else _difference(one) for one in pairs)))
    yield from columns(rows)


def _difference(one: Comparison) -> str:
    return f"{one.difference:+.1%} [{one.low:+.1%}, {one.high:+.1%}] p = {one.p_value:.3f}"


def table_json(cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The table as JSON, with every evaluation of every pair."""
    return {
        "results": [
            {"checkpoint": str(cell.checkpoint), "benchmark": cell.benchmark}
            | {"evaluations": [replace(one, outcomes=None).record() for one in cell.evaluations]}
            for cell in cells
        ],
        "comparisons": [asdict(one) | {"checkpoint": str(one.checkpoint)} for one in comparisons],
    }


def sweep_command(
    checkpoints: Sequence[Path], benchmarks: Sequence[Path], asked: Asked, results: Path, out: Path | None
) -> None:
    """Prints the table of a sweep, and writes it to `out` as JSON. Raises as `sweep` and `compare` do."""
    if out is not None and out.is_dir():
        raise UserError(f"{out}: is a directory; --out names a file to write")
    cells = sweep(checkpoints, benchmarks, asked, results)
    comparisons = compare(cells)
    for line in table(cells, comparisons):
        print(line)
    if out is not None:
        write_atomically(out, json.dumps(table_json(cells, comparisons), indent=2).encode() + b"\n")


def _count_on(count: Callable[[int], None], before: int, more: int) -> None:
    count(before + more)


def _record(group: Group, outcome: Outcome) -> dict[str, Any]:
    return {
        **asdict(outcome),
        "id": group.problem.id,
        "gold": group.problem.gold,
        "answers": [trajectory.grade.answer for trajectory in group.trajectories],
        "failures": [trajectory.grade.failure for trajectory in group.trajectories],
    }


def _outcome(record: dict[str, Any]) -> Outcome:
    groups, correct = tuple(record["groups"]), tuple(record["correct"])
    return Outcome(record["key"], record["source"], groups, correct, record["voted"])


def _line(record: dict[str, Any]) -> bytes:
    # ASCII escapes, because model output may hold lone surrogates, which have no UTF-8.
    return json.dumps(record).encode("ascii") + b"\n"
