"""Solutions with labelled steps, and the removal of labels that contradict one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nmoe.text.conversation import question_key

LABELS = ("+", "0", "-")
"""Right, neutral, wrong (`nmoe.data.records.STEP_LABELS`)."""


@dataclass(frozen=True)
class LabelledSteps:
    """A problem and the steps of a solution, the last of them labelled.

    Example: `LabelledSteps("Sum: 4+7+2", ("4+7=11", "11+3=14"), ("+", "-"), finished=False, where="phase2_train.jsonl:17")`.

    labels: "+" right, "0" neutral, "-" wrong, None not labelled. The first wrong step is the last one: later ones have no labels.
    finished: the steps solve the problem, as far as they are right.
    rest: steps after the first wrong one.
    alternative: shares its first steps with another solution of its record, of which it was not chosen to go on from.
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
        """The solution of a record, whose steps may hold line breaks: each line is a step, as it is of an answer (`split_steps`),
        so that a verifier is trained at the positions where it will judge.

        All lines of a right step are right, and of a neutral one neutral. That a step is wrong stands at its last line, where the
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
        """Index of the first wrong step, or None."""
        return self.labels.index("-") if "-" in self.labels else None

    @property
    def score(self) -> float | None:
        """0 with a wrong step, 1 for right ones that solve the problem, 0.5 for right ones that do not; None if a step is not
        labelled, so that it is unknown."""
        if "-" in self.labels:
            return 0.0
        return None if None in self.labels else 1.0 if self.finished else 0.5


@dataclass
class StepDataset:
    """The solutions, how many records they came from, and how much was dropped for each reason."""

    solutions: list[LabelledSteps] = field(default_factory=list)
    records: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: StepDataset) -> None:
        self.solutions += other.solutions
        self.records += other.records
        self.dropped += other.dropped

    def lines(self) -> Iterator[str]:
        """Lines to print before a run."""
        labels = Counter(label for solution in self.solutions for label in solution.labels)
        counts = ", ".join(f"{labels[label]:,} {label!r}" for label in LABELS if labels[label])
        unlabelled = f", {labels[None]:,} not labelled" if labels[None] else ""
        yield f"{self.records:,} records: {len(self.solutions):,} solutions with steps labelled {counts}{unlabelled}"
        for reason, count in sorted(self.dropped.items()):
            yield f"dropped: {count:,} {reason}"


def normal(text: str) -> str:
    """A step with normalised spaces, for comparison."""
    return " ".join(text.split())


def split_steps(text: str) -> list[str]:
    """The steps of a solution's text: its non-blank lines."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _lines_of(step: str) -> list[str]:
    """The lines of a record's step; a blank one stays a step, whose label would be lost otherwise."""
    return split_steps(step) or [step]


def settle(reading: StepDataset, neutral_is: str | None) -> StepDataset:
    """The solutions without labels that contradict one another, and with neutral steps labelled `neutral_is` where that is given.

    The same steps of the same problem can be labelled twice, by two sources or two people. Labels of a prefix that differ are all
    taken away, in every solution that has it.
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
    """Each step's problem and prefix, and its label."""
    prefixes = prefix_keys(solution.problem, solution.steps)
    for key, label in zip(prefixes, solution.labels, strict=True):
        yield key, (neutral_is if label == "0" and neutral_is is not None else label)


def prefix_keys(problem: str, steps: Sequence[str]) -> list[tuple[str, ...]]:
    """The key of each step's prefix: the problem and the steps up to it, as they are compared."""
    keys = [question_key(problem), *map(normal, steps)]
    return [tuple(keys[: end + 2]) for end in range(len(steps))]
