"""Trains over a vLLM server that is killed, hangs, or answers late, twice or torn, each at three moments drawn at random:

    python .ci/vllm_faults.py VLLM_PYTHON [RUN_TO_TRAIN_FROM]

The run starts the server itself, with a proxy before it, and samples 64 completions a step; in all but the last step one fault
happens. (An answer that comes twice can be taken for that of a later request, which is then refused.) Every sample has to be
trained once, none may be lost, and the weights have to be the learner's after each publication and each recovery. A recovery may
take no longer than the deadlines that it waits for, and the start of a server.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1] / "tests/engine/remote"))

from check import hold
from faulty_proxy import Fault as Answer
from faulty_proxy import FaultyProxy

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.engine.remote import process, published
from nmoe.engine.remote.launcher import LocalProcess
from nmoe.engine.remote.process import ServerProcess
from nmoe.engine.remote.wire import GENERATE
from nmoe.rl.launch import train
from nmoe.rl.rollouts import Rollouts, RolloutSampler
from nmoe.rl.update import PolicyUpdate
from nmoe.runs.ledger import read_metrics
from nmoe.trajectory import Trajectory

MOMENTS = 3
KINDS = ("killed", "hung", "killed in a transfer", "late", "twice", "torn")
TRANSFER = ("/start_weight_update", "/update_weights", "/finish_weight_update")
PROMPTS, GROUP, NEW_TOKENS = 4, 16, 48
# Seconds: of a request and of each of its tokens, of a call of control, of a start, of the grace before a server is ended by force,
# and what a busy machine may add.
REQUEST_S, TOKEN_S, CONTROL_S, START_S, GRACE_S, SLACK_S = 10.0, 0.1, 20.0, 400.0, 15.0, 15.0
DEADLINE_S = REQUEST_S + TOKEN_S * NEW_TOKENS


@dataclass
class Planned:
    """A fault in a step: when the `moment`-th call of `path` arrives, and for signals `delay_s` later, to the processes `whose`.
    Processes that hang go on where `goes_on` says so, else they are killed by whoever starts the server again."""

    kind: str
    path: str = GENERATE
    moment: int = 0
    delay_s: float = 0.0
    whose: str = "core"
    goes_on: bool = False
    calls: int = 0
    at: float = inf

    @property
    def restarts(self) -> bool:
        return "killed" in self.kind or (self.kind == "hung" and not self.goes_on)

    @property
    def most_s(self) -> float:
        """The longest recovery: a request finds the fault, the first call of control of a heal too, and a restart follows."""
        return DEADLINE_S + CONTROL_S + SLACK_S + (GRACE_S + START_S if self.restarts else 0.0)


def drawn(seed: int) -> list[Planned]:
    draw, faults = random.Random(seed), []
    for kind in KINDS:
        for number in range(MOMENTS):
            one = Planned(kind, moment=draw.randrange(PROMPTS), delay_s=draw.uniform(0, 0.2))
            if kind == "killed":
                one.whose = ("core", "server", "core")[number]
            elif kind == "killed in a transfer":
                one.path, one.moment, one.whose = TRANSFER[number], 0, ("server", "core", "server")[number]
            elif kind == "hung":
                one.whose, one.goes_on = (("core", False), ("server", True), ("both", True))[number]
            faults.append(one)
    draw.shuffle(faults)
    return faults


class Observed:
    """The faults of a run's steps, and what became of its samples."""

    def __init__(self, faults: Sequence[Planned]) -> None:
        self.faults, self.step = faults, 0
        self.notes: list[tuple[float, str]] = []
        self.sampled: Counter[tuple[int, str, int]] = Counter()
        self.kept: Counter[tuple[int, str, int]] = Counter()
        self.trained: Counter[tuple[int, str, int]] = Counter()

    def answer(self, server: ServerProcess, path: str) -> Answer | None:
        """Returns what the proxy does to a call, after sending the signals that are due."""
        if not 0 < self.step <= len(self.faults) or path != (fault := self.faults[self.step - 1]).path:
            return None
        fault.calls += 1
        if fault.calls != fault.moment + 1:
            return None
        if fault.kind in ("late", "twice", "torn"):
            fault.at = time.monotonic()
            return fault.kind  # type: ignore[return-value]

        def strike() -> None:
            fault.at = time.monotonic()
            ids = processes(server, fault.whose)
            for pid in ids:
                os.kill(pid, signal.SIGSTOP if fault.kind == "hung" else signal.SIGKILL)
            if fault.goes_on:
                time.sleep(DEADLINE_S + 3)
                for pid in ids:
                    os.kill(pid, signal.SIGCONT)

        threading.Timer(fault.delay_s, strike).start()
        return None

    def recovery_s(self, fault: Planned) -> float:
        """Returns the seconds until the server served again; infinity if it never did."""
        return min((at for at, note in self.notes if at > fault.at and "serves again" in note), default=inf) - fault.at


