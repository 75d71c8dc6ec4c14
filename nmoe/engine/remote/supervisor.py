"""Decides when processes are started, killed and given up, from events and their times alone. It has no clock, no threads and no
randomness."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

# Seconds: of the delay before a second restart, which then doubles, of the longest, and of health by which faults are forgotten.
_DELAY_S, _LONGEST_S, _STEADY_S = 1.0, 60.0, 600.0
# How many times as long as the longest one before a step may last.
_TIMES = 10


class Restarts:
    """How often one process may be started again, and after how long: at once, then after delays that grow. Faults are forgotten
    once the process has been well for ten minutes."""

    def __init__(self, most: int) -> None:
        self._most, self._faults = most, 0
        self._well_since: float | None = None

    def well(self, now: float) -> None:
        """Notes that the process works."""
        self._well_since = now

    def delay(self, now: float) -> float | None:
        """Returns the seconds until the process that has just failed may be started again; None if it is given up."""
        if self._well_since is not None and now - self._well_since >= _STEADY_S:
            self._faults = 0
        self._well_since = None
        self._faults += 1
        if self._faults > self._most:
            return None
        return 0.0 if self._faults == 1 else min(_LONGEST_S, _DELAY_S * 2.0 ** (self._faults - 2))


class Standstill:
    """Decides from the activities that training names, such as "step 12" or "checkpoint 12", when it hangs.

    A step hangs once it has lasted ten times as long as the longest one that has ended, and `slack_s` beside. How long the first
    step, an evaluation or a checkpoint takes is not known: any activity hangs once nothing of it was done for `idle_s`.
    """

    def __init__(self, slack_s: float, idle_s: float) -> None:
        """`idle_s` is longer than the longest piece of work, which is a sample or a part of a batch, takes."""
        self.slack_s, self._idle_s = slack_s, idle_s
        self._longest: float | None = None
        self._activity, self._since = "", 0.0
        self._done, self._done_at = "", 0.0

    def begin(self) -> None:
        """Notes that training is started, and does nothing yet."""
        self._activity = ""

    def does(self, activity: str, done: str, now: float) -> str | None:
        """Notes the present activity, and a text that changes as more of it is `done`. Returns why training hangs; None if it
        does not."""
        lasted, longest = now - self._since, self._longest
        if (activity, done) != (self._activity, self._done):
            self._done, self._done_at = done, now
        if activity != self._activity:
            if self._activity.startswith("step "):
                self._longest = max(longest or 0.0, lasted)
            self._activity, self._since = activity, now
        elif activity.startswith("step ") and longest is not None and lasted > _TIMES * longest + self.slack_s:
            return f"{activity} has taken {lasted:.0f} s, and the longest one before took {longest:.0f} s"
        elif (idle := now - self._done_at) > self._idle_s:
            return f"nothing of {activity} was done for {idle:.0f} s"
        return None


@dataclass(frozen=True)
class Start:
    """Start this engine, or start it again at its address."""

    engine: int


@dataclass(frozen=True)
class Kill:
    """Kill this engine, and all that it started."""

    engine: int


@dataclass(frozen=True)
class Stop:
    """End the run, so that it can be resumed."""

    reason: str


Action = Start | Kill | Stop


class State(Enum):
    WAITING = auto()
    STARTING = auto()
    HEALTHY = auto()
    GIVEN_UP = auto()


@dataclass
class _Engine:
    restarts: Restarts
    state: State = State.WAITING
    since: float = 0.0  # of the state; of one that waits, when it is started
    was_healthy: bool = False
    why: str = ""  # the last fault


class Supervisor:
    """Keeps engines running. Every method returns what has to be done now.

    An engine that has never been well is not started again: its command or its checkpoint is wrong. With fewer engines than
    `least` for `patience_s` seconds, or with too few that are not given up, the run stops.
    """

    def __init__(self, engines: int, restarts: int, least: int, start_s: float, patience_s: float) -> None:
        """`restarts` is the most for one engine, and `start_s` the longest time of a start."""
        self._engines = [_Engine(Restarts(restarts)) for _ in range(engines)]
        self._least, self._start_s, self._patience_s = least, start_s, patience_s
        self._enough, self._stopped = False, False
        self._below_since: float | None = None

    def begin(self, now: float) -> list[Action]:
        """Starts all engines."""
        for engine in self._engines:
            engine.since = now
        return self.tick(now)

    def healthy(self, engine: int, now: float) -> list[Action]:
        """Notes that an engine answers."""
        one = self._engines[engine]
        if one.state is State.STARTING:
            one.state, one.since, one.was_healthy = State.HEALTHY, now, True
            one.restarts.well(now)
        return self.tick(now)

    def lost(self, engine: int, now: float, why: str) -> list[Action]:
        """Notes that an engine has ended, could not be started, or does not answer any more."""
        one = self._engines[engine]
        if one.state not in (State.STARTING, State.HEALTHY):
            return self.tick(now)
        one.why = why
        if not one.was_healthy:
            one.state = State.GIVEN_UP
            return [Kill(engine), *self._stop(why)]
        delay = one.restarts.delay(now)
        one.state, one.since = (State.GIVEN_UP, now) if delay is None else (State.WAITING, now + delay)
        return [Kill(engine), *self.tick(now)]

    def tick(self, now: float) -> list[Action]:
        """Returns the actions that are due at this time."""
        actions: list[Action] = []
        for number, one in enumerate(self._engines):
            if one.state is State.WAITING and now >= one.since:
                one.state, one.since = State.STARTING, now
                actions.append(Start(number))
            elif one.state is State.STARTING and now - one.since >= self._start_s:
                return actions + self.lost(number, now, f"did not answer within {self._start_s:.0f} s")
        serving = sum(one.state is State.HEALTHY for one in self._engines)
        possible = sum(one.state is not State.GIVEN_UP for one in self._engines)
        self._enough = self._enough or serving >= self._least
        if serving >= self._least:
            self._below_since = None
        elif self._enough and self._below_since is None:
            self._below_since = now
        if possible < self._least or (self._below_since is not None and now - self._below_since >= self._patience_s):
            faults = "; ".join(dict.fromkeys(one.why for one in self._engines if one.state is not State.HEALTHY))
            actions += self._stop(
                f"{serving} of {len(self._engines)} engines serve, and {self._least} are needed: {faults}"
            )
        return actions

    def due(self) -> float | None:
        """Returns the time at which `tick` has something to do if nothing else happens; None if it has not."""
        times = [one.since for one in self._engines if one.state is State.WAITING]
        times += [one.since + self._start_s for one in self._engines if one.state is State.STARTING]
        times += [] if self._below_since is None else [self._below_since + self._patience_s]
        return None if self._stopped else min(times, default=None)

    def states(self) -> list[State]:
        """Returns the state of each engine."""
        return [one.state for one in self._engines]

    def _stop(self, reason: str) -> list[Action]:
        stopped, self._stopped = self._stopped, True
        return [] if stopped else [Stop(reason)]
