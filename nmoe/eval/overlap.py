"""Finds evaluation problems that a model was trained on, by one rule for all commands.

An evaluation on such problems is refused, before training and by `nmoe eval`, unless `allow_trained_on` in the [[eval]]
table or `--allow-trained-on` permits it; the results then say so. Questions are normalised by
`nmoe.text.conversation.question_key` before they are compared. Generated problems without end are not compared, because
their training and evaluation splits are disjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.held_out import prompt_of
from nmoe.data.records import Conversation, Preference, Prompt, PromptCompletion, Record, Stepwise, Text, read_records
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.evaluate import distinct_problems
from nmoe.runs.resolve import records_trained_on, trained_on
from nmoe.text.conversation import conversation_key, digest_of, question_key
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem

QuestionAt = tuple[str, str]
"""A normalised question, and its origin: a file and line, or the problem's id."""
_SHOWN = 60


@dataclass(frozen=True)
class Overlap:
    """How many evaluation problems are among the training questions: `common` of `count`; `known` is the number of
    training questions.

    `example` describes the first common one.
    """

    common: int
    count: int
    known: int
    example: str = ""

    def __str__(self) -> str:
        return f"{self.common:,} of {self.count:,}"


class Questions:
    """The normalised questions of training data, from the function `read`: `Questions(lambda: asked_in_records(datasets))`.

    The data is read once for all evaluations, and once more for each evaluation that needs an example of a common
    question.
    """

    def __init__(self, read: Callable[[], Iterable[QuestionAt]]) -> None:
        self.read = read

    @cached_property
    def digests(self) -> frozenset[bytes]:
        return frozenset(digest_of(key) for key, _ in self.read())


class TrainedOn:
    """The training questions of the run that `who`, a run directory or a checkpoint, belongs to.

    `directory` is the directory of the checkpoint, from which the tokenizer is loaded.
    """

    def __init__(self, who: Path, directory: Path) -> None:
        self.who, self._directory = who, directory

    @cached_property
    def questions(self) -> Questions | None:
        """The training questions; None if they are unknown, as for a checkpoint without a run and for endlessly
        generated problems.

        Raises UserError if the training data no longer exists.
        """
        if (settings := trained_on(self.who)) is not None:
            environment = Environment.from_settings(settings, Tokenizer.load(self._directory))
            return None if environment.pool.size is None else Questions(lambda: asked_in_pool(environment))
        datasets = records_trained_on(self.who)
        return Questions(lambda: asked_in_records(datasets)) if datasets else None


def overlap_of(problems: Iterable[Sequence[QuestionAt]], training: Questions) -> Overlap:
    """Counts the evaluation problems that are among the training questions. Each problem is a list of its possible wordings."""
    known = training.digests
    common, count, first = 0, 0, None
    for ways in problems:
        count += 1
        found = next((one for one in ways if digest_of(one[0]) in known), None)
        common += found is not None
        first = first or found
    if first is None:
        return Overlap(common, count, len(known))
    key, evaluated = first
    there = next(where for text, where in training.read() if text == key)
    shown = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."
    return Overlap(common, count, len(known), f"{shown!r}, {evaluated} and {there}")


def asked_in_pool(environment: Environment) -> Iterator[QuestionAt]:
    """Yields the normalised questions of a finite pool of problems, in its order."""
    order = environment.pool.order
    assert order.size is not None, "asked of finite pools alone"
    return ((problem_key(problem), origin_of(problem)) for problem in map(order.at, range(order.size)))


def asked_in_records(datasets: Sequence[DatasetSettings]) -> Iterator[QuestionAt]:
    """Yields the normalised questions of data sets: of each record the whole prompt, every message but the assistant's,
    and plain texts."""
    for dataset in datasets:
        for record in read_records(dataset):
            whole = prompt_of(record)
            yield whole, record.where
            yield from ((key, record.where) for text in _said(record) if (key := question_key(text)) != whole)


def ways_to_ask(environment: Environment, problem: Problem) -> list[QuestionAt]:
    """Returns the normalised wordings of a problem's question: as it is stored, and as the environment asks the model."""
    worded = question_key(environment.prompts.messages(problem)[-1].content)
    return [(key, origin_of(problem)) for key in dict.fromkeys((problem_key(problem), worded))]


def problem_key(problem: Problem) -> str:
    """Returns a problem's question, together with the user's earlier messages, normalised for comparison."""
    return conversation_key((*problem.history, Message("user", problem.question)))


def origin_of(problem: Problem) -> str:
    """Returns the origin of a problem: its file and line if they are known, else its id."""
    return str(problem.metadata.get("where", problem.id))


def find_overlap(benchmark: Environment, problems: int, trained: TrainedOn, *, allowed: bool) -> Overlap | None:
    """Compares the benchmark's next `problems` problems with the training questions of a model; returns None if these
    are unknown.

    If the training data no longer exists, this is printed, and the result is None. Raises UserError if problems are
    common to both and `allowed` is false, and if the benchmark cannot be read.
    """
    try:
        training = trained.questions
        if training is None:
            return None
        _ = training.digests  # read here, because a benchmark that cannot be read is another error
    except UserError as error:
        print(f"{benchmark.settings.env_id}: not compared with what {trained.who} was trained on: {error}")
        return None
    found = overlap_of(_next(benchmark, problems), training)
    if found.common and not allowed:
        raise UserError(
            f"{benchmark.settings.env_id}: {found} problems are among those that {trained.who} was trained on (first "
            f"{found.example}), so that the result would say nothing about others; evaluate on problems that are held out, or "
            "permit it with --allow-trained-on, which the results then say"
        )
    return found


def _next(benchmark: Environment, problems: int) -> list[list[QuestionAt]]:
    start = benchmark.state()
    found = [ways_to_ask(benchmark, problem) for problem in distinct_problems(benchmark, problems)]
    benchmark.load_state(start)
    return found


def _said(record: Record) -> Iterator[str]:
    match record:
        case Text():
            yield record.text
        case Conversation():
            yield from (message.content for message in record.messages if message.role != "assistant")
        case Prompt() | PromptCompletion() | Preference() | Stepwise():
            yield from (message.content for message in record.prompt if message.role != "assistant")
