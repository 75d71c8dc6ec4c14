"""Kills tiny RL runs at random moments with SIGKILL, resumes them, and compares what they leave with an undisturbed run.

    python scripts/kill_and_resume.py --json benchmarks/results/kills.json

Each kill strikes a phase in turn (rollout, step, evaluation, save) at a random occurrence and a random moment of it, by --seed; the
phases that were really under way are recorded. The resumed run has to end with the same metrics but for timings, and the same bytes
in the last checkpoint: weights, optimizer, and position in the problems. Samples, evaluations and alerts are compared but for
times. Runs of the second kind have tools and a workspace for every episode, whose file tells whether anything else wrote to it.
Exit code 1 if a run differs, or leaves half-written files or workspaces behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from commits import ROOT
from same_numbers import is_timing, records_of
from scripted_sampling import uses_the_tool
from tiny_run import make_workshop

PHASES = ("rollout", "step", "evaluation", "save")
RECORDS = ("samples/*.jsonl", "eval/*.json", "alerts.jsonl", "spikes.jsonl", "routing.jsonl", "failures.jsonl")

# A server that has imported everything once forks the runs: seconds less for each.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["nmoe.rl.launch"])


@dataclass(frozen=True)
class Kill:
    """One kill: the phases under way when it struck, none between them; the step of the checkpoint that was gone on from; and what
    differs from the undisturbed run."""

    aimed_at: str
    hit: tuple[str, ...]
    resumed_from: int
    differences: tuple[str, ...]


class Watched:
    """A run in a process of its own, which tells when a phase begins and ends."""

    def __init__(self, directory: Path, config: str, name: str, overrides: Sequence[str]) -> None:
        self._told, telling = _server.Pipe(duplex=False)
        self._process = _server.Process(target=_child, args=(telling, directory, config, name, [*overrides]))  # type: ignore[attr-defined]
        self._process.start()
        telling.close()
        self.active: list[str] = []
        self.moments: list[tuple[str, bool, float]] = []

    def next(self) -> tuple[str, bool] | None:
        """The next phase that begins (True) or ends (False); None once the process has ended."""
        code = os.read(self._told.fileno(), 1)
        if not code:
            return None
        index, ends = divmod(code[0], 2)
        phase = PHASES[index]
        if ends:
            self.active.remove(phase)
        else:
            self.active.append(phase)
        self.moments.append((phase, not ends, time.monotonic()))
        return phase, not ends

    def kill(self) -> tuple[str, ...]:
        """The phases that were under way."""
        self._process.kill()
        self.end()
        return tuple(self.active)

    def end(self) -> int | None:
        """Waits for the end, and returns the exit code."""
        while self.next() is not None:
            pass
        self._process.join()
        self._told.close()
        return self._process.exitcode

    def durations(self) -> dict[str, list[float]]:
        """Seconds of each phase, in the order in which they began."""
        found: dict[str, list[float]] = {phase: [] for phase in PHASES}
        began: dict[str, float] = {}
        for phase, begins, at in self.moments:
            if begins:
                began[phase] = at
            else:
                found[phase].append(at - began[phase])
        return found


def _child(told: Any, directory: Path, config: str, name: str, overrides: Sequence[str]) -> None:
    """Runs a configuration of `directory`, whose phases it tells. Everything it says goes to NAME.txt."""
    os.setsid()  # so that what it leaves behind can be found
    os.chdir(directory)
    os.environ["NMOE_WORKSPACES"] = str(directory / "workspaces" / name)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory / "temporary" / name)
    Path(tempfile.tempdir).mkdir(parents=True, exist_ok=True)
    from nmoe.config.commands import RLConfig
    from nmoe.config.loader import load_run
    from nmoe.rl.launch import train
    from nmoe.rl.rollouts import RolloutSampler
    from nmoe.rl.train import PolicyGradient
    from nmoe.rl.update import PolicyUpdate
    from nmoe.runs import checkpoint

    def telling(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = (bytes([2 * PHASES.index(phase) + ends]) for ends in (0, 1))

        @wraps(function)
        def told_of(*given: Any, **named: Any) -> Any:
            os.write(told.fileno(), begin)
            try:
                return function(*given, **named)
            finally:
                os.write(told.fileno(), end)

        return told_of

    for owner, attribute, phase in (
        (RolloutSampler, "sample", "rollout"),
        (PolicyUpdate, "update", "step"),
        (PolicyGradient, "evaluate", "evaluation"),
        (checkpoint, "save_checkpoint", "save"),
    ):
        setattr(owner, attribute, telling(phase, getattr(owner, attribute)))
    with Path(f"{name}.txt").open("a") as file, redirect_stdout(file), redirect_stderr(file):
        generate = uses_the_tool(directory / "tokenizer") if config == "tools.toml" else None
        train(load_run(Path(config), RLConfig, [f"--run.name={name}", *overrides]), generate)


def left(run: Path) -> dict[str, Any]:
    """What a run leaves that must not depend on kills: its steps and records without times, and digests of its last checkpoint."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = sorted(path for pattern in RECORDS for path in run.glob(pattern))
    saved = sorted(path for path in run.glob("checkpoints/latest/*") if path.is_file())
    return {
        "steps": [row["step"] for row in rows],
        **{f"step {row['step']}": {key: value for key, value in row.items() if not is_timing(key)} for row in rows},
        **{str(path.relative_to(run)): records_of(path) for path in records},
        **{str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in saved},
        **{name: os.readlink(run / "checkpoints" / name) for name in ("latest", "best")},
    }


