"""Solutions with labelled steps, to train process reward models, and the removal of labels that contradict one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nmoe.text.conversation import question_key

LABELS = ("+", "0", "-")
"""The labels of a step: right, neutral, wrong (`nmoe.data.records.STEP_LABELS`)."""


@dataclass(frozen=True)
class LabelledSteps:
    """A problem and the steps of a solution, each with a label or None.

    Example: `LabelledSteps("Sum: 4+7+2", ("4+7=11", "11+3=14"), ("+", "-"), finished=False, where="phase2_train.jsonl:17")`.

        labels: "+" right, "0" neutral, "-" wrong, None not labelled. Steps end at the first wrong one.
        finished: the steps solve the problem, unless one of them is wrong.
        rest: steps after the first wrong one.
        alternative: the last step is a completion that was rated but not chosen to continue another solution of the record.
    """

    problem: str
    steps: tuple[str, ...]
    labels: tuple[str | None, ...]
    finished: bool
    where: str
    rest: tuple[str, ...] = ()
    alternative: bool = False

    @classmethod
    def of_record(
        cls,
        problem: str,
        steps: Sequence[str],
        labels: Sequence[str | None],
        finished: bool,
        where: str,
        rest: Sequence[str] = (),
        alternative: bool = False,
    ) -> LabelledSteps:
        """Builds the solution of a record whose steps may hold line breaks. Each line becomes a step, as in an answer
        (`split_steps`), so that a verifier is trained at the positions where it will judge.

        All lines of a right step are right, and of a neutral step neutral. A wrong step has its label at its last line, where the
        whole step has been read; the lines before have no label, because the record does not say which of them is wrong.
        """
        lines: list[str] = []
        of_lines: list[str | None] = []
        for step, label in zip(steps, labels, strict=True):
            parts = _lines_of(step)
            lines += parts
            of_lines += [None if label == "-" else label] * (len(parts) - 1) + [label]
        behind = [line for step in rest for line in _lines_of(step)]
        return cls(problem, tuple(lines), tuple(of_lines), finished, where, tuple(behind), alternative)

    @property
    def first_wrong(self) -> int | None:
        """The index of the first wrong step; None if there is none."""
        return self.labels.index("-") if "-" in self.labels else None

    @property
    def score(self) -> float | None:
        """0 if a step is wrong, 1 if all are right and solve the problem, 0.5 if all are right and do not; None if a step is not
        labelled and none is wrong."""
        if "-" in self.labels:
            return 0.0
        return None if None in self.labels else 1.0 if self.finished else 0.5


@dataclass
class StepDataset:
    """The labelled solutions of a dataset, the number of records they came from, and how much was dropped for each reason."""

    solutions: list[LabelledSteps] = field(default_factory=list)
    records: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: StepDataset) -> None:
        self.solutions += other.solutions
        self.records += other.records
        self.dropped += other.dropped

    def lines(self) -> Iterator[str]:
        """Yields lines about the dataset, to print before a run."""
        labels = Counter(label for solution in self.solutions for label in solution.labels)
        counts = ", ".join(f"{labels[label]:,} {label!r}" for label in LABELS if labels[label])
        unlabelled = f", {labels[None]:,} not labelled" if labels[None] else ""
        yield f"{self.records:,} records: {len(self.solutions):,} solutions with steps labelled {counts}{unlabelled}"
        for reason, count in sorted(self.dropped.items()):
            yield f"dropped: {count:,} {reason}"


def normal(text: str) -> str:
    """Normalises the white space of a step, for comparison."""
    return " ".join(text.split())


def split_steps(text: str) -> list[str]:
    """Splits a solution's text into steps: its non-blank lines."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _lines_of(step: str) -> list[str]:
    """Splits a record's step into lines; a blank step stays one, since its label would be lost otherwise."""
    return split_steps(step) or [step]


def settle(reading: StepDataset, neutral_is: str | None) -> StepDataset:
    """Removes labels that contradict one another, and replaces neutral labels by `neutral_is` unless that is None.

    The same steps of the same problem can be labelled twice, by two sources or two people. Where labels of the same prefix differ,
    they are removed from every solution that has it.
    """
    found: dict[tuple[str, ...], set[str]] = {}
    for solution in reading.solutions:
        for key, label in _keyed(solution, neutral_is):
            if label is not None:
                found.setdefault(key, set()).add(label)
    kept, taken = [], 0
    for solution in reading.solutions:
        labels = tuple(
            None if label is None or len(found[key]) > 1 else label for key, label in _keyed(solution, neutral_is)
        )
        taken += sum(new is None and old is not None for new, old in zip(labels, solution.labels, strict=True))
        if any(label is not None for label in labels):
            kept.append(replace(solution, labels=labels))
    dropped = reading.dropped + Counter({"labels that contradict another label of the same steps": taken})
    if gone := len(reading.solutions) - len(kept):
        dropped["solutions without a label left"] += gone
    return StepDataset(kept, reading.records, +dropped)


def _keyed(solution: LabelledSteps, neutral_is: str | None) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yields the key (problem and steps so far) and the label of each step."""
    prefixes = prefix_keys(solution.problem, solution.steps)
    for key, label in zip(prefixes, solution.labels, strict=True):
        yield key, (neutral_is if label == "0" and neutral_is is not None else label)


def prefix_keys(problem: str, steps: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns a key for each step, to compare prefixes: the normalised problem and the steps up to it."""
    keys = [question_key(problem), *map(normal, steps)]
    return [tuple(keys[: end + 2]) for end in range(len(steps))]
