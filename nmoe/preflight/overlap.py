"""Whether a run is evaluated on what it is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.supervised import RecordsConfig
from nmoe.data.held_out import prompt_of
from nmoe.data.records import Conversation, Preference, Prompt, PromptCompletion, Record, Stepwise, Text, read_records
from nmoe.envs.environment import Environment
from nmoe.eval.overlap import asked
from nmoe.preflight.check import Check
from nmoe.recipes.setup import load_tokenizer
from nmoe.types import Problem

_NAME = "held-out problems"
_SPLIT = "disjoint from those trained on: split by a hash of what is asked"
_ENDLESS_PROBE = "a probe's problems not compared with the records: they have no end"
_ENDLESS = "not compared: a pool without an end; splits of one generated pool never share one"


def overlap(config: RecordsConfig | RLConfig) -> Check:
    """The problems or prompts that training and evaluation share, by what is asked. Raises UserError for unreadable data."""
    checks = list(_of_rl(config) if isinstance(config, RLConfig) else _of_records(config))
    if not checks:
        return Check(_NAME, "ok", "nothing is evaluated during the run")
    failed = [one for one in checks if one.status == "fail"]
    return Check(_NAME, "fail" if failed else "ok", "; ".join(dict.fromkeys(one.text for one in failed or checks)))


def _of_rl(config: RLConfig) -> Iterator[Check]:
    """A check for each [[eval]] table."""
    tokenizer = load_tokenizer(config.model)
    training: set[bytes] | None = None
    for index, probe in enumerate(config.eval):
        if probe.environment is None:
            yield Check(_NAME, "ok", _SPLIT)
            continue
        trained = Environment.from_settings(config.environment, tokenizer)
        held_out = Environment.from_settings(probe.environment, tokenizer)
        if trained.pool.size is None or held_out.pool.size is None:
            yield Check(_NAME, "ok", _ENDLESS)
            continue
        training = training or {_key(problem.question) for problem in _problems(trained)}
        questions = {_key(problem.question) for problem in _problems(held_out)}
        yield _told(len(training & questions), len(questions), len(training), "problems", f"eval.{index}.environment")


def _of_records(config: RecordsConfig) -> Iterator[Check]:
    """A check for the held-out records, and one for each probe: whether a record has a problem's question, or the prompt that the
    model gets, as one of its messages."""
    settings = config.records
    if (other := settings.held_out_dataset) is not None:
        training, held_out = (
            {_key(prompt_of(record)) for one in datasets for record in read_records(one)}
            for datasets in (settings.datasets, (other,))
        )
        yield _told(len(training & held_out), len(held_out), len(training), "prompts", "records.held_out_path")
    elif config.evaluate_every:
        yield Check(_NAME, "ok", _SPLIT)
    if not config.probes:
        return
    said = {_key(text) for one in settings.datasets for record in read_records(one) for text in _said(record)}
    tokenizer = load_tokenizer(config.model)
    for index, probe in config.probes.items():
        assert probe.environment is not None, "what makes it a probe"
        environment = Environment.from_settings(probe.environment, tokenizer)
        if environment.pool.size is None:
            yield Check(_NAME, "ok", _ENDLESS_PROBE)
            continue
        common, count = 0, 0
        for problem in _problems(environment):
            given = environment.messages(problem)[-1].content
            common += bool({_key(problem.question), _key(given)} & said)
            count += 1
        yield _told(common, count, len(said), "problems", f"eval.{index}.environment", "messages")


def _told(common: int, held_out: int, training: int, what: str, key: str, among: str = "") -> Check:
    if common:
        said = f"{common:,} of {held_out:,} {what} are trained on, too"
        return Check(_NAME, "fail", f"{said}, so that their figures do not generalise: take others in {key}")
    return Check(_NAME, "ok", f"none of {held_out:,} is among the {training:,} {among or what} trained on")


def _problems(environment: Environment) -> Iterator[Problem]:
    order = environment.pool.order
    assert order.size is not None, "asked of finite pools alone"
    return (order.at(position) for position in range(order.size))


def _said(record: Record) -> Iterator[str]:
    """What a record says in place of a problem: a text, or all that is not the assistant's."""
    match record:
        case Text():
            yield record.text
        case Conversation():
            yield from (message.content for message in record.messages if message.role != "assistant")
        case Prompt() | PromptCompletion() | Preference() | Stepwise():
            yield from (message.content for message in record.prompt if message.role != "assistant")


def _key(text: str) -> bytes:
    """A hash, because a million long questions would not fit."""
    return hashlib.sha256(asked(text).encode(errors="replace")).digest()
