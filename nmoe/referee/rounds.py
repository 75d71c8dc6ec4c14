"""One round: every check of the catalogue, each within its deadline, and what they found."""

from __future__ import annotations

import asyncio
import fnmatch
import random
import secrets
import statistics
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nmoe.errors import UserError, cut
from nmoe.referee.checks import CATALOGUE
from nmoe.referee.client import Client, UnansweredError
from nmoe.referee.court import Check, Court, FaultError, Finding, Repeats, SkippedError
from nmoe.referee.diagnosis import ROUGH, TOLERANCE, Diagnosis
from nmoe.referee.faults import ORDER
from nmoe.referee.judge import Judge, Seen
from nmoe.referee.publishing import Press
from nmoe.referee.target import Asked, Served, look, with_model

# Seconds within which a server that is still there accepts a connection.
_KNOCK_S = 3.0
# Seconds for eight tokens of a server for which deadlines hold as they are.
_PACE_S = 0.3


@dataclass
class Outcome:
    """What a check found. `state` is "ok", "fault", "known" (in the baseline), "late" (it was not done by its deadline) or
    "skipped"."""

    check: Check
    state: str
    findings: list[Finding] = field(default_factory=list)
    why: str = ""
    seconds: float = 0.0


@dataclass
class Memory:
    """What checks know of those before them in a round: their last samples, and faults and repetitions that were found."""

    diagnosis: Diagnosis | None
    history: deque[Seen] = field(default_factory=lambda: deque(maxlen=48))
    repeats: Repeats = field(default_factory=Repeats)


@dataclass
class Round:
    """A round's outcomes. `served` is None for a server that did not answer; `left` says why the server may have other weights
    than its first or be paused, or is empty."""

    url: str
    seed: int
    served: Served | None
    outcomes: list[Outcome]
    left: str = ""
    memory: Memory | None = None

    def faults(self) -> list[tuple[str, list[str]]]:
        """Returns the faults found with the names of their checks, the likeliest cause of the others first."""
        by_fault: dict[str, list[str]] = {}
        exact: dict[str, bool] = {}
        for outcome in self.outcomes:
            for finding in outcome.findings:
                names = by_fault.setdefault(finding.fault, [])
                if outcome.check.name not in names:
                    names.append(outcome.check.name)
                exact[finding.fault] = exact.get(finding.fault, False) or finding.exact
        return sorted(by_fault.items(), key=lambda one: (not exact[one[0]], ORDER[one[0]]))

    @property
    def passed(self) -> bool:
        """Whether no check found a new fault or was late, and the server is as it was."""
        return not self.left and all(outcome.state not in ("fault", "late") for outcome in self.outcomes)


def chosen(only: Sequence[str]) -> list[Check]:
    """Returns the checks whose names fit one of the patterns; all of them without any. Raises UserError for one that fits none."""
    if not only:
        return list(CATALOGUE)
    for pattern in only:
        if not any(_fits(check, pattern) for check in CATALOGUE):
            names = ", ".join(check.name for check in CATALOGUE)
            raise UserError(f"--only {pattern}: no check has this name; there are {names}")
    return [check for check in CATALOGUE if any(_fits(check, pattern) for pattern in only)]


def _fits(check: Check, pattern: str) -> bool:
    return fnmatch.fnmatch(check.name, pattern) or check.name.startswith(f"{pattern}.")


async def hold(
    url: str,
    judge: Judge | None,
    *,
    seed: int,
    key: str = "",
    only: Sequence[str] = (),
    publish: bool = False,
    deadline_s: float = 30.0,
    keep: Path | None = None,
    precision: str = "float32",
    follows: Round | None = None,
    note: Callable[[Outcome], None] = lambda _: None,
) -> Round:
    """Makes the checks and returns their outcomes. The server has its first weights again at the end, if any were published.
    `follows` has been a round of other checks with the same judge, whose checks come before these."""
    checks = chosen(only)
    async with Client(url, key, deadline_s) as client:
        try:
            served = await look(client)
        except UnansweredError as error:
            return _all_unanswered(Round(url, seed, None, []), checks, error, note)
        diagnosis = press = None
        if judge is not None:
            config = judge.model.config
            _refuse_other(served, judge)
            served = with_model(served, config, precision)
            diagnosis = Diagnosis(judge, TOLERANCE if served.precision == "float32" else ROUGH)
            if publish:
                press = Press(judge, client, served, keep)
        memory = Memory(diagnosis) if follows is None or follows.memory is None else follows.memory
        bench = _Bench(client, served, memory, press, seed, secrets.token_hex(4))
        round_ = Round(url, seed, served, [], memory=memory)
        try:
            await bench.keep_pace()
        except UnansweredError as error:
            return _all_unanswered(round_, checks, error, note)
        try:
            for one in checks:
                round_.outcomes.append(await bench.make(one))
                note(round_.outcomes[-1])
        finally:
            if press is not None:
                round_.left = await press.restore()
            if judge is not None:
                judge.present, judge.before = judge.first, None
        return round_


def _unanswered(check: Check, error: UnansweredError, seconds: float = 0.0) -> Outcome:
    if error.late:
        return Outcome(check, "late", why=str(error), seconds=seconds)
    return Outcome(check, "fault", [Finding("no_answer", str(error), "a reply of a rollout server")], seconds=seconds)