def leftovers(run: Path, whole: Path, workspaces: Path) -> list[str]:
    """What a killed and resumed run left that the `whole` one did not: hidden files of half a write, and workspaces."""
    hidden = [path.relative_to(run).as_posix() for path in run.rglob(".*") if path.name != ".lock"]
    ours, theirs = ({path.name for path in (workspaces / of.name).glob("*")} for of in (run, whole))
    return [*hidden, *sorted(ours - theirs)]


class Experiment:
    """An undisturbed run of a configuration in `directory`, and runs of it that are killed and resumed."""

    def __init__(self, directory: Path, config: str, overrides: Sequence[str] = (), seed: int = 0) -> None:
        self._directory, self._config, self._overrides = directory, config, overrides
        # By its name: the tests' directories are called otherwise each time.
        self._rng, self._kills = random.Random(f"{seed} {Path(config).name}"), 0
        self._stem = Path(config).stem
        self._whole = directory / f"{self._stem}_whole"
        process = self._start(self._whole.name)
        if (code := process.end()) != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}: {self._said(self._whole.name)}")
        self._durations, self._expected = process.durations(), left(self._whole)

    def kill_and_resume(self, phase: str) -> Kill:
        """Kills a run in this phase, or just after it where the phase ended sooner than that of the undisturbed run."""
        self._kills += 1
        name = f"{self._stem}_{self._kills:02d}"
        occurrence = self._rng.randrange(len(self._durations[phase]))
        delay = self._rng.random() * self._durations[phase][occurrence]
        process = self._start(name)
        while (event := process.next()) is not None:
            if event == (phase, True):
                if occurrence == 0:
                    break
                occurrence -= 1
        time.sleep(delay)
        hit = process.kill()
        resumed = self._start(name, "--run.resume=auto")
        code, run = resumed.end(), self._directory / name
        if code != 0:
            return Kill(phase, hit, 0, (f"the resumed run ended with {code}: {self._said(name)}",))
        found, expected = left(run), self._expected
        differing = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
        provenance = json.loads((run / "provenance.json").read_text())["resumed"]
        return Kill(
            phase,
            hit,
            provenance[-1]["from_step"] if provenance else 0,
            (
                *differing,
                *(f"left behind: {one}" for one in leftovers(run, self._whole, self._directory / "workspaces")),
            ),
        )

    def _start(self, name: str, *overrides: str) -> Watched:
        return Watched(self._directory, self._config, name, [*self._overrides, *overrides])

    def _said(self, name: str) -> str:
        return (self._directory / f"{name}.txt").read_text()[-500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=20, help="of runs without tools")
    parser.add_argument("--tool-kills", type=int, default=5, help="of runs with tools and workspaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    done: dict[str, list[Kill]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_workshop(ROOT, directory)
        (directory / "files").mkdir()
        (directory / "files" / "given.txt").write_text("given\n")
        for config, kills, overrides in (
            ("grpo.toml", arguments.kills, ["--run.steps=8", "--checkpoint.every_steps=2", "--checkpoint.keep=2"]),
            ("tools.toml", arguments.tool_kills, []),
        ):
            experiment = Experiment(directory, config, overrides, arguments.seed) if kills else None
            for number in range(kills):
                assert experiment is not None
                kill = experiment.kill_and_resume(PHASES[number % len(PHASES)])
                done.setdefault(config, []).append(kill)
                under_way = " and ".join(kill.hit) or "between phases"
                same = "the same" if not kill.differences else ", ".join(kill.differences)
                print(f"{config} {number + 1}: in {under_way}, from step {kill.resumed_from}: {same}", flush=True)
    record = {
        "command": f"python scripts/kill_and_resume.py --kills {arguments.kills} --tool-kills {arguments.tool_kills} "
        f"--seed {arguments.seed}",
        "identical": {
            config: f"{sum(not one.differences for one in kills)} of {len(kills)}" for config, kills in done.items()
        },
        "hit": {phase: sum(phase in one.hit for kills in done.values() for one in kills) for phase in PHASES},
        "kills": {config: [asdict(one) for one in kills] for config, kills in done.items()},
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in ("identical", "hit")}))
    return int(any(one.differences for kills in done.values() for one in kills))


if __name__ == "__main__":
    sys.exit(main())
