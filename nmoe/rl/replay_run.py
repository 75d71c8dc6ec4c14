"""`nmoe replay RUN --train`: executes a run that sampled beside its training again, in one process, and compares the weights and
the metrics with the recorded ones, byte for byte.

The run's own code trains: problems, seeds, grades and updates are computed anew. Its journal says the rest: in which order groups
were issued and came, which of them each step took, what tools answered, and which version of the weights sampled how many tokens of
every sample. A sample is held there until the learner has published the next version (`nmoe.engine.native.held`).
"""

from __future__ import annotations

import io
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from nmoe.config.commands import RLConfig
from nmoe.config.tables.pools import ProgramPool, VerifiersPool, task_types
from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.engine.native.held import HeldEngine, OtherTokensError
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.live import LiveTask
from nmoe.errors import UserError
from nmoe.learner.learner import Learner
from nmoe.recipes.run_loop import Step
from nmoe.rl.asynchronous import AsyncRollouts
from nmoe.rl.launch import Parts, train
from nmoe.rl.replay_bundle import ReplayDifferenceError
from nmoe.rl.rollouts import Rollouts
from nmoe.rl.train import PolicyGradient
from nmoe.rollout.collector import Stream
from nmoe.rollout.journal import FILE, Recorded, Spans, read_journal
from nmoe.rollout.named_code import code_of, code_of_training, recorded_config
from nmoe.rollout.tickets import Reason, Ticket
from nmoe.runs.ledger import read_metrics
from nmoe.runs.provenance import read_provenance
from nmoe.runs.state import snapshot_parts
from nmoe.runs.storage import step_name, step_of
from nmoe.trajectory import Group

Say = Callable[[str], None]
Key = tuple[str, int]
"""A sample: its request's id, and its index there."""

# Metrics of time, of the engine servers, and of what they sampled in vain or had under way at a moment.
_OF_TIME = ("time_", "engine", "canary_", "publish_")
_OF_THE_MOMENT = {
    "tokens_per_second",
    "trainer_wait_s",
    "reprefill_tokens",
    "tokens_sampled",
    "tokens_void",
    "tokens_in_flight",
    "groups_running",
    "groups_ready",
    "steps_ahead",
    "problems_left_out",
}


def repeats(metric: str) -> bool:
    """Returns whether a metric has to be the same in a replay."""
    return not (metric.startswith(_OF_TIME) or metric in _OF_THE_MOMENT or "/engine_" in metric)


def replay_run(path: Path, out: Path | None, say: Say, *, allow_user_code: bool = False) -> None:
    """Executes a run again, in `out` (a temporary directory, if that is None), and says for each kept checkpoint and for the
    metrics whether they are the same. Raises ReplayDifferenceError if one differs, and UserError for a run that cannot be
    replayed."""
    recorded, config = read_journal(path), recorded_config(path, allow_user_code=allow_user_code)
    rows = {row["step"]: row for row in read_metrics(path)}
    steps = max(rows, default=0)
    refuse_journal(path, config, recorded, steps, allow_user_code=allow_user_code)
    if out is not None and out.exists():
        raise UserError(f"{out}: is there already; name a directory that is not with --out")
    checkpoints = {step: one for one in (path / "checkpoints").iterdir() if (step := step_of(one.name)) is not None}
    say(f"{path}: {steps} steps, {len(recorded.arrivals)} groups, {recorded.begins} starts of the run")
    differing: list[str] = []

    def compared(name: str, difference: str | None) -> None:
        say(f"{name}: the same" if difference is None else f"{name} differs: {difference}")
        if difference is not None:
            differing.append(f"{name}: {difference}")

    with tempfile.TemporaryDirectory(prefix="nmoe_replay_") as scratch:
        directory = Path(scratch) / "run" if out is None else out
        parts = Parts(
            steps=steps,
            engine=partial(replayed_engine, recorded, config.run.seed),
            sampler=partial(ReplayedRollouts, recorded=recorded),
            recipe=partial(_Compared, checkpoints=checkpoints, compared=compared),
        )
        with redirect_stdout(io.StringIO()):  # it has a log
            train(of_the_replay(config, path, directory), parts=parts)
        now = {row["step"]: row for row in read_metrics(directory)}
    compared(f"metrics of {steps} steps", _first_difference(rows, now))
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise ReplayDifferenceError(f"{path}: first difference: {differing[0]}{more}")
    say("all the same")


