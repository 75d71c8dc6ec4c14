"""The guards of an asynchronous run under any order of events: no group is trained on twice or too old, and a step always comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nmoe.rollout.guards import Guards


class Schedules(RuleBasedStateMachine):
    """Draws schedules of a run: groups issued, arrived with tokens of any version since, void at any time, and steps.

    The model beside the guards keeps every group's place and the oldest version that it can have.
    """

    @initialize(staleness=st.integers(0, 4), groups=st.integers(1, 4), overdue=st.sampled_from(["wait", "drop"]))
    def begin(self, staleness: int, groups: int, overdue: str) -> None:
        self.staleness, self.groups, self.overdue = staleness, groups, overdue
        self.guards = Guards(staleness, groups, overdue)  # type: ignore[arg-type]
        self.version = self.next = 0
        self.running: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.step: list[int] | None = None  # what the step under way trains on
        self.trained: list[int] = []
        self.ages: list[int] = []

    def capacity(self) -> int:
        return (self.guards.ahead + 1) * self.groups

    def outstanding(self) -> int:
        return len(self.running) + len(self.ready) + len(self.step or ())

    @rule(count=st.integers(1, 6))
    def issue(self, count: int) -> None:
        # While a step trains, the groups that run are sampled by the version before it. K = 0 samples nothing meanwhile.
        if self.step is not None and self.staleness == 0:
            return
        for _ in range(min(count, self.guards.room)):
            self.guards.issue(self.next, self.version)
            self.running[self.next] = self.version
            self.next += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.running)))
        oldest = data.draw(st.integers(self.running.pop(position), self.version))
        self.guards.ready(position, oldest)
        self.ready[position] = oldest

    @precondition(lambda self: self.running or self.ready)
    @rule(data=st.data())
    def void(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted({**self.running, **self.ready})))
        self.guards.end(position)
        self.running.pop(position, None)
        self.ready.pop(position, None)

    @precondition(lambda self: self.step is None)
    @rule(fewer=st.booleans())
    def begin_step(self, fewer: bool) -> None:
        late = self.guards.late(self.version)
        if self.overdue == "wait" or len(self.ready) < self.groups:
            assert late == []
        else:
            assert late == [p for p, oldest in self.running.items() if self.version + 1 - oldest > self.staleness]
        for position in late:
            self.guards.end(position)
            del self.running[position]
        least = 0 if fewer else self.groups
        taken = self.guards.take(self.version, 0) if fewer else self.guards.take(self.version)
        overdue = [p for p, oldest in self.running.items() if self.version + 1 - oldest > self.staleness]
        assert (taken is None) == (len(self.ready) < least or bool(overdue))
        if taken is None:
            return
        order = [position for _, position in sorted((oldest, position) for position, oldest in self.ready.items())]
        assert taken == order[: len(taken)], "the oldest first"
        must = [p for p in order if self.version + 1 - self.ready[p] > self.staleness]
        assert len(taken) == max(min(self.groups, len(order)), len(must))
        self.ages += [self.version - self.ready.pop(position) for position in taken]
        self.step = taken

    @precondition(lambda self: self.step is not None)
    @rule(updated=st.booleans())
    def end_step(self, updated: bool) -> None:
        """A step that is skipped makes no version."""
        assert self.step is not None
        for position in self.step:
            self.guards.end(position)
        self.trained += self.step
        self.step = None
        self.version += updated

    @precondition(lambda self: self.step is None)
    @rule()
    def all_arrive(self) -> None:
        """If every group arrives, and places are filled, then a step comes."""
        self.issue(self.capacity())
        for position, oldest in [*self.running.items()]:
            self.guards.ready(position, oldest)
            self.ready[position] = self.running.pop(position)
        self.begin_step(False)
        assert self.step is not None
        assert len(self.step) >= self.groups

    @invariant()
    def no_group_is_trained_twice_or_too_old(self) -> None:
        if not hasattr(self, "guards"):
            return
        assert len(set(self.trained)) == len(self.trained)
        assert max(self.ages, default=0) <= self.staleness
        assert self.guards.room == self.capacity() - self.outstanding()
        assert min(1, self.staleness) <= self.guards.ahead <= self.staleness
        assert self.outstanding() <= (self.staleness + 1) * self.groups
        assert (self.guards.running, self.guards.ready_groups) == (len(self.running), len(self.ready))


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(st.integers(1, 8), st.integers(1, 5), st.lists(st.floats(0, 1), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_with_waiting_the_age_holds_although_every_place_is_filled_at_once(
    staleness: int, groups: int, lengths: Sequence[float]
) -> None:
    """Groups of lasting lengths, issued as soon as there is room, and steps of one unit as soon as they may begin."""
    guards, version, position, now = Guards(staleness, groups), 0, 0, 0.0
    ends: dict[int, tuple[float, int]] = {}
    for _ in range(60):
        while guards.room > 0:
            guards.issue(position, version)
            ends[position] = (now + 9 * lengths[position % len(lengths)], version)
            position += 1
        while (taken := guards.take(version)) is None:
            first = min(ends, key=lambda one: ends[one][0])
            now, issued = ends.pop(first)
            guards.ready(first, issued)
        version, now = version + 1, now + 1
        for one in taken:
            guards.end(one)
    assert version == 60


def steps_of(guards: Guards, lengths: Iterable[float]) -> list[tuple[int, int, float]]:
    """Takes steps of one unit and one group, for as many groups as have these times to sample, over engines with room for all.
    Returns each step's `ahead`, and the age and the wait of its group."""
    version, now, following = 0, 0.0, enumerate(lengths)
    running: dict[int, float] = {}
    issued: dict[int, int] = {}
    found = []
    while True:
        began = now
        for position, length in islice(following, max(0, guards.room)):
            guards.issue(position, version)
            issued[position], running[position] = version, now + length
        while (taken := guards.take(version)) is None:
            if not running:
                return found
            now = max(now, min(running.values()))
            for position in [position for position, end in running.items() if end <= now]:
                guards.ready(position, issued[position])
                del running[position]
        (position,) = taken
        found.append((guards.ahead, version - issued[position], now - began))
        version, now = version + 1, now + 1
        for position in [position for position, end in running.items() if end <= now]:
            guards.ready(position, issued[position])
            del running[position]
        guards.end(taken[0])


