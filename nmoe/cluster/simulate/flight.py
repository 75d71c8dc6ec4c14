"""A simulated run: a virtual clock drives the run's own tickets, guards and supervisor against simulated engines.

Every decision by which a group could be lost, trained on twice or trained on too late is made by the code of a real run. Engines,
links and the learner are simulated: lengths, times and faults. `Flight` keeps a second account, and raises `Violation`
where the two differ, so that any schedule that meets a fault of that code shows it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from copy import deepcopy
from dataclasses import replace
from heapq import heappop, heappush

from nmoe.cluster.simulate.fleet import Account, Attempt, SimulatedFleet
from nmoe.cluster.simulate.setting import Setting
from nmoe.rollout.guards import Guards
from nmoe.rollout.tickets import Reason, Tickets


class Violation(RuntimeError):  # noqa: N818 - a promise that was broken, not an error of the simulator
    """A promise that the simulated run broke."""


class Flight(SimulatedFleet):
    """One simulated run. `run` takes it to its end."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._least, self._most = (
            (steps + 1) * setting.groups for steps in (min(1, setting.staleness), setting.staleness)
        )
        self._ended: dict[int, None] = {}  # in order
        self._life = 0  # counts the ends of the learner
        self.tickets, self._version = Tickets(), 0
        self._save()
        self.measured = self._kept
        self._start()

    def run(self) -> Account:
        """Returns what happened until the pool had no more problems. Raises Violation where a promise is broken."""
        self._pump()
        while self._events:
            self._now, _, method, given = heappop(self._events)
            method(*given)
        self._check_end()
        return self.measured

    def _save(self) -> None:
        self._saved, self._kept = (json.dumps(self.tickets.state()), self._version), deepcopy(self.account)

    def _start(self) -> None:
        """Starts the learner from the last checkpoint."""
        state, self._version = self._saved
        self._newest, self._alive, self._idle_since = self._version, True, self._now
        self.tickets, self.guards = Tickets(), Guards(self.setting.staleness, self.setting.groups, self.setting.overdue)
        self.tickets.load_state(json.loads(state))
        while len(self._ended) > self._kept.ended:
            self._ended.popitem()
        # A second account of outstanding groups, beside the guards'.
        self._running: dict[int, tuple[Attempt, int]] = {}  # by position, with the version at issue
        self._running_of: Counter[int] = Counter()  # of them, by that version
        self._ready: dict[int, Attempt] = {}
        self._taken: list[Attempt] = []
        self._sampled = self.account.tokens + self.account.void
        self._left = deque(self.tickets.unanswered)  # issued again before any new one

    def _pump(self) -> None:
        """Begins a step and issues tickets, where that is allowed."""
        if not self._alive:
            return
        if not self._taken:
            for position in self.guards.late(self._version):
                self._overdue(position)
            if (taken := self.guards.take(self._version)) is not None:
                self._begin(taken)
            elif len(self._ready) >= self.setting.groups and not self._blocked():
                raise Violation(f"the learner waits at version {self._version}, with {len(self._ready)} groups ready")
        while self.guards.room > 0 and (self._left or self.tickets.next < self.setting.tickets):
            if self._left:
                position = self._left.popleft()
            else:
                position = self.tickets.next
                self.tickets.issue(position)
            self._issue(position)
        outstanding = len(self._running) + len(self._ready) + len(self._taken)
        more = self._left or self.tickets.next < self.setting.tickets
        if outstanding > self._most or (outstanding < self._least and more):
            raise Violation(f"{outstanding} groups are outstanding, and there have to be {self._least} to {self._most}")

    def _blocked(self) -> bool:
        """Whether a group that runs would be too old after a step that began now."""
        oldest = self._version + 1 - self.setting.staleness
        return any(count and version < oldest for version, count in self._running_of.items())

    def _issue(self, position: int) -> None:
        self.guards.issue(position, self._version)
        attempt = Attempt(position, self.setting.samples)
        self._running[position] = attempt, self._version
        self._running_of[self._version] += 1
        self._deal(attempt)

    def _begin(self, taken: list[int]) -> None:
        self._taken = [self._ready.pop(position) for position in taken]
        for attempt in self._taken:
            age = self._version - attempt.oldest
            if age > self.setting.staleness:
                raise Violation(f"position {attempt.position} is trained on at the age of {age}")
            if attempt.wrong:
                raise Violation(f"position {attempt.position} is trained on, and wrong weights sampled it")
            self.account.ages[age] += 1
        self.account.trainer_wait_s += self._now - self._idle_since
        self._after(self.setting.learn_s * len(taken) / self.setting.groups, self._stepped, self._life)

    def _stepped(self, life: int) -> None:
        if life == self._life:
            self._publish()

    def _published(self) -> None:
        """Ends the step: its groups are trained on, and the engines have the new weights."""
        for attempt in self._taken:
            self.tickets.train(attempt.position, attempt.tokens, 0)
            self.account.tokens += attempt.tokens
            self._end(attempt.position)
        self.account.samples += len(self._taken) * self.setting.samples
        self.account.steps, self.account.seconds = self.account.steps + 1, self._now
        self._taken, self._version, self._idle_since = [], self._newest, self._now
        self.tickets.check()
        if self.account.steps % self.setting.checkpoint_every == 0:
            self._save()
        if self.tickets.next < self.setting.tickets or not self.measured.steps:
            self.measured = deepcopy(self.account)
        self._pump()

    def _end(self, position: int) -> None:
        if position in self._ended:
            raise Violation(f"position {position} ends twice")
        self.guards.end(position)
        self._ended[position] = None
        self.account.ended += 1
        self.account.lengths += sum(self._lengths.of(position)[0])

    def _void(self, position: int, reason: Reason, tokens: int) -> None:
        self.tickets.end(position, reason)
        self.account.reasons[reason] += 1
        self.account.void += tokens
        self._end(position)

    def _overdue(self, position: int) -> None:
        """Gives up a group. What has come of it is void; the rest may have been on the way."""
        attempt = self._forget(position)
        self._withdraw([attempt])
        self._handed_over(attempt)
        self._void(position, "overdue", attempt.tokens)
        if self._random.random() < self.setting.doubled:
            self._after(0.1, self._came_again, attempt, self._life)

    def _forget(self, position: int) -> Attempt:
        attempt, version = self._running.pop(position)
        self._running_of[version] -= 1
        return attempt

    def _handed_over(self, attempt: Attempt) -> bool:
        self._sampled += attempt.tokens
        self.tickets.sampled(attempt.tokens)
        return self.tickets.answer(attempt.position, attempt.tokens)

    def _arrive(self, attempt: Attempt) -> None:
        position = attempt.position
        self._forget(position)
        self._ready[position] = attempt
        if not self._handed_over(attempt):
            raise Violation(f"position {position}: its answer is not used")
        self.guards.ready(position, attempt.oldest)
        if self._random.random() < self.setting.equal:
            del self._ready[position]
            self._void(position, "zero_variance", attempt.tokens)
        if self._random.random() < self.setting.doubled:
            self._after(self._random.expovariate(1 / self.setting.learn_s), self._came_again, attempt, self._life)
        self._pump()

    def _came_again(self, attempt: Attempt, life: int) -> None:
        """An answer comes that nothing waits for."""
        if life != self._life:
            return
        if self._handed_over(attempt):
            raise Violation(f"position {attempt.position}: a second answer is used")
        self.account.void += attempt.tokens

    def _again(self, attempt: Attempt) -> Attempt:
        if attempt.left == 0:  # it was held
            self._sampled += attempt.tokens
            self.account.void += attempt.tokens
            self.tickets.discard(attempt.tokens)
        again = Attempt(attempt.position, self.setting.samples)
        self._running[attempt.position] = again, self._running[attempt.position][1]
        return again

    def _learner(self) -> None:
        """The learner ends, and starts again from its last checkpoint."""
        self._alive, self._life = False, self._life + 1
        self.account.restarts += 1
        self._withdraw([attempt for attempt, _ in self._running.values()])
        self._waiting, self._publishing = [], {}
        self._after(self.setting.start_s, self._resumed, self._life)

    def _resumed(self, life: int) -> None:
        if life != self._life:
            return
        now = self.account
        self.account = replace(
            deepcopy(self._kept),
            trainer_wait_s=now.trainer_wait_s,
            slot_s=now.slot_s,
            retried=now.retried,
            restarts=now.restarts,
        )
        for engine in self._engines:  # a publication comes first
            engine.version = self._saved[1]
            engine.clear(self.setting.slots)
            engine.life += engine.open
            heappush(self._loads, (0, engine.index))
        self._start()
        self._pump()

    def _check_end(self) -> None:
        """Raises Violation for a group that was lost, and for tokens that are not accounted for."""
        goes_on = self._running or self._taken or len(self._ready) >= self.setting.groups
        if goes_on and not self.stopped:
            raise Violation(f"the run ends with the positions {sorted(self._running)[:5]} running, and a step to take")
        there = [*self._ready.values(), *self._taken]
        issued = self.tickets.next if self.stopped else self.setting.tickets
        if (
            len(self._ended) + len(self._left) + len(self._running) + len(there) != issued
            or len(self._ended) != self.account.ended
        ):
            raise Violation(f"of {issued} positions {len(self._ended)} ended, and {len(there)} are outstanding")
        self.tickets.check()
        tokens = self._sampled, self.account.tokens, self.account.void
        if tokens != tuple(self.tickets.metrics().values()):
            raise Violation(f"tokens are {self.tickets.metrics()}, and should be {tokens}")
        if self.tickets.in_flight != sum(attempt.tokens for attempt in there):
            raise Violation(f"{self.tickets.in_flight} tokens are in flight, of {len(there)} groups")
