"""Checks that a run is not evaluated on problems that it is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from nmoe.config.commands import RecordsConfig, RLConfig
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.held_out import prompt_of
from nmoe.data.records import read_records
from nmoe.envs.environment import Environment
from nmoe.eval.overlap import Overlap, QuestionAt, Questions, asked_in_pool, asked_in_records, overlap_of, ways_to_ask
from nmoe.preflight.check import Check
from nmoe.recipes.setup import load_tokenizer

_NAME = "held-out problems"
_SPLIT = "generated problems are split by a hash of their text: no problem of one split is in another"
_HELD_OUT = "records are split by what they ask: no prompt is on both sides"
_ENDLESS_PROBE = "a probe's problems not compared with the records: they have no end"
_ENDLESS = "not compared: a pool without an end; splits of one generated pool never share one"


def overlap(config: RecordsConfig | RLConfig) -> Check:
    """Checks whether training and evaluation have problems or prompts in common. Raises UserError if data cannot be read."""
    checks = list(_of_rl(config) if isinstance(config, RLConfig) else _of_records(config))
    if not checks:
        return Check(_NAME, "ok", "nothing is evaluated during the run")
    worst = next((status for status in ("fail", "warn") if status in {one.status for one in checks}), "ok")
    shown = [one for one in checks if one.status == worst]
    return Check(_NAME, shown[0].status, "; ".join(dict.fromkeys(one.text for one in shown)))


def _of_rl(config: RLConfig) -> Iterator[Check]:
    """Yields a check for each [[eval]] table of a reinforcement learning run."""
    if all(probe.environment is None for probe in config.eval):
        yield from (Check(_NAME, "ok", _SPLIT) for _ in config.eval)
        return
    tokenizer = load_tokenizer(config.model)
    trained = Environment.from_settings(config.environment, tokenizer)
    training = Questions(partial(asked_in_pool, trained))
    for index, probe in enumerate(config.eval):
        if probe.environment is None:
            yield Check(_NAME, "ok", _SPLIT)
            continue
        environment = Environment.from_settings(probe.environment, tokenizer)
        if trained.pool.size is None or environment.pool.size is None:
            yield Check(_NAME, "ok", _ENDLESS)
            continue
        found = overlap_of(([one] for one in asked_in_pool(environment)), training)
        yield _said(found, "problems", f"eval.{index}", "environment", allowed=probe.allow_trained_on)


def _of_records(config: RecordsConfig) -> Iterator[Check]:
    """Yields a check for the held-out records of a supervised run, and one for each [[eval]] table with an environment.

    An environment's problem is found if its question, or the prompt made from it, is a message of a training record.
    """
    settings = config.records
    if config.evaluate_every:
        number = config.held_out_tables[0]
        if (other := settings.held_out_dataset) is None:
            yield Check(_NAME, "ok", _HELD_OUT)
        else:
            found = overlap_of(([one] for one in _prompts((other,))), Questions(partial(_prompts, settings.datasets)))
            yield _said(found, "prompts", f"eval.{number}", "records.held_out_path", allowed=config.allows_trained_on)
    if not config.probes:
        return
    tokenizer, training = load_tokenizer(config.model), Questions(partial(asked_in_records, settings.datasets))
    for index, probe in config.probes.items():
        assert probe.environment is not None, "what makes it a probe"
        environment = Environment.from_settings(probe.environment, tokenizer)
        order = environment.pool.order
        if order.size is None:
            yield Check(_NAME, "ok", _ENDLESS_PROBE)
            continue
        found = overlap_of((ways_to_ask(environment, order.at(position)) for position in range(order.size)), training)
        yield _said(found, "problems", f"eval.{index}", "environment", "messages", allowed=probe.allow_trained_on)


def _prompts(datasets: Sequence[DatasetSettings]) -> Iterator[QuestionAt]:
    return ((prompt_of(record), record.where) for one in datasets for record in read_records(one))


def _said(found: Overlap, what: str, table: str, source: str, among: str = "", *, allowed: bool) -> Check:
    if not found.common:
        return Check(_NAME, "ok", f"none of {found.count:,} is among the {found.known:,} {among or what} trained on")
    said = f"{found} {what} are trained on, too (first {found.example})"
    if allowed:
        return Check(_NAME, "warn", f"{said}, as {table}.allow_trained_on permits: their figures do not generalise")
    key = source if "." in source else f"{table}.{source}"
    remedy = f"take others in {key}, or set {table}.allow_trained_on = true, which the results then say"
    return Check(_NAME, "fail", f"{said}, so that their figures do not generalise: {remedy}")