def test_groups_are_sampled_as_far_ahead_as_steps_wait_for_them() -> None:
    fast = steps_of(Guards(8, 1), [0.5] * 40)
    assert [ahead for ahead, _, _ in fast] == [2] * 9 + [1] * 31, (
        "the first waits, and from the third on eight leave one ready"
    )
    assert {age for _, age, _ in fast[12:]} == {1}
    assert [wait for _, _, wait in fast if wait] == [0.5]
    slow = steps_of(Guards(3, 1), [9.0] * 40)
    assert [ahead for ahead, _, _ in slow[:4]] == [2, 2, 3, 3]
    assert max(age for _, age, _ in slow) == 3


def test_now_and_then_a_long_group_delays_few_steps() -> None:
    """Of twenty groups one takes five steps to sample. As far ahead as K allows at all times, the first step alone would wait."""
    lengths = [5.0 if number % 20 == 7 else 0.5 for number in range(2000)]
    always = Guards(8, 1)
    always._ahead, always._patience = 8, 10**9
    waits = [[wait for _, _, wait in steps_of(guards, lengths) if wait] for guards in (always, Guards(8, 1))]
    assert waits == [[0.5], [0.5, 0.5, 0.5]]


def test_an_overdue_group_is_waited_for() -> None:
    guards = Guards(1, 2)
    assert guards.room == 4
    for position in range(4):
        guards.issue(position, 0)
    assert (guards.room, guards.take(0)) == (0, None)
    for position in (3, 1):
        guards.ready(position, 0)
    # A step at version 0 leaves 0 and 2 behind, which are one version old at the next: K allows it.
    assert guards.take(0) == [1, 3]
    assert guards.room == 0, "a taken group keeps its place until it was trained on"
    for position in (1, 3):
        guards.end(position)
    for position in (4, 5):
        guards.issue(position, 1)
        guards.ready(position, 1)
    # A step at version 1 would leave them two versions old.
    assert guards.take(1) is None
    guards.ready(2, 1)
    assert guards.take(1) is None
    guards.ready(0, 0)
    # The oldest first; 2 has tokens of version 1 alone.
    assert guards.take(1) == [0, 2]


def test_an_overdue_group_is_dropped_once_a_step_could_begin() -> None:
    guards = Guards(1, 2, "drop")
    for position in range(4):
        guards.issue(position, 0)
    guards.ready(0, 0)
    assert guards.late(1) == [], "one group is too few for a step, and 1 to 3 may still come"
    guards.ready(1, 0)
    assert guards.late(0) == []
    assert guards.late(1) == [2, 3]
    for position in (2, 3):
        guards.end(position)
    assert (guards.take(1), guards.room) == ([0, 1], 2)


def test_groups_that_would_be_too_old_are_trained_on_together() -> None:
    guards = Guards(1, 2)
    for position in range(4):
        guards.issue(position, 0)
        guards.ready(position, 0)
    assert guards.take(1) == [0, 1, 2, 3]
    assert guards.take(1, 0) == []


def test_what_no_run_does_is_refused() -> None:
    guards = Guards(1, 1)
    guards.issue(0, 2)
    with pytest.raises(RuntimeError, match="position 0 is outstanding, and issued again"):
        guards.issue(0, 2)
    with pytest.raises(KeyError):
        guards.ready(1, 2)
    with pytest.raises(KeyError):
        guards.end(1)
    guards.issue(3, 4)
    with pytest.raises(RuntimeError, match="position 3 was issued at version 4, and has tokens of version 3"):
        guards.ready(3, 3)