def of_the_replay(config: RLConfig, path: Path, directory: Path) -> RLConfig:
    """Returns the run's configuration for another directory, which leaves alone everything outside it."""
    run = config.run.model_copy(
        update={
            "directory": str(directory.parent),
            "name": directory.name,
            "threads": read_provenance(path)["threads"],
            "require_clean": False,
            "metrics_directory": None,
            "samples_directory": None,
            "spikes_file": None,
        }
    )
    checkpoint = config.checkpoint.model_copy(update={"export_directory": None})
    sinks = config.sinks.model_copy(update={"to": ()})
    return config.model_copy(update={"run": run, "checkpoint": checkpoint, "sinks": sinks})


def refuse_journal(path: Path, config: RLConfig, recorded: Recorded, steps: int, *, allow_user_code: bool) -> None:
    """Raises UserError if the first steps of a run that sampled beside its training cannot be replayed to the same weights."""
    cannot = f"{path}: cannot be replayed"
    if config.asynchrony.in_flight == "stale_kv":
        raise UserError(
            f'{cannot}: its samples went on with keys of older weights (async.in_flight = "stale_kv"), which are computed at no '
            'time again; train with "recompute" or "drain"'
        )
    if config.engine.kind != "server":
        raise UserError(
            f'{cannot}: engine.kind = "{config.engine.kind}" sampled, whose bits depend on what else it sampled; train with '
            '"server"'
        )
    if (ranks := recorded.ranks) > 1:
        raise UserError(f"{cannot}: {ranks} ranks added their gradients up; train in one process")
    refuse_other_numbers(path, config, allow_user_code=allow_user_code)
    trained = {event["step"]: event["positions"] for event in recorded.events if event["event"] == "train"}
    if missing := [step for step in range(1, steps + 1) if step not in trained]:
        raise UserError(f"{path / FILE}: does not say what step {missing[0]} trained on; the run cannot be replayed")
    for step in range(1, steps + 1):
        if lost := [position for position in trained[step] if position not in recorded.arrivals]:
            raise UserError(
                f"{path / FILE}: has no samples of position {lost[0]}, which step {step} trained on; the run cannot be replayed"
            )


def refuse_other_numbers(path: Path, config: RLConfig, *, allow_user_code: bool) -> None:
    """Raises UserError if a run's steps, trained again, may come to other weights, or would run code that is not allowed."""
    cannot = f"{path}: cannot be replayed"
    if config.engine.kind not in ("native", "server"):
        raise UserError(
            f'{cannot}: engine.kind = "{config.engine.kind}" sampled, whose bits depend on what else it sampled; train with '
            '"native" or "server"'
        )
    if (numerics := read_provenance(path)["numerics"]) != "exact":
        raise UserError(
            f"{cannot}: its numerics were {numerics}, so that bits depend on the batch; train with model.numerics = "
            '"exact" on a machine where `nmoe doctor` calls them exact'
        )
    environments = [config.environment, *(one.environment for one in config.eval if one.environment is not None)]
    if any(one.workspace is not None for one in environments):
        raise UserError(f"{cannot}: graders read files that tools changed ([workspace]), and tools do not run again")
    if asked := [one.task_pool for one in environments if isinstance(one.task_pool, ProgramPool | VerifiersPool)]:
        who = "programs" if isinstance(asked[0], ProgramPool) else "environments in other processes"
        raise UserError(
            f'{cannot}: {who} asked the policy ([task_pool] type = "{asked[0].type}"), and they do not run again'
        )
    # The journal has what they answered in training, if there is one.
    again = environments if config.eval or not config.asynchrony.max_staleness else environments[1:]
    if any(one.tools is not None and one.tools.servers for one in again):
        raise UserError(
            f"{cannot}: tools of servers ([[tools.servers]]) answered the policy, which are not called again; an asynchronous run "
            "without [[eval]] has their answers in its journal"
        )
    of_environments = chain.from_iterable(code_of(one, config.sandbox.python) for one in environments)
    code = list(dict.fromkeys([*of_environments, *code_of_training(config)]))
    if code and not allow_user_code:
        raise UserError(
            f"{cannot} unless its code may run, outside any sandbox and with your rights: {'; '.join(code)}; if you trust it, "
            "repeat the command with --allow-user-code"
        )
    named = set().union(*(task_types(one.task_pool) for one in environments))
    if live := sorted(name for name in named if isinstance(TASKS[name], LiveTask)):
        raise UserError(
            f"{cannot}: environments beside it answered the policy (task {', '.join(live)}), which are not played again, and the "
            "journal has no word of theirs"
        )