def processes(server: ServerProcess, whose: str) -> list[int]:
    """Returns the ids of a vLLM server's processes: of the one that answers, and of the one that computes."""
    assert isinstance(server.process, LocalProcess)
    (front,) = children(server.process.pid)
    core = [pid for pid in children(front) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::EngineCore")]
    assert len(core) == 1, core
    return {"core": core, "server": [front], "both": [front, *core]}[whose]


def children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def keys(step: int, samples: Sequence[Trajectory]) -> list[tuple[int, str, int]]:
    return [(step, one.problem.id, one.index) for one in samples]


def watched(observed: Observed, config: RLConfig) -> Path:
    """Trains, with the faults, and returns the run directory."""
    addresses, sample, batch = process.addresses, RolloutSampler.sample, PolicyUpdate.batch

    class Noted(published.PublishedFleet):
        def __init__(self, *args: Any, note: Any, **kwargs: Any) -> None:
            def both(line: str) -> None:
                observed.notes.append((time.monotonic(), line))
                note(line)

            super().__init__(*args, note=both, **kwargs)

    def proxied(*args: Any) -> list[FaultyProxy]:
        (server,) = addresses(*args)
        assert isinstance(server, ServerProcess)
        return [FaultyProxy(server, lambda path, _: observed.answer(server, path), late_s=DEADLINE_S + 5)]

    def sampled(self: RolloutSampler, step: int) -> Rollouts:
        observed.step = step
        rollouts = sample(self, step)
        observed.sampled.update(keys(step, [one for one in rollouts.trajectories if one.trainable]))
        observed.kept.update(keys(step, [one for group in rollouts.kept for one in group.samples]))
        return rollouts

    def trained(self: PolicyUpdate, samples: Sequence[Trajectory]) -> Any:
        observed.trained.update(keys(observed.step, samples))
        return batch(self, samples)

    with (
        patch.object(process, "addresses", proxied),
        patch.object(process, "START_S", START_S),
        patch.object(published, "PublishedFleet", Noted),
        patch.object(published, "DEADLINE_S", REQUEST_S),
        patch("nmoe.engine.remote.server.CONTROL_S", CONTROL_S),
        patch.object(RolloutSampler, "sample", sampled),
        patch.object(PolicyUpdate, "batch", trained),
    ):
        return train(config)


def main() -> None:
    python, *base = sys.argv[1:]
    observed = Observed(drawn(0))
    steps = len(observed.faults) + 1
    with tempfile.TemporaryDirectory() as scratch:
        settings = [
            *(f"--model.path={base[0] if base else 'runs/speedrun/base'}", f"--run.directory={scratch}"),
            *(f"--run.steps={steps}", "--run.threads=1", f"--checkpoint.every_steps={steps}", "--eval.0.problems=16"),
            *(f"--batch.prompts_per_step={PROMPTS}", f"--batch.group_size={GROUP}", "--batch.max_refills=0"),
            *(f"--sampling.max_new_tokens={NEW_TOKENS}", "--engine.kind=vllm", f"--engine.python={python}"),
            *(f"--engine.token_s={TOKEN_S}", '--engine.args=["--enforce-eager"]'),
        ]
        began, cpu = time.monotonic(), os.times()
        rows = read_metrics(watched(observed, load_run("sort_grpo", RLConfig, settings)))
    spent = sum(os.times()[:4]) - sum(cpu[:4])
    print(f"{time.monotonic() - began:.0f} s, {spent:.0f} CPU seconds of the run and of the servers that it waited for")
    figures: dict[str, tuple[float, float, float]] = {
        "steps": (len(rows), steps, steps),
        "groups of a step, least": (min(row["groups"] for row in rows), PROMPTS, PROMPTS),
        "samples that were graded": (observed.sampled.total(), steps * PROMPTS * GROUP, steps * PROMPTS * GROUP),
        "samples that came twice": (observed.sampled.total() - len(observed.sampled), 0, 0),
        "samples that were trained": (observed.trained.total(), 1, inf),
        "kept samples that were not trained once": ((observed.kept - observed.trained).total(), 0, 0),
        "trained samples that were not kept": ((observed.trained - observed.kept).total(), 0, 0),
        "requests lost": (rows[-1]["engine_requests_lost"], 0, 0),
        "servers that serve after a publication": (min(row["engines_serving"] for row in rows), 1, 1),
        "mean mismatch, largest of a step": (max(row["mismatch_abs_mean"] for row in rows), 0, 1e-5),
        "largest mismatch": (max(row["mismatch_abs_max"] for row in rows), 0, 1e-4),
        "largest difference of a canary": (max(row["canary_abs_max"] for row in rows), 0, 1e-4),
        "faults that healed": (
            rows[-1]["engines_healed"],
            sum(one.kind != "twice" for one in observed.faults),
            inf,
        ),
    }
    for step, fault in enumerate(observed.faults, 1):
        name = (
            f"step {step}, {fault.kind} ({fault.whose}): "
            if fault.restarts or fault.goes_on
            else f"step {step}, {fault.kind}: "
        )
        if fault.kind == "twice":
            figures[name + "happened"] = (float(fault.at < inf), 1, 1)
        else:
            figures[name + "seconds until it served again"] = (observed.recovery_s(fault), 0, fault.most_s)
    hold(figures, [])


if __name__ == "__main__":
    main()
