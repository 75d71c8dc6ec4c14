"""Whether a run is evaluated on what it is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.supervised import RecordsConfig
from nmoe.data.held_out import prompt_of
from nmoe.data.records import read_records
from nmoe.envs.environment import Environment
from nmoe.preflight.check import Check
from nmoe.recipes.setup import load_tokenizer

_NAME = "held-out problems"
_SPLIT = "disjoint from those trained on: split by a hash of what is asked"
_ENDLESS = "not compared: a pool without an end; splits of one generated pool never share one"


def overlap(config: RecordsConfig | RLConfig) -> Check:
    """The problems or prompts that training and evaluation share, by a hash of what is asked. Raises UserError for data that cannot
    be read."""
    if not config.eval:
        return Check(_NAME, "ok", "nothing is evaluated during the run")
    if isinstance(config, RLConfig):
        checks = list(_probes(config))
        said = "; ".join(dict.fromkeys(one.text for one in checks if checks[0].status == one.status))
        return Check(_NAME, checks[0].status, said)
    if (settings := config.records.held_out_dataset) is not None:
        training, held_out = (
            {_hash(prompt_of(record)) for one in datasets for record in read_records(one)}
            for datasets in (config.records.datasets, (settings,))
        )
        return _shared(training, held_out, "prompts", "records.held_out_path")
    return Check(_NAME, "ok", _SPLIT)


def _probes(config: RLConfig) -> Iterator[Check]:
    """A check for each [[eval]] table, those that fail first."""
    tokenizer = load_tokenizer(config.model)
    training: set[str] | None = None
    found = []
    for index, probe in enumerate(config.eval):
        if probe.environment is None:
            found.append(Check(_NAME, "ok", _SPLIT))
            continue
        trained = Environment.from_settings(config.environment, tokenizer)
        held_out = Environment.from_settings(probe.environment, tokenizer)
        if trained.pool.size is None or held_out.pool.size is None:
            found.append(Check(_NAME, "ok", _ENDLESS))
            continue
        training = training or set(_questions(trained))
        found.append(_shared(training, set(_questions(held_out)), "problems", f"eval.{index}.environment"))
    yield from sorted(found, key=lambda check: check.status != "fail")


def _shared(training: set[str], held_out: set[str], what: str, key: str) -> Check:
    common = len(training & held_out)
    if common:
        said = f"{common:,} of {len(held_out):,} {what} are trained on, too"
        return Check(_NAME, "fail", f"{said}, so that their figures do not generalise: take others in {key}")
    return Check(_NAME, "ok", f"none of {len(held_out):,} is among the {len(training):,} {what} trained on")


def _questions(environment: Environment) -> Iterator[str]:
    order = environment.pool.order
    assert order.size is not None, "asked of finite pools alone"
    for position in range(order.size):
        yield _hash("\x1e".join(message.content.strip() for message in environment.messages(order.at(position))[-1:]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
