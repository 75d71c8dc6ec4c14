"""The supervisor's decisions, by hand and over random events."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.engine.remote.supervisor import Action, Kill, Restarts, Standstill, Start, State, Stop, Supervisor


def running(engines: int = 2, restarts: int = 2, least: int = 1) -> Supervisor:
    """Engines that serve since time 0; a start may take 30 s, and too few may serve for 100 s."""
    supervisor = Supervisor(engines, restarts, least, start_s=30, patience_s=100)
    assert supervisor.begin(0) == [Start(number) for number in range(engines)]
    for number in range(engines):
        assert supervisor.healthy(number, 0) == []
    return supervisor


def test_delays_grow_and_a_process_that_was_well_for_long_begins_anew() -> None:
    restarts = Restarts(8)
    assert [restarts.delay(0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, None]
    restarts.well(1000)
    assert restarts.delay(1599) is None
    restarts.well(2000)
    assert [restarts.delay(2600), restarts.delay(2600)] == [0, 1]
    assert Restarts(0).delay(0) is None


def test_a_lost_engine_is_killed_and_started_at_once_and_then_after_a_delay() -> None:
    supervisor = running()
    assert supervisor.lost(1, 5, "ended") == [Kill(1), Start(1)]
    assert supervisor.states() == [State.HEALTHY, State.STARTING]
    assert supervisor.lost(1, 6, "ended") == [Kill(1)], "the second restart waits for a second"
    assert supervisor.due() == 7
    assert supervisor.tick(6.9) == []
    assert supervisor.tick(7) == [Start(1)]
    assert supervisor.due() == 37
    assert supervisor.lost(0, 8, "hangs") == [Kill(0), Start(0)], "each engine has restarts of its own"


def test_an_event_of_an_engine_that_waits_or_was_given_up_changes_nothing() -> None:
    supervisor = running(restarts=1)
    assert supervisor.lost(1, 5, "ended") == [Kill(1), Start(1)]
    assert supervisor.lost(1, 6, "ended") == [Kill(1)]
    assert supervisor.states() == [State.HEALTHY, State.GIVEN_UP]
    assert supervisor.lost(1, 7, "ended") == supervisor.healthy(1, 8) == []
    assert supervisor.due() is None


def test_a_start_that_takes_too_long_counts_as_a_fault() -> None:
    supervisor = running()
    supervisor.lost(0, 10, "ended")
    assert supervisor.tick(39) == []
    assert supervisor.tick(40) == [Kill(0)]
    assert supervisor.due() == 41


def test_an_engine_that_was_never_well_is_not_started_again() -> None:
    supervisor = Supervisor(2, 5, 1, start_s=30, patience_s=100)
    supervisor.begin(0)
    supervisor.healthy(0, 1)
    assert supervisor.lost(1, 2, "its checkpoint is torn") == [Kill(1), Stop("its checkpoint is torn")]
    late = Supervisor(1, 5, 1, start_s=30, patience_s=100)
    late.begin(0)
    assert late.tick(30) == [Kill(0), Stop("did not answer within 30 s")]


def test_the_run_stops_where_too_few_engines_can_serve_or_do_for_long() -> None:
    supervisor = running(restarts=0, least=2)
    assert supervisor.lost(1, 5, "killed") == [
        Kill(1),
        Stop("1 of 2 engines serve, and 2 are needed: killed"),
    ]
    assert supervisor.tick(1000) == [], "it says so once"
    patient = running(restarts=9, least=2)
    patient.lost(1, 5, "killed")
    patient.healthy(1, 20)
    assert patient.tick(200) == [], "two serve again"
    patient.lost(1, 300, "killed")
    assert patient.tick(301) == [Start(1)]
    assert patient.tick(330) == []
    assert patient.tick(331) == [Kill(1)]
    assert patient.tick(333) == [Start(1)]
    assert patient.tick(362) == []
    assert patient.tick(400) == [
        Kill(1),
        Stop("1 of 2 engines serve, and 2 are needed: did not answer within 30 s"),
    ]


EVENTS = st.lists(st.tuples(st.sampled_from(("healthy", "lost", "tick")), st.integers(0, 2), st.floats(0, 40)))


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.integers(0, 3), st.integers(1, 3))
def test_no_engine_is_started_twice_or_more_often_than_allowed(
    events: list[tuple[str, int, float]], restarts: int, least: int
) -> None:
    supervisor = Supervisor(3, restarts, least, start_s=30, patience_s=100)
    runs, starts, stops, now = [False] * 3, [0] * 3, 0, 0.0

    def act(actions: list[Action]) -> None:
        nonlocal stops
        for action in actions:
            match action:
                case Start(engine):
                    assert not runs[engine]
                    runs[engine] = True
                    starts[engine] += 1
                case Kill(engine):
                    runs[engine] = False
                case Stop():
                    stops += 1

    act(supervisor.begin(now))
    for name, engine, later in events:
        now += min(later, 5.0)  # never well for ten minutes: at most 5 s for each of 100 events
        before = sum(state is State.HEALTHY for state in supervisor.states())
        if name == "tick":
            act(supervisor.tick(now))
        elif name == "healthy":
            act(supervisor.healthy(engine, now))
        else:
            act(supervisor.lost(engine, now, "lost"))
        states = supervisor.states()
        assert [state in (State.STARTING, State.HEALTHY) for state in states] == runs
        assert before - sum(state is State.HEALTHY for state in states) <= 1
        if sum(state is not State.GIVEN_UP for state in states) < least:
            assert stops == 1
        assert stops <= 1
        if (due := supervisor.due()) is not None:
            assert due > now
    if now < 600:
        assert max(starts) <= 1 + restarts


def test_a_step_hangs_after_ten_times_the_longest_before_and_the_slack() -> None:
    """Not the first one, and no evaluation or checkpoint of which something is done; a start forgets the activity alone."""
    still = Standstill(100.0, math.inf)
    for now, activity in [
        (0, "step 1"),
        (5000, "step 1"),
        (5020, "step 2"),
        (5050, "evaluation 2"),
        (99050, "evaluation 2"),
    ]:
        assert still.does(activity, "", now) is None  # the longest step took 5020 s
    still = Standstill(100.0, math.inf)
    for now, activity in [
        (0, "step 1"),
        (20, "step 2"),
        (50, "evaluation 2"),
        (9050, "checkpoint 2"),
        (18050, "step 3"),
    ]:
        assert still.does(activity, "", now) is None  # the longest step took 30 s
    assert still.does("step 3", "", 18050 + 400) is None
    assert still.does("step 3", "", 18050 + 401) == "step 3 has taken 401 s, and the longest one before took 30 s"
    still.begin()
    assert still.does("step 3", "", 30000) is None
    assert still.does("step 3", "", 30400) is None
    assert still.does("step 3", "", 30401) is not None


@pytest.mark.parametrize("activity", ["step 1", "evaluation 0", "checkpoint 3", "end 9"])
def test_an_activity_hangs_of_which_nothing_is_done(activity: str) -> None:
    """However long it takes, while something of it is done."""
    still = Standstill(100.0, 50.0)
    for now in range(0, 4000, 50):
        assert still.does(activity, f"{now}", now) is None
    assert still.does(activity, "3950", 4000) is None
    assert still.does(activity, "3950", 4001) == f"nothing of {activity} was done for 51 s"
    # What follows begins anew, also after a start of the same activity.
    assert still.does("step 4", "3950", 4002) is None
    assert still.does("step 4", "3950", 4052) is None
    still.begin()
    assert still.does("step 4", "3950", 4090) is None
    assert still.does("step 4", "3950", 4141) == "nothing of step 4 was done for 51 s"