@contextmanager
def replayed_engine(
    recorded: Recorded,
    seed: int,
    section: RolloutEngineSection,
    learner: Learner,
    directory: Path,
    note: Say,
    *_: object,
) -> Iterator[HeldEngine]:
    requests: dict[str, dict[int, Spans]] = {}
    for position in recorded.arrivals:
        for (request_id, index), sampled in _samples(recorded, seed, position).items():
            requests.setdefault(request_id, {})[index] = sampled

    def spans(request_id: str) -> Mapping[int, Spans] | None:
        of_training = request_id.startswith((f"{(seed, 'train')}/", f"{seed}/train/"))
        return requests.get(request_id, {} if of_training else None)

    with HeldEngine(learner.model, section.max_sequences, section.cache_mb, spans) as engine:
        learner.hand_over(engine)
        yield engine


def _samples(recorded: Recorded, seed: int, position: int) -> dict[Key, Spans]:
    """Returns the spans of all samples of a group, by the names that its episodes give to requests."""
    found: dict[Key, Spans] = {}
    for (index, turn), spans in recorded.arrivals[position].spans.items():
        if turn == 0:
            found[f"{(seed, 'train')}/{position}", index] = spans
        else:
            found["/".join(map(str, (seed, "train", position, index, turn))), 0] = spans
    return found


