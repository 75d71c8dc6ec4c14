"""Finds the problems of an evaluation that a model was trained on, by one rule for every command.

Problems that are trained on are refused, before a run begins and by `nmoe eval`, unless `allow_trained_on` of their [[eval]] or
`--allow-trained-on` permits them; then their results say so. Questions are compared by `nmoe.text.conversation.question_key`.
Problems that are generated without end are separated by their splits.
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
"""A question, normalised for comparison, and its origin: a file and line, or the problem's id."""
_SHOWN = 60


@dataclass(frozen=True)
class Overlap:
    """`common` of `count` problems are among the `known` ones that are trained on; `example` is the first of them."""

    common: int
    count: int
    known: int
    example: str = ""

    def __str__(self) -> str:
        return f"{self.common:,} of {self.count:,}"


class Questions:
    """The questions of the training data: `Questions(lambda: asked_in_records(datasets))`. It is read once for any number of
    evaluations, and again for an example of what one of them shares with it."""

    def __init__(self, read: Callable[[], Iterable[QuestionAt]]) -> None:
        self.read = read

    @cached_property
    def digests(self) -> frozenset[bytes]:
        return frozenset(digest_of(key) for key, _ in self.read())


class TrainedOn:
    """The training questions of the run that `who` names; `directory` is its checkpoint's, with the tokenizer."""

    def __init__(self, who: Path, directory: Path) -> None:
        self.who, self._directory = who, directory

    @cached_property
    def questions(self) -> Questions | None:
        """The questions, or None if they are not known: for a checkpoint without its run, and for endless generated problems.
        Raises UserError where the data of the run is no longer there."""
        if (settings := trained_on(self.who)) is not None:
            environment = Environment.from_settings(settings, Tokenizer.load(self._directory))
            return None if environment.pool.size is None else Questions(lambda: asked_in_pool(environment))
        datasets = records_trained_on(self.who)
        return Questions(lambda: asked_in_records(datasets)) if datasets else None


def overlap_of(problems: Iterable[Sequence[QuestionAt]], training: Questions) -> Overlap:
    """The overlap of evaluated problems, each with all its phrasings, with the training questions."""
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
    """The questions of a finite pool, in its order."""
    order = environment.pool.order
    assert order.size is not None, "asked of finite pools alone"
    return ((problem_key(problem), origin_of(problem)) for problem in map(order.at, range(order.size)))


def asked_in_records(datasets: Sequence[DatasetSettings]) -> Iterator[QuestionAt]:
    """The questions of records: their whole prompts, each message in them that is not the assistant's, and texts."""
    for dataset in datasets:
        for record in read_records(dataset):
            whole = prompt_of(record)
            yield whole, record.where
            yield from ((key, record.where) for text in _said(record) if (key := question_key(text)) != whole)


def ways_to_ask(environment: Environment, problem: Problem) -> list[QuestionAt]:
    """A problem's question, as itself and as the environment words it for the model."""
    worded = question_key(environment.prompts.messages(problem)[-1].content)
    return [(key, origin_of(problem)) for key in dict.fromkeys((problem_key(problem), worded))]


def problem_key(problem: Problem) -> str:
    """A problem's question, normalised for comparison: the user's turns."""
    return conversation_key((*problem.history, Message("user", problem.question)))


def origin_of(problem: Problem) -> str:
    """The origin of a problem: its file and line if the pool kept them, else its id."""
    return str(problem.metadata.get("where", problem.id))


def find_overlap(benchmark: Environment, problems: int, trained: TrainedOn, *, allowed: bool) -> Overlap | None:
    """The number of the benchmark's next problems that the run was trained on; None if that is not known (`TrainedOn.questions`),
    and where the data of the run is no longer there, which is printed. Raises UserError where there are some and that is not
    `allowed`, and for a benchmark that cannot be read."""
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