def _all_unanswered(
    round_: Round, checks: Sequence[Check], error: UnansweredError, note: Callable[[Outcome], None]
) -> Round:
    for check in checks:
        round_.outcomes.append(_unanswered(check, error))
        note(round_.outcomes[-1])
    return round_


def _refuse_other(served: Served, judge: Judge) -> None:
    """Raises UserError where the server says that it has another model than the checkpoint."""
    config = judge.model.config
    for name, ours in (("vocab_size", config.vocab_size), ("context_tokens", config.context_tokens)):
        theirs = getattr(served, name)
        if theirs is not None and theirs != ours:
            raise UserError(
                f"the server has another model than --checkpoint: its {name} is {theirs}, the checkpoint's {ours}; name the "
                "checkpoint that it serves"
            )


class _Bench:
    """Makes checks of one server. Deadlines hold for one that samples eight tokens in `_PACE_S`; a slower one has more."""

    def __init__(
        self,
        client: Client,
        served: Served,
        memory: Memory,
        press: Press | None,
        seed: int,
        round_id: str,
    ) -> None:
        self._client, self._served, self._memory, self._press = client, served, memory, press
        self._seed, self._round, self._gone = seed, round_id, False
        self._base_s, self._slowness = client.deadline_s, 1.0

    async def keep_pace(self) -> bool:
        """Measures how fast the server is, and returns whether it is slower by half than it was. Raises UnansweredError."""
        route, times = self._served.route, list[float]()
        for number in range(3):
            asked = Asked((1, 1), max_tokens=8, seed=number, request_id=f"{self._round}-pace-{number}")
            times.append((await self._client.call("POST", route.path, route.body(asked))).seconds)
        before = self._slowness
        self._slowness = max(before, statistics.median(times) / _PACE_S)
        self._client.deadline_s = self._base_s * self._slowness
        return self._slowness > 1.5 * before

    async def make(self, check: Check) -> Outcome:
        """Makes one check, and ends it at its deadline. It is made once more if it was late and the server is slower now."""
        began = time.monotonic()
        try:
            if self._gone:
                await self._client.call("GET", "/health", deadline_s=_KNOCK_S * self._slowness)
                self._gone = False
            try:
                return await self._made(check)
            except UnansweredError as error:
                if not error.late:
                    raise
                try:
                    slower = await self.keep_pace()
                except UnansweredError:
                    self._gone = True
                    raise error from None
                if not slower:
                    raise
                return await self._made(check)
        except UnansweredError as error:
            self._gone |= error.lost
            return _unanswered(check, error, time.monotonic() - began)

    async def _made(self, check: Check) -> Outcome:
        began = time.monotonic()
        self._client.exchanges.clear()
        court = Court(
            self._client,
            self._served,
            self._memory.diagnosis,
            self._press,
            random.Random(f"{self._seed}/{check.name}"),
            f"{self._round}-{check.name}",
            history=self._memory.history,
            repeats=self._memory.repeats,
        )
        skipped = ""
        past, limit = list(self._memory.history), check.factor * self._client.deadline_s
        late: UnansweredError | None = None
        try:
            async with asyncio.timeout(limit) as until, self._extending(until):
                await check.run(court)
        except FaultError as fault:
            court.findings.append(fault.finding)
        except SkippedError as reason:
            skipped = str(reason)
        except TimeoutError:
            late = UnansweredError(f"it was not done after {limit:.3g} s", late=True)
        except UnansweredError as error:
            if not error.late:
                self._gone = error.lost
                court.note("no_answer", str(error), "a reply")
            late = error if error.late else None
        except UserError:
            raise
        except Exception as error:
            court.note("unread", _where(error), "replies that can be read and compared")
        try:
            court.compare(past)
        except Exception as error:
            court.note("unread", _where(error), "replies that can be read and compared")
        if self._press is not None and not self._gone:
            # A check that ended early may have left the server paused.
            await self._press.resumed(_KNOCK_S * self._slowness)
        self._press_evidence(court)
        if late is not None and not court.findings:
            raise late
        seconds = time.monotonic() - began
        if court.findings:
            return Outcome(check, "fault", court.findings, seconds=seconds)
        return Outcome(check, "skipped" if skipped else "ok", why=skipped, seconds=seconds)

    @asynccontextmanager
    async def _extending(self, until: asyncio.Timeout) -> AsyncIterator[None]:
        """Moves a deadline by the time that the judge takes."""
        judge = None if self._memory.diagnosis is None else self._memory.diagnosis.judge

        def worked(seconds: float) -> None:
            when = until.when()
            if when is not None and not until.expired():
                until.reschedule(when + seconds)

        if judge is not None:
            judge.worked = worked
        try:
            yield
        finally:
            if judge is not None:
                judge.worked = lambda _: None

    def _press_evidence(self, court: Court) -> None:
        """Puts the steps of publications before what they led to."""
        steps = [one for one in self._client.exchanges if one.method == "POST" and one.path.split("?")[0] in _STEPS]
        for finding in court.findings:
            if steps and finding.exchanges:
                finding.exchanges = [*steps, *(one for one in finding.exchanges if one not in steps)]


def _where(error: Exception) -> str:
    """Returns an exception that nothing expected, with the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {cut(str(error), 160)} ({Path(last.filename).name}, line {last.lineno})"


_STEPS = (
    "/pause_generation",
    "/update_weights_from_disk",
    "/continue_generation",
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
