"""`nmoe simulate`: what staleness would make of a run, by simulating it with several."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from nmoe.cluster.simulate.fleet import Account
from nmoe.cluster.simulate.flight import Flight
from nmoe.cluster.simulate.setting import Fault, Setting
from nmoe.config.commands import RLConfig
from nmoe.errors import UserError
from nmoe.rollout.guards import Overdue
from nmoe.runs.ledger import read_metrics

_STALENESS, _STEPS = (1, 2, 4, 8, 16), 80
# A row is fast enough if it reaches this share of the fastest.
_ENOUGH = 0.95
# An idle share below which a part is what limits the run, and a gain above which staleness is worth its corrections.
_BUSY, _WORTH = 0.1, 1.1
# Shares from which publications and the bias of lengths are worth a word.
_PUBLISHES, _BIASED = 0.25, 0.01


@dataclass(frozen=True)
class Row:
    """A simulated run, and the synchronous form of it."""

    setting: Setting
    account: Account
    synchronous: Account

    @property
    def rate(self) -> float:
        return self.account.samples / self.account.seconds

    @property
    def gain(self) -> float:
        return self.rate * self.synchronous.seconds / self.synchronous.samples

    @property
    def waiting(self) -> float:
        """The share of the time in which the trainer waited for groups."""
        return self.account.trainer_wait_s / self.account.seconds

    @property
    def publishing(self) -> float:
        """The share of the time in which the trainer waited for engines to take its weights."""
        groups = self.account.samples / self.setting.samples
        return 1 - self.waiting - groups / self.setting.groups * self.setting.learn_s / self.account.seconds

    @property
    def slots_idle(self) -> float:
        return 1 - self.account.slot_s / (self.account.seconds * self.setting.engines * self.setting.slots)

    @property
    def length_bias(self) -> float:
        """How much longer the samples that were trained on are than all that were to be sampled."""
        trained = self.account.tokens / self.account.samples
        return trained / (self.account.lengths / (self.account.ended * self.setting.samples)) - 1

    def cells(self) -> list[str]:
        one, ages = self.account, sorted(self.account.ages.elements())
        void = one.void / max(one.tokens + one.void, 1)
        return [
            str(self.setting.staleness),
            self.setting.overdue if self.setting.staleness else "-",
            f"{self.rate:.3g}",
            f"x{self.gain:.2f}",
            f"{self.waiting:.0%}",
            f"{self.publishing:.0%}",
            f"{self.slots_idle:.0%}",
            f"{fmean(ages):.1f} {ages[int(0.9 * (len(ages) - 1))]} {ages[-1]}",
            f"{one.reasons['overdue'] / one.ended:.1%}",
            f"{self.length_bias:+.1%}",
            f"{void:.1%}",
        ]


_HEAD = (
    "K",
    "overdue",
    "samples/s",
    "gain",
    "trainer waits",
    "publishes",
    "slots idle",
    "age mean p90 max",
    "dropped",
    "length bias",
    "tokens void",
)


def setting_of(config: RLConfig) -> Setting:
    """Returns the sizes that a configuration names. Its times and lengths are not in it."""
    batch, asynchrony, engine = config.batch, config.asynchrony, config.engine
    return Setting(
        tickets=_STEPS * batch.prompts_per_step,
        seed=config.run.seed,
        staleness=asynchrony.max_staleness,
        groups=batch.prompts_per_step,
        samples=batch.group_size,
        overdue=asynchrony.overdue,
        in_flight=asynchrony.in_flight,
        engines=len(engine.urls) or engine.servers,
        slots=engine.max_sequences,
        most_tokens=config.sampling.max_new_tokens,
        mean_tokens=config.sampling.max_new_tokens / 4,
        checkpoint_every=config.checkpoint.every_steps,
    )


def measured(run: Path, setting: Setting) -> Setting:
    """Returns the setting with the times and lengths of a run that has ended, which sampled and trained in turn. Raises UserError
    for one that took fewer than two steps."""
    lines = read_metrics(run)[1:]  # the first step compiles and loads
    if not lines:
        raise UserError(f"{run}: it has fewer than two steps to take times from; name another run")

    def mean(name: str) -> float:
        return fmean(line.get(name, 0.0) for line in lines)

    setting = replace(
        setting,
        learn_s=mean("time_learn_s"),
        sync_s=mean("time_sync_s"),
        mean_tokens=max(mean("response_length_mean"), 1.0),
        equal=mean("groups_zero_variance") / max(mean("groups"), 1.0),
    )
    # A step samples for a time in proportion to a token's.
    steps = replace(
        setting, staleness=0, tickets=10 * setting.groups, equal=0.0, token_s=1.0, prefill_s=0.0, tool_s=0.0
    )
    account = _flown(steps)
    return replace(setting, token_s=mean("time_rollout_s") * account.steps / account.trainer_wait_s)


def _flown(setting: Setting) -> Account:
    """Raises UserError for a run that took no step."""
    flight = Flight(setting)
    if not flight.run().steps:
        why = flight.stopped or f"{setting.tickets} groups are fewer than a step trains on: raise --tickets"
        raise UserError(f"the simulated run took no step: {why}")
    return flight.measured


def with_faults(setting: Setting, an_hour: float) -> Setting:
    """Returns the setting with so many deaths, hangs and wrong weights of each engine in an hour of the synchronous run."""
    draw, seconds = random.Random(setting.seed), _flown(replace(setting, staleness=0)).seconds
    kinds: tuple[Fault, ...] = ("death", "hang", "lie")
    count = round(an_hour * setting.engines * seconds / 3600)
    faults = [(draw.uniform(0, seconds), draw.choice(kinds), draw.randrange(setting.engines)) for _ in range(count)]
    return replace(setting, faults=tuple(faults))


def rows(setting: Setting) -> list[Row]:
    """Simulates the run with each staleness, with both ways for overdue groups."""
    ways: tuple[Overdue, ...] = ("wait", "drop")
    alone = replace(setting, staleness=0)
    synchronous = _flown(alone)
    found = [Row(alone, synchronous, synchronous)]
    for staleness in sorted({*_STALENESS, setting.staleness} - {0}):
        for overdue in ways:
            one = replace(setting, staleness=staleness, overdue=overdue)
            found.append(Row(one, _flown(one), synchronous))
    return found


def advice(found: list[Row]) -> str:
    """Returns in one line which staleness to choose, and why."""
    waiting = [row for row in found if row.setting.overdue == "wait" or not row.setting.staleness]
    fastest = max(row.rate for row in waiting)
    chosen = next(row for row in waiting if row.rate >= _ENOUGH * fastest)
    limit = "what limits it are long samples and tools"
    if chosen.slots_idle < _BUSY:
        limit = "what limits it are the engines: add some, or raise engine.max_sequences"
    elif chosen.publishing > _PUBLISHES:
        limit = f"publications take {chosen.publishing:.0%} of its time"
    elif chosen.waiting < _BUSY:
        limit = "what limits it is the trainer, so that more engines would not help"
    if chosen.gain < _WORTH:
        return f"advice: leave async.max_staleness at 0, as the others gain {fastest / found[0].rate - 1:.0%}; {limit}"
    bias = min(row.length_bias for row in found)
    drop = f'; overdue = "drop" would train on samples that are up to {-bias:.0%} shorter' if bias < -_BIASED else ""
    return (
        f'advice: async.max_staleness = {chosen.setting.staleness} with overdue = "wait" is {chosen.gain:.1f} times as fast as the '
        f"synchronous form; {limit}{drop}"
    )


def lines(setting: Setting) -> Iterator[str]:
    """Yields the sizes that were simulated, a table, and a line of advice."""
    yield (
        f"{setting.tickets} groups of {setting.samples}, {setting.groups} a step, on {setting.engines} engines of {setting.slots} "
        f"slots, seed {setting.seed}; {setting.mean_tokens:.0f} tokens a sample (at most {setting.most_tokens}) at "
        f"{1 / setting.token_s:.3g} tokens/s, {setting.learn_s:.3g} s to train, {setting.sync_s:.3g} s to publish"
    )
    found = rows(setting)
    table = [_HEAD, *(row.cells() for row in found)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
    for row in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield advice(found)
