"""Schedules that hypothesis draws, each replayed on a virtual clock against the run's own tickets and guards; and faults that were
put into these, each of which such schedules have to find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nmoe.cluster.simulate.fleet import Account, SimulatedEngine
from nmoe.cluster.simulate.flight import Flight, Violation
from nmoe.cluster.simulate.setting import Setting
from nmoe.engine.remote.supervisor import Action, Kill, Supervisor
from nmoe.rollout.guards import Guards
from nmoe.rollout.tickets import Tickets

FAULTS = st.lists(
    st.tuples(st.floats(0, 250), st.sampled_from(["death", "hang", "lie", "lie", "learner"]), st.integers(0, 2)),
    max_size=6,
)


@st.composite
def schedules(draw: st.DrawFn) -> Setting:
    faults = tuple(draw(FAULTS))
    return Setting(
        tickets=50,
        seed=draw(st.integers(0, 2**32)),
        staleness=draw(st.integers(0, 4)),
        groups=draw(st.integers(1, 6)),
        samples=draw(st.integers(1, 3)),
        overdue=draw(st.sampled_from(["wait", "drop"])),
        in_flight=draw(st.sampled_from(["recompute", "stale_kv", "drain"])),
        restarts=draw(st.integers(0, 3)),
        patience_s=draw(st.sampled_from([15.0, 600.0])),
        engines=draw(st.integers(1 + max((engine for _, _, engine in faults), default=0), 4)),
        slots=draw(st.integers(1, 6)),
        checkpoint_every=draw(st.integers(1, 3)),
        mean_tokens=100.0,
        most_tokens=1000,
        token_s=0.1,
        prefill_s=0.01,
        tool_s=draw(st.sampled_from([0.0, 3.0])),
        equal=draw(st.sampled_from([0.0, 0.3])),
        doubled=draw(st.sampled_from([0.0, 0.3])),
        canary_s=draw(st.sampled_from([0.1, 8.0])),
        start_s=10.0,
        deadline_s=20.0,
        faults=faults,
    )


def drawn(count: int, found: Callable[[Setting], Any]) -> None:
    """Calls a function on as many schedules, the same in every run."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules())
    def schedule(setting: Setting) -> None:
        found(setting)

    schedule()


def test_a_thousand_schedules_break_no_promise() -> None:
    """`Flight` checks each: a position ends once, no group is older than K, none is trained on that wrong weights sampled, the
    learner never waits where K allows a step, two steps' worth of groups or more are outstanding, and every token is accounted
    for."""
    met: Counter[str] = Counter()

    def one(setting: Setting) -> None:
        flight = Flight(setting)
        flight.run()
        account = flight.account
        met.update(account.reasons)
        met.update(retried=account.retried, restarts=account.restarts, stopped=bool(flight.stopped))
        met.update(oldest=max(account.ages, default=0) == setting.staleness > 0)

    drawn(1000, one)
    # Schedules that met nothing would show nothing.
    assert len(met) == 6, met
    assert min(met.values()) > 10, met


def test_a_schedule_is_replayed_from_its_seed() -> None:
    setting = Setting(
        tickets=200, seed=3, staleness=2, engines=3, slots=16, faults=((20.0, "death", 1), (60.0, "learner", 0))
    )
    assert Flight(setting).run() == Flight(setting).run() != Flight(Setting(tickets=200, seed=4, staleness=2)).run()


def too_old(of: int) -> Callable[[Guards, int, int], bool]:
    return lambda guards, oldest, version: version + of - oldest > guards._staleness


def trained_twice(tickets: Tickets, position: int, tokens: int) -> bool:
    tickets._outstanding[position] = tokens
    return True


def counts_in_vain(tickets: Tickets, position: int, tokens: int) -> bool:
    """The second answer is void, and is not counted."""
    if tickets._outstanding.get(position, 0) is not None:
        return False
    tickets._outstanding[position] = tokens
    return True


def newest_first(guards: Guards, version: int) -> list[int] | None:
    if len(guards._ready) < guards._groups or any(guards._too_old(one, version) for one in guards._running.values()):
        return None
    taken = sorted(guards._ready, reverse=True)[: guards._groups]
    for position in taken:
        del guards._ready[position]
    guards._taken.update(taken)
    return taken


def keeps_the_place(guards: Guards, position: int) -> None:
    if position in guards._taken:
        guards._taken.remove(position)


def forgets_the_outstanding(tickets: Tickets, state: dict[str, Any]) -> None:
    LOAD_STATE(tickets, {**state, "outstanding": state["outstanding"][:-1]})


def ignores_the_canary(flight: Flight, engine: SimulatedEngine, life: int) -> None:
    wrong, engine.wrong = engine.wrong, False
    CANARY(flight, engine, life)
    engine.wrong = wrong


def keeps_the_groups(flight: Flight, engine: SimulatedEngine) -> None:
    for attempt in engine.attempts:
        attempt.void = True
    engine.attempts.clear()
    FENCE(flight, engine)


def one_more(guards: Guards) -> int:
    return 1 + ROOM.__get__(guards)


def gives_up(supervisor: Supervisor, engine: int, now: float, why: str) -> list[Action]:
    return [Kill(engine)]


LOAD_STATE, CANARY, FENCE = Tickets.load_state, Flight._canary, Flight._fence
ROOM: Any = vars(Guards)["room"]
FOUND: dict[str, tuple[type, str, Any]] = {
    "admission off by one": (Guards, "room", property(one_more)),
    "learner waits in vain": (Guards, "_too_old", too_old(2)),
    "groups too old": (Guards, "_too_old", too_old(0)),
    "a void group stays outstanding": (Guards, "end", keeps_the_place),
    "newest first": (Guards, "take", newest_first),
    "second answer used": (Tickets, "answer", trained_twice),
    "second answer not counted": (Tickets, "answer", counts_in_vain),
    "resumption loses a group": (Tickets, "load_state", forgets_the_outstanding),
    "fence ignored": (Flight, "_canary", ignores_the_canary),
    "groups of a fenced engine lost": (Flight, "_fence", keeps_the_groups),
    "no restart": (Supervisor, "lost", gives_up),
}


@pytest.mark.parametrize("name", FOUND)
def test_schedules_find_a_fault(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(*FOUND[name])
    with pytest.raises((Violation, RuntimeError)):
        drawn(300, lambda setting: Flight(setting).run())


def test_the_account_of_a_run_without_faults() -> None:
    """Four groups of two samples a step, one slot for each sample, all samples alike: by hand."""
    setting = Setting(
        tickets=12,
        groups=4,
        samples=2,
        slots=8,
        mean_tokens=100.0,
        spread=0.0,
        most_tokens=100,
        token_s=0.1,
        learn_s=5.0,
        sync_s=2.0,
        canary_s=0.5,
        unequal=0.0,
    )
    flight = Flight(setting)
    assert flight.run() == Account(
        seconds=35.0,  # of two steps, 10 + 5 + 2.5 each: the third begins when there are no more problems
        trainer_wait_s=20.0,
        slot_s=160.0,
        ended=8,
        steps=2,
        samples=16,
        tokens=1600,
        lengths=1600,
        ages=flight.measured.ages,
    )
    assert flight.measured.ages == {0: 8}