class ReplayedRollouts(AsyncRollouts):
    """Takes the groups that the journal names for each step, in place of the first that come."""

    def __init__(self, *parts: Any, recorded: Recorded) -> None:
        """`parts` are as for `AsyncRollouts`; the last of them is the held engine."""
        super().__init__(*parts)
        assert isinstance(parts[-1], HeldEngine), "made by `replayed_engine`"
        self._held, self._journaled = parts[-1], recorded
        self._events = deque(one for one in recorded.events if one["event"] not in ("publish", "fault"))
        self._came: dict[int, tuple[Ticket, Group]] = {}
        self._under_way: dict[int, dict[Key, Spans]] = {}  # groups that have not come, by position
        self._collector.take_answers(recorded.answers)

    async def _begin(self, step: int, version: int) -> None:
        # A start after a kill issues positions again, which the account lets happen to none that has passed.
        issued = (one["positions"] for one in self._events if one["event"] == "issue")
        for position in sorted(chain.from_iterable(issued)):
            self.tickets.issue(position)
        await super()._begin(step, version)

    async def _receive(self, stream: Stream) -> None:
        while True:
            ticket, group = await stream.finished()
            self._came[ticket.position] = ticket, group
            self._arrived.set()

    def _issue(self, stream: Stream) -> None:
        """Issues nothing, since the journal says when."""

    async def _drop(self, unwanted: Callable[[Ticket], bool], reason: Reason) -> None:
        """Drops nothing, since the journal says which groups were dropped."""

    async def _next(self, step: int) -> Rollouts:
        began, version = time.perf_counter(), self._learner.version
        if self._flow is None:
            await self._begin(step, version)
        while (event := self._events.popleft())["event"] != "train":
            await self._follow(event)
        taken = self._guards.take(version, 0)
        if taken is None or taken != event["positions"] or step != event["step"]:
            raise OtherTokensError(
                f"step {step} would train on positions {taken}, and the record's step {event['step']} did on "
                f"{event['positions']}: the replay does not follow the record"
            )
        rollouts = self._rollouts(taken, version, time.perf_counter() - began)
        # Groups that were issued while the learner trained have tokens of the weights that it is about to change.
        for later in [one for one in self._events if one["event"] == "issue" and one["step"] == step]:
            self._events.remove(later)
            self._start(later)
        await self._sampled(version)
        return rollouts

    async def _follow(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "issue":
            self._start(event)
        elif event["event"] == "arrive":
            self._arrive(*await self._coming_of(event["position"]))
        elif event["event"] == "begin":
            self._coming = Rollouts()  # what a killed process had dropped for its next step is in no metrics
        elif event["position"] not in self._journaled.arrivals:  # others are void as they come, or as a stage ends
            self._void(event["position"], event["reason"])

    def _start(self, event: Mapping[str, Any]) -> None:
        self._journal.issue(event["step"], event["version"], event["positions"])
        for position in event["positions"]:
            self._guards.issue(position, event["version"])
            if position in self._journaled.arrivals:  # else it was given up, or the run ended before it came
                problem = self._environment.pool.order.at(position)
                self._under_way[position] = _samples(self._journaled, self._run.seed, position)
                self._collector.stream().start(Ticket(position, problem, self._present))

    async def _coming_of(self, position: int) -> tuple[Ticket, Group]:
        assert self._flow is not None, "begun before"
        while position not in self._came:
            await self._until_one_comes(self._flow)
        del self._under_way[position]
        return self._came.pop(position)

    async def _sampled(self, version: int) -> None:
        """Waits until everything is sampled that this version of the weights has sampled."""
        due: dict[Key, int] = {}
        for samples in self._under_way.values():
            due |= {key: sum(count for of, count in spans if of <= version) for key, spans in samples.items()}
        flow = self._flow
        assert flow is not None, "begun before"
        while due := await self._held.missing(due):
            if flow.done():
                await flow
            unasked = [key for position in self._came for key in self._under_way.get(position, ()) if key in due]
            if unasked:
                raise OtherTokensError(
                    f"request {unasked[0][0]}: was recorded, and is not made now: the replay does not follow the record"
                )

    def go_on(self, step: int) -> None:
        self._fleet.run(self._rest(step))
        super().go_on(step)

    async def _rest(self, step: int) -> None:
        """Follows what happened while the learner trained."""
        while self._events and self._events[0]["event"] != "begin" and self._events[0]["step"] <= step:
            await self._follow(self._events.popleft())


class _Compared(PolicyGradient):
    """Compares the weights after each step that the recorded run has a checkpoint of."""

    def __init__(
        self, *parts: Any, checkpoints: Mapping[int, Path], compared: Callable[[str, str | None], None]
    ) -> None:
        super().__init__(*parts)
        self._checkpoints, self._compared = checkpoints, compared

    def step(self, step: int) -> Step:
        done = super().step(step)
        if (checkpoint := self._checkpoints.get(step)) is not None:
            with tempfile.TemporaryDirectory(prefix="nmoe_replayed_") as scratch:
                here = Path(scratch) / step_name(step)
                here.mkdir()
                snapshot = snapshot_parts(self.parts(), copied=False)
                snapshot.start(here)
                snapshot.write(here)
                self._compared(f"checkpoint of step {step}", _other_files(checkpoint, here))
        return done


def _other_files(recorded: Path, now: Path) -> str | None:
    """Compares the weights and the optimizer's state of two checkpoints, and describes the first difference."""
    for file in sorted(recorded.rglob("*.safetensors")):
        name = file.relative_to(recorded)
        old, new = file.read_bytes(), (now / name).read_bytes() if (now / name).exists() else b""
        if old != new:
            count = sum(a != b for a, b in zip(old, new, strict=False)) + abs(len(old) - len(new))
            return f"{name}: {count:,} of {len(old):,} bytes"
    return None


def _first_difference(recorded: Mapping[int, Mapping[str, Any]], now: Mapping[int, Mapping[str, Any]]) -> str | None:
    for step, row in recorded.items():
        for name in filter(repeats, dict.fromkeys([*row, *now.get(step, {})])):
            old, new = row.get(name), now.get(step, {}).get(name)
            if old != new:
                return f"step {step}, {name}: {old} in the run, {new} now"
    return None
