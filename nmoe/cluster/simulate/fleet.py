"""Simulated engines, and the fleet that deals groups to them, on a virtual clock."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from nmoe.cluster.simulate.setting import Lengths, Setting
from nmoe.engine.remote.supervisor import Action, Start, Stop, Supervisor

# Engines that one supervisor can keep, and engines of a machine where there are more: it looks at each of them at each event.
_SUPERVISED, _PER_MACHINE = 256, 8
_SLOW = 10  # times the usual time of a start: when it counts as failed


class Attempt:
    """One try to sample a group, on one engine."""

    __slots__ = ("engine", "left", "oldest", "position", "running", "tokens", "void", "wrong")

    def __init__(self, position: int, samples: int) -> None:
        self.position, self.left, self.running = position, samples, 0
        self.engine: SimulatedEngine | None = None
        self.oldest, self.tokens = -1, 0
        self.wrong = False  # whether wrong weights sampled one of its tokens
        self.void = False  # whether nothing waits for it any longer


class SimulatedEngine:
    """An engine: slots that samples run in, and a queue before them."""

    def __init__(self, index: int, slots: int, speed: float, link: float) -> None:
        self.index, self.speed, self.link, self.open = index, speed, link, True
        self.life = self.version = 0  # `life` counts its fences
        self.stalled = self.frozen = 0.0  # seconds in which its samples stood still, in all; time until which it hangs
        self.clear(slots)

    def clear(self, slots: int) -> None:
        self.free, self.load = slots, 0  # slots; groups
        self.queue: deque[tuple[Attempt, int, float]] = deque()
        self.attempts: dict[Attempt, None] = {}
        self.held: list[Attempt] = []  # sampled, until the canary of the newest weights has passed
        self.holding, self.proved = False, True  # whether new groups go elsewhere; whether that canary has passed
        self.lies = self.wrong = False  # whether it takes the next weights wrongly; whether it has wrong ones


@dataclass
class Account:
    """What has happened in a simulated run. Times are in virtual seconds. A checkpoint restores `ended` and what follows."""

    seconds: float = 0.0
    trainer_wait_s: float = 0.0
    slot_s: float = 0.0  # in which slots sampled, of all engines together
    retried: int = 0  # groups
    restarts: int = 0  # of engines and of the learner
    ended: int = 0  # groups
    steps: int = 0
    samples: int = 0  # trained on
    tokens: int = 0  # trained on
    void: int = 0  # tokens
    lengths: int = 0  # tokens of all groups that ended, had they been sampled to their ends
    ages: Counter[int] = field(default_factory=Counter)  # of the groups trained on
    reasons: Counter[str] = field(default_factory=Counter)  # of the groups that were not


class SimulatedFleet(ABC):
    """Engines, their supervisors, and the events to come. A subclass is the learner that takes what they sample."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.account, self.stopped = setting, Account(), ""
        self._random, self._lengths = random.Random(setting.seed), Lengths(setting)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._now, self._count, self._newest = 0.0, 0, 0  # `_newest` is the version that engines get
        draw, count = self._random.lognormvariate, setting.engines
        self._engines = [
            SimulatedEngine(index, setting.slots, draw(0, setting.unequal), draw(0, setting.unequal))
            for index in range(count)
        ]
        self._loads = [(0, index) for index in range(count)]  # a heap, with entries that are no longer true
        self._waiting: list[Attempt] = []  # no engine is open for them
        self._publishing: dict[int, None] = {}  # engines that do not serve the newest weights yet
        self._size = count if count <= _SUPERVISED else _PER_MACHINE
        least = setting.least_engines if self._size == count else 0
        self._supervisors = [
            Supervisor(
                min(self._size, count - first), setting.restarts, least, _SLOW * setting.start_s, setting.patience_s
            )
            for first in range(0, count, self._size)
        ]
        self._due = [math.inf] * len(self._supervisors)
        for supervisor in self._supervisors:
            for index in range(len(supervisor.begin(0.0))):
                supervisor.healthy(index, 0.0)
        for at, kind, index in setting.faults:
            self._after(at, getattr(self, f"_{kind}"), *(() if kind == "learner" else (self._engines[index],)))

    @abstractmethod
    def _arrive(self, attempt: Attempt) -> None:
        """Takes the samples of a group."""

    @abstractmethod
    def _published(self) -> None:
        """Notes that all engines serve the newest weights."""

    @abstractmethod
    def _again(self, attempt: Attempt) -> Attempt:
        """Returns another attempt for a group whose engine was fenced."""

    def _after(self, seconds: float, method: Callable[..., None], *given: Any) -> None:
        self._count += 1
        heappush(self._events, (self._now + seconds, self._count, method, given))

    # Groups.

    def _deal(self, attempt: Attempt) -> None:
        """Gives a group to the open engine with the fewest."""
        while self._loads:
            load, index = self._loads[0]
            engine = self._engines[index]
            if engine.open and not engine.holding and engine.load == load:
                break
            heappop(self._loads)
        else:
            self._waiting.append(attempt)
            return
        attempt.engine, engine.attempts[attempt], engine.load = engine, None, engine.load + 1
        heappush(self._loads, (engine.load, index))
        engine.queue.extend(zip([attempt] * self.setting.samples, *self._lengths.of(attempt.position), strict=True))
        self._fill(engine)

    def _fill(self, engine: SimulatedEngine) -> None:
        """Starts samples in the free slots."""
        while engine.free and engine.queue:
            attempt, length, tool = engine.queue.popleft()
            if attempt.void:
                continue
            engine.free -= 1
            attempt.running += 1
            if attempt.oldest < 0:
                attempt.oldest = engine.version
            seconds = length * self.setting.token_s * engine.speed
            self._after(seconds, self._sampled_one, attempt, engine, length, seconds, tool, engine.stalled)

    def _sampled_one(
        self, attempt: Attempt, engine: SimulatedEngine, length: int, seconds: float, tool: float, stalled: float
    ) -> None:
        if attempt.void:
            return
        if engine.stalled > stalled:
            late = engine.stalled - stalled
            self._after(late, self._sampled_one, attempt, engine, length, seconds, tool, engine.stalled)
            return
        engine.free += 1
        attempt.running -= 1
        attempt.tokens += length
        attempt.wrong |= engine.wrong
        self.account.slot_s += seconds
        self._fill(engine)
        if engine.holding and engine.proved and self.setting.in_flight == "drain" and self._drained(engine):
            self._after(self.setting.sync_s * engine.link, self._commit, engine, engine.life)
        if tool:
            self._after(tool, self._came, attempt, engine)
        else:
            self._came(attempt, engine)

    def _came(self, attempt: Attempt, engine: SimulatedEngine) -> None:
        """A sample has come; the last one of a group completes it. It is held while the newest weights are not proved."""
        attempt.left -= 1
        if attempt.left or attempt.void:
            return
        engine.load -= 1
        heappush(self._loads, (engine.load, engine.index))
        if engine.proved:
            del engine.attempts[attempt]
            self._arrive(attempt)
        else:
            engine.held.append(attempt)

    def _withdraw(self, attempts: Iterable[Attempt]) -> None:
        """Ends groups on their engines."""
        for attempt in attempts:
            attempt.void, engine = True, attempt.engine
            if engine is not None and engine.attempts.pop(attempt, self) is None:
                engine.free += attempt.running
                engine.load -= attempt.left > 0
                heappush(self._loads, (engine.load, engine.index))
                self._fill(engine)

    # Publications.

    def _publish(self) -> None:
        self._newest += 1
        self._publishing = {engine.index: None for engine in self._engines if engine.open}
        for index in self._publishing:
            engine = self._engines[index]
            engine.holding = True
            if self.setting.in_flight != "drain" or self._drained(engine):
                self._after(self.setting.sync_s * engine.link, self._commit, engine, engine.life)
        if not self._publishing:
            self._published()

    def _drained(self, engine: SimulatedEngine) -> bool:
        return engine.free == self.setting.slots and not engine.queue

    def _commit(self, engine: SimulatedEngine, life: int) -> None:
        """An engine takes the newest weights, and is asked for the canary before new groups go to it."""
        if engine.life != life:
            return
        if self._now < engine.frozen:
            self._after(engine.frozen - self._now, self._commit, engine, life)
            return
        engine.version, engine.proved = self._newest, False
        engine.wrong, engine.lies = engine.lies, False
        if self.setting.in_flight == "recompute":
            contexts = (self.setting.slots - engine.free) * self.setting.mean_tokens / 2
            engine.stalled += contexts * self.setting.prefill_s
        self._after(self.setting.canary_s, self._canary, engine, life)

    def _canary(self, engine: SimulatedEngine, life: int) -> None:
        if engine.life != life:
            return
        if engine.wrong:
            self._fence(engine)
            return
        held, engine.held = engine.held, []
        engine.proved, engine.holding = True, False
        self._serves(engine)
        for attempt in held:
            if not attempt.void:
                del engine.attempts[attempt]
                self._arrive(attempt)

    def _serves(self, engine: SimulatedEngine) -> None:
        heappush(self._loads, (engine.load, engine.index))
        waiting, self._waiting = self._waiting, []
        for attempt in waiting:
            if not attempt.void:
                self._deal(attempt)
        self._go_on(engine)

    def _go_on(self, engine: SimulatedEngine) -> None:
        """Ends the publication, if this engine was the last that it waited for."""
        if self._publishing.pop(engine.index, self) is None and not self._publishing:
            self._published()

    # Faults.

    def _fence(self, engine: SimulatedEngine) -> None:
        """Gives an engine no more groups, and has those that it has sampled elsewhere."""
        if not engine.open:
            return
        engine.open, engine.life, attempts = False, engine.life + 1, list(engine.attempts)
        engine.clear(self.setting.slots)
        for attempt in attempts:
            attempt.void = True
            self._deal(self._again(attempt))
        self.account.retried += len(attempts)
        self._go_on(engine)
        number, index = divmod(engine.index, self._size)
        self._act(number, self._supervisors[number].lost(index, self._now, "a fault"))

    def _act(self, number: int, actions: list[Action]) -> None:
        """Does what a supervisor decided, and asks it again when it is due."""
        for action in actions:
            if isinstance(action, Start):
                self._after(self.setting.start_s, self._restarted, self._engines[number * self._size + action.engine])
            elif isinstance(action, Stop):
                self.stopped, self._events = action.reason, []
                return
        due = self._supervisors[number].due()
        if due is not None and due != self._due[number]:
            self._due[number] = due
            self._after(due - self._now, self._tick, number, due)

    def _tick(self, number: int, due: float) -> None:
        if self._due[number] == due:
            self._due[number] = math.inf
            self._act(number, self._supervisors[number].tick(max(self._now, due)))

    def _restarted(self, engine: SimulatedEngine) -> None:
        """A restarted engine gets the newest weights, and serves."""
        number, index = divmod(engine.index, self._size)
        self._act(number, self._supervisors[number].healthy(index, self._now))
        self.account.restarts += 1
        engine.version, engine.open = self._newest, True
        self._serves(engine)

    def _death(self, engine: SimulatedEngine) -> None:
        self._fence(engine)

    def _hang(self, engine: SimulatedEngine) -> None:
        """An engine stands still for a while, and is fenced if that is longer than the deadline."""
        seconds = self._random.expovariate(1 / self.setting.deadline_s)
        engine.stalled, engine.frozen = engine.stalled + seconds, self._now + seconds
        if seconds > self.setting.deadline_s:
            self._after(self.setting.deadline_s, self._hung, engine, engine.life)

    def _hung(self, engine: SimulatedEngine, life: int) -> None:
        if engine.life == life:
            self._fence(engine)

    def _lie(self, engine: SimulatedEngine) -> None:
        engine.lies = True
