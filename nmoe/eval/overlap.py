"""Which problems of an evaluation a model is trained on: one rule for every command.

Problems that are trained on are refused, before a run begins and by `nmoe eval`, unless `allow_trained_on` of their [[eval]] or
`--allow-trained-on` permits them; then their results say so. Questions are compared as `nmoe.text.question` has them. Problems that
are generated without end are told apart by their splits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmoe.config.tables.records import DatasetSettings
from nmoe.data.held_out import prompt_of
from nmoe.data.records import Conversation, Preference, Prompt, PromptCompletion, Record, Stepwise, Text, read_records
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.evaluate import distinct_problems
from nmoe.runs.resolve import records_trained_on, trained_on
from nmoe.text.question import conversation_key, digest_of, question_key
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem

Asked = tuple[str, str]
"""What is asked, as it is compared with others, and where: a file and line, or the problem's id."""
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


def overlap_of(problems: Iterable[Sequence[Asked]], training: Callable[[], Iterable[Asked]]) -> Overlap:
    """The overlap of evaluated problems, each with the ways in which it could be asked, and of what is trained on, which is gone
    through again for an example."""
    known = {digest_of(key) for key, _ in training()}
    common, count, first = 0, 0, None
    for ways in problems:
        count += 1
        found = next((one for one in ways if digest_of(one[0]) in known), None)
        common += found is not None
        first = first or found
    if first is None:
        return Overlap(common, count, len(known))
    key, evaluated = first
    there = next(where for text, where in training() if text == key)
    shown = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."
    return Overlap(common, count, len(known), f"{shown!r}, {evaluated} and {there}")


def asked_in_pool(environment: Environment) -> Iterator[Asked]:
    """What the problems of a pool with an end ask, in their order."""
    order = environment.pool.order
    assert order.size is not None, "asked of finite pools alone"
    return ((problem_key(problem), place_of(problem)) for problem in map(order.at, range(order.size)))


def asked_in_records(datasets: Sequence[DatasetSettings]) -> Iterator[Asked]:
    """What records ask: their whole prompts, each message in them that is not the assistant's, and texts."""
    for dataset in datasets:
        for record in read_records(dataset):
            whole = prompt_of(record)
            yield whole, record.where
            yield from ((key, record.where) for text in _said(record) if (key := question_key(text)) != whole)


def ways_to_ask(environment: Environment, problem: Problem) -> list[Asked]:
    """A problem's question, as itself and as the environment words it for the model."""
    worded = question_key(environment.messages(problem)[-1].content)
    return [(key, place_of(problem)) for key in dict.fromkeys((problem_key(problem), worded))]


def problem_key(problem: Problem) -> str:
    """What a problem asks, as it is compared with others: the user's turns."""
    return conversation_key((*problem.history, Message("user", problem.question)))


def place_of(problem: Problem) -> str:
    """Where a problem comes from: its file and line where the pool kept them, else its id."""
    return str(problem.metadata.get("where", problem.id))


def find_overlap(
    benchmark: Environment, problems: int, who: Path, tokenizer: Tokenizer, *, allowed: bool
) -> Overlap | None:
    """How many of the benchmark's next problems the run that `who` names was trained on; None where that is not known: of a
    checkpoint without its run, of problems generated without end, and where the data of the run is no longer there, which is
    printed. Raises UserError where there are some and that is not `allowed`."""
    try:
        training = _training_of(who, tokenizer)
        found = None if training is None else overlap_of(_next(benchmark, problems), training)
    except UserError as error:
        print(f"{benchmark.settings.env_id}: not compared with what {who} was trained on: {error}")
        return None
    if found is not None and found.common and not allowed:
        raise UserError(
            f"{benchmark.settings.env_id}: {found} problems are among those that {who} was trained on (first {found.example}), so "
            "that the result would say nothing about others; evaluate on problems that are held out, or permit it with "
            "--allow-trained-on, which the results then say"
        )
    return found


def _training_of(who: Path, tokenizer: Tokenizer) -> Callable[[], Iterator[Asked]] | None:
    """What the run that `who` names was asked in training."""
    if (settings := trained_on(who)) is not None:
        environment = Environment.from_settings(settings, tokenizer)
        return None if environment.pool.size is None else lambda: asked_in_pool(environment)
    datasets = records_trained_on(who)
    return (lambda: asked_in_records(datasets)) if datasets else None


def _next(benchmark: Environment, problems: int) -> list[list[Asked]]:
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
