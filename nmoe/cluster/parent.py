"""The parent of a run with [placement]: it starts engine servers and the processes that train, watches them, and starts again those
that fail.

Training is the same command with the engines' addresses. Its parent holds no weights and no account of the run: a checkpoint has
all of it. Engines outlive a process that trains. Its successor sends them requests once they have its weights.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from nmoe.cluster.base import checkpoint_as_it_is
from nmoe.cluster.ray import gpus_of_nodes, ray_launcher
from nmoe.config.commands import RLConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.packaged import find_configuration
from nmoe.config.tables.placement import PlacementSection
from nmoe.config.tables.rewards import FunctionRewardConfig, ServiceKeys
from nmoe.engine.remote.launcher import PORT, Command, Launcher, LocalLauncher, Process
from nmoe.engine.remote.process import KEY, START_S, ServerProcess, addresses
from nmoe.engine.remote.supervisor import Action, Kill, Restarts, Standstill, Start, State, Stop, Supervisor
from nmoe.envs.rewards.service import LONGEST_WAIT_S
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.device import choose_device, dtype_for
from nmoe.plan.engine_plan import engine_plan
from nmoe.plan.rank_plan import advice, gib, parts, plan, with_offload
from nmoe.preflight.preflight import refuse_to_start
from nmoe.preflight.resources import memory_of
from nmoe.recipes.run_loop import Interruptible
from nmoe.recipes.setup import run_path
from nmoe.runs.checkpoint import checkpoint_step, latest_checkpoint
from nmoe.runs.directory import ACTIVITY, LOGS, refuse_unless_free
from nmoe.runs.ledger import read_lines
from nmoe.runs.provenance import recorded_precision

# Seconds between two looks at the processes, and between two questions to an engine.
_LOOK_S, _ASK_S = 0.1, 0.5
# Seconds that ranks have to end after the first of them has, and that training has to save when its engines are lost.
_LAST_WORDS_S, _SAVING_S = 30.0, 600.0
# Seconds that a step may take beyond ten times the longest one before, as with longer samples, and that a piece of work may take
# beyond its own limits, as for a start of a server or compiled kernels.
SLACK_S = 600.0


def run_placed(config: RLConfig, file: Path, overrides: Sequence[str]) -> None:
    """Trains as the configuration of a file with these overrides says, by processes that [placement] describes. Raises UserError
    before anything is started if they do not fit the machine, InfrastructureError where too few of them can be kept running, and
    KeyboardInterrupt, after training has saved, where a signal asked it to stop. Exits with the code of training that failed."""
    assert config.placement is not None, "its caller looks"
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "placement: the run starts its ranks itself; start it without torchrun, or name running servers in engine.urls"
        )
    placed, run, file = config.placement, run_path(config), find_configuration(str(file))
    refuse_unless_free(run, config.run.resume)
    if placed.learner_gpus == 1 and placed.launcher == "local":
        # Otherwise ranks look for themselves, as their memory is not this process's.
        refuse_to_start(config)
    refuse_what_does_not_fit(config)
    precision = config.model.precision or (recorded_precision(run) if config.run.resume else None)
    device = device_of(config)
    dtype = dtype_for(device, precision, config.model.numerics == "exact")
    on_cpu, key = device.type == "cpu", os.environ.get(KEY) or secrets.token_hex(16)
    each, shared = (0.0, 0.0) if on_cpu else (1.0, float(placed.tensor_parallel)), config.engine.shared()
    with ExitStack() as stack:
        launcher: Launcher = LocalLauncher(run / LOGS)
        if placed.launcher == "ray":
            reach = shared is not None or config.engine.weights == "group"
            launcher = stack.enter_context(ray_launcher(run / LOGS, placed.learner_gpus, placed.engines, each, reach))
        base = checkpoint_as_it_is(config)
        if base is None:
            base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nmoe_base_", dir=shared)))
            _write_base(base, file, overrides)
        first = None if placed.launcher == "ray" else 0 if placed.layout == "colocated" else placed.learner_gpus
        dtype_name, numerics = str(dtype).removeprefix("torch."), config.model.numerics
        held = config.model.expert_weights
        servers = addresses(config.placed_engine, base, numerics, dtype_name, on_cpu, key, launcher, first, held)
        command = [
            *(sys.executable, "-m", "nmoe.rl", "train", str(file), f"--engine.wait_s={placed.wait_s}"),
            *(one for one in overrides if not one.startswith("--run.resume=")),
            *([f"--engine.tensor_parallel={placed.tensor_parallel}"] if config.engine.kind != "server" else []),
        ]
        training = Training(command, {KEY: key}, launcher, placed.learner_gpus, each[0])
        Parent(placed, run, servers, training, config.run.resume, piece_s(config)).run()


def piece_s(config: RLConfig) -> float:
    """Returns the seconds that a piece of work may take: a sample, and an episode's tools and task or a group's rewards beside."""
    limits = [config.sampling.max_new_tokens, *(one.max_tokens or 0 for one in config.eval)]
    return config.engine.token_s * max(limits) + max(
        _beside_s(one) for one in (config.environment, *(each.environment for each in config.eval)) if one is not None
    )


def _beside_s(environment: EnvironmentSettings) -> float:
    """Returns the seconds that pieces of work which are no samples may take in an environment."""
    workspace, seconds = environment.workspace, environment.budget.wall_s
    if workspace is not None and workspace.bootstrap != "none":
        seconds += workspace.bootstrap_wall_s
    for reward in environment.rewards:
        if isinstance(reward, ServiceKeys):
            seconds += (reward.retries + 1) * (reward.timeout_s + LONGEST_WAIT_S)
        elif isinstance(reward, FunctionRewardConfig):
            seconds += reward.timeout_s
    return seconds


def device_of(config: RLConfig) -> torch.device:
    """Returns the device of engines and ranks, which Ray may start on machines that have GPUs where this one has none."""
    assert config.placement is not None, "its caller looks"
    asked = config.model.device
    if config.placement.launcher == "local" or asked == "cpu":
        return choose_device(asked)
    return torch.device("cuda" if asked != "auto" or any(gpus_of_nodes()) else "cpu")


def refuse_what_does_not_fit(config: RLConfig) -> None:
    """Raises UserError if the machine has too few GPUs for [placement], or too little memory for its plan."""
    placed, engines = config.placement, engine_plan(config)
    assert placed is not None, "its caller looks"
    assert engines is not None, "[placement] needs engine servers"
    device, ranks = device_of(config), placed.learner_gpus
    on_cpu, colocated = device.type == "cpu", placed.layout == "colocated"
    if not on_cpu and placed.launcher == "local":
        wanted = engines.gpus + ranks if not colocated else max(engines.gpus, ranks)
        if (there := torch.cuda.device_count()) < wanted:
            raise UserError(
                f"placement: {ranks} GPUs to train on and {engines.gpus} for engines, {placed.layout}, are {wanted}, and this "
                f"machine has {there}; lower placement.engines, tensor_parallel or learner_gpus"
            )
    if not on_cpu and torch.cuda.device_count() == 0:  # the memory of a cluster's GPUs is not known here
        return
    memory = memory_of(device)[0] if on_cpu else torch.cuda.get_device_properties(0).total_memory
    if not memory:
        return
    room = memory // ranks if on_cpu else int(memory * (1 - placed.memory_share)) if colocated else memory
    rank = plan(config if on_cpu else with_offload(config, ranks, ranks, room), ranks, ranks)
    of = f"of {gib(memory)} on {'this machine' if on_cpu else 'a GPU'}"
    if on_cpu:
        each = sum(engines.of_gpu(1))
        if (held := rank.total * ranks + each * placed.engines) > memory:
            raise UserError(
                f"placement: {ranks} ranks of {gib(rank.total)} and {placed.engines} engines of {gib(each)} hold {gib(held)}, "
                f"{of}; lower placement.engines or learner_gpus"
            )
    elif engines.missing(memory) > 0:
        raise UserError(f"placement: {engines.lines(memory)[-1]}")
    if rank.total > room:
        raise UserError(f"placement: a rank needs {parts(rank)} and has {gib(room)} {of}; {advice(rank)}")


def _write_base(directory: Path, file: Path, overrides: Sequence[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "nmoe.cluster.base",
        str(directory),
        str(find_configuration(str(file))),
        *overrides,
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"placement: the engines' checkpoint cannot be written: {lines[-1].removeprefix('error: ')}")


class Training:
    """The processes that train: ranks, of which the first leads. Its output is shown."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], launcher: Launcher, ranks: int = 1, gpus: float = 0.0
    ) -> None:
        """`gpus` is the number of each rank."""
        self._command, self._env, self._launcher, self._ranks, self._gpus = command, env, launcher, ranks, gpus
        self._processes: list[Process] = []
        self._shown = 0
        self._first_ended: float | None = None

    def start(self, urls: Sequence[str], resume: bool) -> None:
        """Starts all ranks with the engines at these addresses."""
        command = [*self._command, f"--engine.urls={json.dumps(urls)}", *(["--run.resume=true"] if resume else [])]
        # All ranks are on one machine, which is not this one under Ray: a port that is free there is the first one's.
        shared = {"WORLD_SIZE": str(self._ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
        self._first_ended, self._processes = None, []
        for rank in range(self._ranks):
            env = {**self._env, **(shared | {"RANK": str(rank)} if self._ranks > 1 else {})}
            self._processes.append(self._launcher.start(f"train_{rank}", Command(command, env), self._gpus))
            shared["MASTER_PORT"] = self._processes[0].address.rpartition(":")[2]
        self._shown = self._processes[0].began

    def ended(self, now: float) -> int | None:
        """Returns the exit code of the rank that leads once all have ended; else None. Ranks that do not end after the first one
        are killed."""
        codes = [process.code() for process in self._processes]
        if None in codes and any(code is not None for code in codes):
            if self._first_ended is None:
                self._first_ended = now
            elif now - self._first_ended > _LAST_WORDS_S:
                self.kill()
        return None if None in codes else codes[0]

    def show(self) -> None:
        """Prints what the first rank has written since the last call."""
        if self._processes:
            with self._processes[0].log.open("rb") as log:
                log.seek(self._shown)
                written = log.read()
            whole = written[: written.rfind(b"\n") + 1]
            self._shown += len(whole)
            sys.stdout.write(whole.decode("utf-8", "replace"))
            sys.stdout.flush()

    def ask(self) -> None:
        """Asks training to save and to end."""
        self._processes[0].ask()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


class Parent:
    """Keeps the processes of one run alive."""

    def __init__(
        self,
        placed: PlacementSection,
        run: Path,
        servers: Sequence[ServerProcess],
        training: Training,
        resume: bool | str = False,
        piece_s: float = 0.0,
    ) -> None:
        """`run` is the run's directory, `resume` its run.resume, and `piece_s` the seconds that a piece of work may take."""
        self._placed, self._run, self._servers, self._training, self._resume = placed, run, servers, training, resume
        self._supervisor = Supervisor(placed.engines, placed.restarts, placed.least_engines, START_S, placed.wait_s)
        self._restarts = Restarts(placed.restarts)
        slack_s = SLACK_S + placed.wait_s  # training may wait so long for engines
        self._standstill = Standstill(slack_s, slack_s + piece_s)
        self._answers: queue.SimpleQueue[tuple[int, Process, bool]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._stop: str | None = None
        self._states: list[State] = []
        self._began, self._begun_from = 0.0, -1  # of training's last start: its time, and the step of its checkpoint

    def run(self) -> None:
        watchers = [
            threading.Thread(target=self._watch, args=(number,), name=f"nmoe-watch-{number}", daemon=True)
            for number in range(len(self._servers))
        ]
        try:
            with Interruptible() as interrupt:
                self._act(self._supervisor.begin(time.monotonic()))
                for watcher in watchers:
                    watcher.start()
                self._follow(interrupt)
        finally:
            self._over.set()
            self._training.kill()
            self._training.show()
            with ThreadPoolExecutor(len(self._servers)) as pool:
                list(pool.map(ServerProcess.stop, self._servers))

    def _follow(self, interrupt: Interruptible) -> None:
        """Looks at all processes until training has ended for good."""
        trains, killed, at = False, False, 0.0
        asked: float | None = None
        while True:
            now = time.monotonic()
            self._look_at_engines(now)
            self._training.show()
            if (interrupt.requested or self._stop is not None) and asked is None:
                asked = now
                if trains:
                    self._training.ask()
            if trains and asked is None and not killed and (why := self._hangs(now)) is not None:
                self._say(f"training hangs: {why}; it is killed")
                self._training.kill()
                killed = True  # its end may take long, as in a write to a disk that hangs
            if not trains:
                if asked is not None:
                    break
                if now >= at and not any(
                    state in (State.WAITING, State.STARTING) for state in self._supervisor.states()
                ):
                    resume = (self._run / "config.toml").exists() and (bool(self._resume) or at > 0)
                    (self._run / LOGS / ACTIVITY).unlink(missing_ok=True)
                    self._standstill.begin()
                    self._training.start(self._urls(), resume)
                    trains, killed, self._began, self._begun_from = True, False, now, self._step_saved()
            elif (code := self._training.ended(now)) is not None:
                self._training.show()
                trains = False
                if asked is not None:
                    break
                if (delay := self._next_start(code, now)) is None:
                    return
                at = now + delay
            elif self._stop is not None and asked is not None and now - asked > _SAVING_S:
                break
            time.sleep(_LOOK_S)
        if self._stop is not None:
            raise InfrastructureError(
                f"{self._stop}. The run is saved as far as its last checkpoint; it goes on with --run.resume=true"
            )
        raise KeyboardInterrupt

    def _hangs(self, now: float) -> str | None:
        """Returns why training is to be killed, by what its first rank has written that it does; None if it is not."""
        try:
            activity, _, done = (self._run / LOGS / ACTIVITY).read_text().partition("\n")
        except OSError:
            return None
        return self._standstill.does(activity, done, now) if activity else None

    def _next_start(self, code: int, now: float) -> float | None:
        """Returns the seconds until training that has ended is started again; None if it is done. Exits with its code if it is not
        to be started again."""
        if code == 0:
            return None
        if self._step_saved() > self._begun_from:  # otherwise it may fail at the same step for ever
            self._restarts.well(self._began)
        delay = self._restarts.delay(now)
        if code in (2, 130) or self._ended_by_a_rule() or delay is None:
            if delay is None:
                self._say(
                    f"training ended with exit code {code}, and is not started again: placement.restarts = {self._placed.restarts}"
                )
            raise SystemExit(code)
        self._say(f"training ended with exit code {code}; it is started again{f' in {delay:.0f} s' if delay else ''}")
        return delay

    def _step_saved(self) -> int:
        """Returns the step of the newest checkpoint; -1 if there is none."""
        newest = latest_checkpoint(self._run / "checkpoints")
        return -1 if newest is None else checkpoint_step(newest)

    def _ended_by_a_rule(self) -> bool:
        """Whether a rule of [monitor] ended the run, which a restart would overrule."""
        metrics = read_lines(self._run / "metrics.jsonl")
        step = metrics[-1]["step"] if metrics else None
        return any(one["step"] == step and one.get("level") == "stop" for one in read_lines(self._run / "alerts.jsonl"))

    def _urls(self) -> list[str]:
        states = self._supervisor.states()
        return [server.url for server, state in zip(self._servers, states, strict=True) if state is not State.GIVEN_UP]

    def _look_at_engines(self, now: float) -> None:
        for number, server in enumerate(self._servers):
            # Of another one the end is known, and its whole log would be read again for the reason.
            runs = self._supervisor.states()[number] in (State.STARTING, State.HEALTHY)
            if runs and (error := server.failed()) is not None:
                self._act(self._supervisor.lost(number, now, str(error)))
        with suppress(queue.Empty):
            while True:
                number, process, well = self._answers.get_nowait()
                if process is not self._servers[number].process:
                    continue
                if well:
                    self._act(self._supervisor.healthy(number, now))
                elif self._supervisor.states()[number] is State.HEALTHY:
                    why = f"engine {self._servers[number].name} does not answer"
                    self._act(self._supervisor.lost(number, now, why))
        self._act(self._supervisor.tick(now))
        if (states := self._supervisor.states()) != self._states:
            self._states = states
            each = (
                f"{one.name} {state.name.lower().replace('_', ' ')}"
                for one, state in zip(self._servers, states, strict=True)
            )
            self._say(f"engines: {', '.join(each)}")

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(engine):
                    try:
                        self._servers[engine].begin()
                    except InfrastructureError as error:
                        self._act(self._supervisor.lost(engine, time.monotonic(), str(error)))
                case Kill(engine):
                    self._servers[engine].kill()
                case Stop(reason):
                    self._stop = reason

    def _watch(self, number: int) -> None:
        """Asks an engine again and again whether it is well."""
        server = self._servers[number]
        while not self._over.wait(_ASK_S):
            if (process := server.process) is not None and process.code() is None:
                self._answers.put((number, process, server.answers(self._placed.hung_s)))

    def _say(self, line: str) -> None:
        print(line, flush=True)
        with suppress(OSError), (self._run / LOGS / "parent.log").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
