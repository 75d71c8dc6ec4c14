"""Rehearses the faults of a run: it takes steps while its processes are killed, stopped and made to answer wrongly, one after
another."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nmoe.cluster.parent import SLACK_S, Parent, Training
from nmoe.cluster.rehearse.proxy import FAULTS, Answer, Fault, Proxy
from nmoe.config.commands import RLConfig
from nmoe.config.tables.placement import PlacementSection
from nmoe.engine.remote.launcher import LocalLauncher, LocalProcess, Process
from nmoe.engine.remote.process import KEY, ServerProcess, addresses
from nmoe.engine.remote.supervisor import State
from nmoe.errors import UserError
from nmoe.preflight.check import Check
from nmoe.recipes.setup import run_path
from nmoe.runs.directory import LOGS

# Seconds that a fault has to be noticed, and to be got over after that; and that processes have to end with their parent.
_NOTICED_S, _OVER_S, _ENDED_S = 180.0, 240.0, 20.0
# Seconds that training may stand still beyond ten of its steps, which are short here.
_STILL_S = 15.0
_PUBLISHED = "/update_weights"
_SAMPLED = "/inference/v1/generate"


@dataclass(frozen=True)
class Trial:
    """A fault: how to make it, and a pattern of the line in the logs that shows that it was noticed, or "" if it need not be. Where
    training ends `by_hand`, somebody would remove the fault and start it again."""

    name: str
    make: Callable[[Rehearsal], str | None]
    seen: str
    by_hand: bool = False


class Rehearsal(Parent):
    """A parent that makes faults while its run takes steps. `report` receives what became of each."""

    def __init__(
        self, config: RLConfig, base: Path, file: Path, overrides: Sequence[str], report: Callable[[Check], None]
    ) -> None:
        super().__init__(*parts(config, base, file, overrides))
        self._report = report
        self._answer_of: dict[str, Answer] = {}  # how the next request on a route is answered
        self._proxies = [
            Proxy(partial(getattr, server, "url"), partial(self._answer_to, number))
            for number, server in enumerate(self._servers)
        ]
        self._left: list[Trial] | None = list(TRIALS)  # None once all were made
        self._trial: Trial | None = None
        self._progress = self._changed = 0  # steps since the last fault; when the metrics were written
        self._begun = self._noticed_at = 0.0
        self._made = ""  # how the fault was made, where that has to be said
        self._noticed: str | None = None
        self._read: dict[Path, int] = {}  # the bytes that each log had at the fault

    def rehearse(self) -> None:
        """Runs until all faults were made, or until the run ended by one."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.run()
        except KeyboardInterrupt:
            if self._left is not None:
                raise
        except (UserError, SystemExit) as error:
            name = "start" if self._trial is None else self._trial.name
            said = f"exit code {error.code}" if isinstance(error, SystemExit) else str(error)
            self._report(Check(name, "fail", f"the run ended by it: {said}; its last lines: {self._last_lines()}"))
        finally:
            for proxy in self._proxies:
                proxy.close()

    def _urls(self) -> list[str]:
        states = self._supervisor.states()
        return [proxy.url for proxy, state in zip(self._proxies, states, strict=True) if state is not State.GIVEN_UP]

    def _look_at_engines(self, now: float) -> None:
        super()._look_at_engines(now)
        metrics = self._run / "metrics.jsonl"
        changed = metrics.stat().st_mtime_ns if metrics.exists() else 0
        self._progress, self._changed = self._progress + (changed != self._changed), changed
        well = all(state is State.HEALTHY for state in self._supervisor.states())
        if self._trial is None:
            if well and self._progress >= 2 and self._left is not None:
                self._next(now)
        elif self._noticed is None:
            self._look_for(self._trial, now)
        elif well and self._progress >= 2:
            self._end(
                Check(self._trial.name, "ok", f"{self._noticed}; steps again {now - self._begun:.0f} s after the fault")
            )
        elif now - self._noticed_at > _OVER_S:
            self._end(Check(self._trial.name, "fail", f"{self._noticed}; and no step since for {_OVER_S:.0f} s"))

    def _next_start(self, code: int, now: float) -> float | None:
        if self._trial is not None and self._trial.by_hand and code == UserError.exit_code:
            self._say(f"training ended with exit code {code}, and is started again as if by hand")
            return 0.0
        return super()._next_start(code, now)

    def _next(self, now: float) -> None:
        if not self._left:
            self._left = None
            os.kill(os.getpid(), signal.SIGINT)  # ends the run as a terminal would
            return
        self._trial, self._begun, self._noticed = self._left.pop(0), now, None
        self._read = {log: log.stat().st_size for log in self._logs()}
        self._made = self._trial.make(self) or ""

    def _look_for(self, trial: Trial, now: float) -> None:
        if not trial.seen:
            self._noticed, self._noticed_at, self._progress = "it is discarded without a word", now, 0
            return
        text = "\n".join(self._written())
        if (found := re.search(trial.seen, text)) is not None:
            line = next(line for line in text.splitlines() if found[0].splitlines()[0] in line)
            said = f"{self._made}{line.strip()[:200]}"
            self._noticed, self._noticed_at, self._progress = said, now, 0
            self._answer_of = {}
        elif now - self._begun > _NOTICED_S:
            self._end(Check(trial.name, "warn", f"nothing noticed it within {_NOTICED_S:.0f} s"))

    def _end(self, check: Check) -> None:
        self._report(check)
        self._trial, self._progress, self._answer_of = None, 0, {}
        self._standstill.slack_s = SLACK_S + self._placed.wait_s

    def _logs(self) -> list[Path]:
        return sorted((self._run / LOGS).glob("*.log"))

    def _written(self) -> list[str]:
        """Returns what each log has got since the fault."""
        texts = []
        for log in self._logs():
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                texts.append(file.read().decode("utf-8", "replace"))
        return texts

    def _last_lines(self) -> str:
        log = self._run / LOGS / "train_0.log"
        return " / ".join(log.read_text(errors="replace").strip().splitlines()[-2:]) if log.exists() else "none"

    def _answer_to(self, number: int, path: str) -> Fault | None:
        how = self._answer_of.get(path) if self._answer_of.get(path) == "wrong" else self._answer_of.pop(path, None)
        if how == "lost":
            self._servers[number].kill()
        return None if how is None else FAULTS[how]

    def answer(self, path: str, how: Answer) -> None:
        """Answers the next request on a route wrongly; with `wrong`, all until that was noticed."""
        self._answer_of[path] = how

    def engine(self) -> Process:
        process = self._servers[0].process
        assert process is not None, "all engines are healthy when a fault is made"
        return process

    def learner(self) -> Process:
        return self._training._processes[0]

    def stop_learner(self) -> None:
        """Has training stand still, and makes the parent's patience short."""
        self._standstill.slack_s = _STILL_S
        _signal(self.learner(), signal.SIGSTOP)

    def cut_checkpoint(self) -> str:
        """Cuts the largest file of the newest checkpoint, and kills training."""
        newest = max((self._run / "checkpoints").glob("step_*"))
        largest = max((one for one in newest.iterdir() if one.is_file()), key=lambda one: one.stat().st_size)
        self.learner().kill()
        os.truncate(largest, largest.stat().st_size // 2)
        return f"{newest.name} is cut; "


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [one for one, parent in pairs if parent == pid]


def _signal(process: Process, number: signal.Signals) -> None:
    assert isinstance(process, LocalProcess), "a rehearsal starts its processes here"
    for pid in children(process.pid):
        os.kill(pid, number)


def _fill_disk(rehearsal: Rehearsal) -> None:
    """Lets training write no file, as on a full disk."""
    process = rehearsal.learner()
    assert isinstance(process, LocalProcess), "a rehearsal starts its processes here"
    for pid in children(process.pid):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


TRIALS = (
    Trial("engine killed", lambda one: one.engine().kill(), r"fenced: .*|engines: .*(waiting|starting).*"),
    Trial(
        "engine hangs", lambda one: _signal(one.engine(), signal.SIGSTOP), r"fenced: .*|engines: .*(waiting|starting).*"
    ),
    Trial("torn answer", lambda one: one.answer(_SAMPLED, "torn"), r"fenced: .*"),
    Trial("double or late answer", lambda one: one.answer(_SAMPLED, "twice"), ""),
    Trial("wrong weights", lambda one: one.answer(_SAMPLED, "wrong"), r"fenced: .*(canary|other weights|differ).*"),
    Trial("engine lost in a transfer", lambda one: one.answer(_PUBLISHED, "lost"), r"fenced: .*"),
    Trial("learner killed", lambda one: one.learner().kill(), r"training ended with exit code .*"),
    Trial("disk full", _fill_disk, r"File too large|No space|disk|training ended with exit code .*", by_hand=True),
    Trial("learner hangs", Rehearsal.stop_learner, r"training hangs: .*"),
    Trial("checkpoint cut short", Rehearsal.cut_checkpoint, r"resumed from step .*|torn.*"),
)


def parts(
    config: RLConfig, base: Path, file: Path, overrides: Sequence[str]
) -> tuple[PlacementSection, Path, list[ServerProcess], Training]:
    """Returns the parts of a parent on a CPU, whose engines load `base`."""
    assert config.placement is not None, "a rehearsal has it"
    run, key = run_path(config), secrets.token_hex(16)
    launcher = LocalLauncher(run / LOGS)
    servers = addresses(
        config.placed_engine,
        base,
        config.model.numerics,
        "float32",
        True,
        key,
        launcher,
        expert_weights=config.model.expert_weights,
    )
    command = [
        sys.executable,
        "-m",
        "nmoe.rl",
        "train",
        str(file),
        *overrides,
        f"--engine.wait_s={config.placement.wait_s}",
    ]
    return config.placement, run, servers, Training(command, {KEY: key}, launcher)


def orphans(config: RLConfig, base: Path, file: Path, overrides: Sequence[str]) -> Check:
    """Kills the parent of a run, and returns whether all that it had started ended."""
    parent = multiprocessing.get_context("spawn").Process(target=_parent, args=(config, base, file, overrides))
    parent.start()
    assert parent.pid is not None, "it has been started"
    metrics, until = run_path(config) / "metrics.jsonl", time.monotonic() + _OVER_S
    while not metrics.exists() and time.monotonic() < until and parent.is_alive():
        time.sleep(0.2)
    started = children(parent.pid)
    started += [pid for one in started for pid in children(one)]
    parent.kill()
    parent.join()
    left, until = started, time.monotonic() + _ENDED_S
    while left and time.monotonic() < until:
        time.sleep(0.2)
        left = [pid for pid in left if _lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if not started:
        return Check(
            "parent killed", "fail", f"not rehearsed: the run ended by itself with exit code {parent.exitcode}"
        )
    if left:
        return Check("parent killed", "fail", f"{len(left)} of {len(started)} processes stayed for {_ENDED_S:.0f} s")
    return Check("parent killed", "ok", f"all {len(started)} processes that it had started ended")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _parent(config: RLConfig, base: Path, file: Path, overrides: Sequence[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        Parent(*parts(config, base, file, overrides)).run()
