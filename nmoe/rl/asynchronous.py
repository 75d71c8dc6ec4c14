"""Samples the rollouts of policy-gradient steps beside the trainer, for `[async]` with `max_staleness` K > 0.

A step takes groups that are at most K versions of the weights old, instead of sampling its own, so that the trainer waits for no
group but an overdue one, and engines have work while it trains (`nmoe.rollout.guards`). The event loop of the engine servers plays
the groups, and takes each of them as it ends: it is judged, and where it is dropped another is issued at once. So the account, the
guards and the pool belong to that loop; the trainer asks it by `run`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nmoe.config.commands import RLConfig
from nmoe.engine.api import Engine
from nmoe.engine.remote.published import PublishedFleet
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.learner.learner import Learner
from nmoe.parallel.gang import gang
from nmoe.rl.experience import Experience
from nmoe.rl.group_rewards import RewardedGroup
from nmoe.rl.rollouts import Rollouts, RolloutSampler, trained_tokens
from nmoe.rollout.collector import GradingError, Stream
from nmoe.rollout.guards import Guards
from nmoe.rollout.journal import Journal
from nmoe.rollout.tickets import Reason, Ticket
from nmoe.runs.directory import RunDirectory
from nmoe.runs.state import JsonPart
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group, Trajectory

R = TypeVar("R")
# The share of groups that may be dropped without an alert.
_MOST_OVERDUE = 0.02


class AsyncRollouts(RolloutSampler):
    """Takes for each step the oldest groups that have arrived, while the engine servers sample others."""

    def __init__(
        self,
        config: RLConfig,
        directory: RunDirectory,
        tokenizer: Tokenizer,
        environment: Environment,
        tools: ToolRuntime,
        engine: Engine,
        learner: Learner,
        fleet: PublishedFleet,
    ) -> None:
        """Builds what `RolloutSampler` does. `fleet` has the engine servers, and `engine` samples with them."""
        super().__init__(config, directory, tokenizer, environment, tools, engine, learner)
        self._fleet, self._learner, self._steps = fleet, learner, config.run.steps
        self._guards = Guards(config.asynchrony.max_staleness, config.batch.prompts_per_step, config.asynchrony.overdue)
        batch = config.batch
        self._most_dropped = (batch.max_refills + 1) * math.ceil(batch.prompts_per_step * batch.oversampling)
        self._journal = Journal(directory.path)
        self._version = self._step = 0
        self._ready: dict[int, RewardedGroup] = {}
        self._coming = Rollouts()  # what the next step has already: its dropped groups
        self._taken: list[int] = []
        self._left: list[int] = []  # outstanding in the checkpoint, and not yet issued again
        self._flow: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._saved: dict[str, Any] = {}
        self._took_at = self._idle_s = 0.0
        self._passed_over = self._discarded = self._reprefilled = self._gave_up = 0
        self._alerted = False

    def sample(self, step: int) -> Rollouts:
        """Waits for the groups of a step. Others go on. Raises as `RolloutSampler.sample` does."""
        try:
            rollouts = self._fleet.run(self._next(step))
        except GradingError as error:
            self._failures.write(step, [error.trajectory])
            raise
        return self._recorded(step, rollouts)

    async def _next(self, step: int) -> Rollouts:
        began, version = time.perf_counter(), self._learner.version
        if self._flow is None:
            await self._begin(step, version)
            self._took_at, self._idle_s = began, self._fleet.idle_s()
        assert self._flow is not None, "begun above"
        while True:
            if self._flow.done():  # a group raised, which the guards still count as running
                await self._flow
            if late := self._guards.late(version):
                await self._drop(lambda ticket: ticket.position == late[0], "overdue")  # others may arrive meanwhile
                continue
            dropped = self._coming.dropped.total() - self._coming.dropped["curriculum"]
            enough = None if dropped < self._most_dropped else 0
            if (taken := self._guards.take(version, enough)) is not None:
                break
            await self._until_one_comes(self._flow)
        return self._rollouts(taken, version, time.perf_counter() - began)

    async def _until_one_comes(self, flow: asyncio.Task[None]) -> None:
        """Waits for a group. Raises what playing groups raised."""
        self._arrived.clear()
        changed = asyncio.create_task(self._arrived.wait())
        await asyncio.wait([changed, flow], return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if flow.done():
            await flow

    async def _begin(self, step: int, version: int) -> None:
        self._left, self._step, self._version = self.tickets.unanswered, step, version
        self._journal.begin(step - 1, gang().size)
        self._fleet.on_fault = self._journal.fault
        self._present = self._terms(step)
        self._passed_over = self._environment.pool.passed_over
        stream = self._collector.stream()
        await stream.opened()
        self._issue(stream)
        self._flow = asyncio.create_task(self._receive(stream))

    async def _receive(self, stream: Stream) -> None:
        """Takes each group as it ends, and issues others in its place."""
        while True:
            ticket, group = await stream.finished()
            self._arrive(ticket, group)
            self._issue(stream)
            self._arrived.set()

    def _issue(self, stream: Stream) -> None:
        """Starts as many groups as may run. None of them is for a step after the last."""
        guards = self._guards
        needed = (self._steps - self._step + 1) * self._batch.prompts_per_step
        wanted = min(guards.room, needed - guards.running - guards.ready_groups - len(self._taken))
        if wanted <= 0:
            return
        left, self._left = self._left[:wanted], self._left[wanted:]
        issued = self._draw(wanted, left)
        self._journal.issue(self._step, self._version, [drawn.position for drawn in issued])
        for drawn in issued:
            guards.issue(drawn.position, self._version)
            stream.start(Ticket(*drawn, self._present))

    def _arrive(self, ticket: Ticket, group: Group) -> None:
        position = ticket.position
        self._journal.arrive(self._step, position, group)
        handed_over = self._collector.sampled_tokens.pop((*ticket.terms.key, position), 0)
        self.tickets.sampled(handed_over)
        self.tickets.answer(position, sum(one.sampled_tokens for one in group.trajectories))
        if not ticket.terms.of_the_stage(self._present):
            self._void(position, "curriculum")
            return
        rewarded, reason = self._judged(group)
        if reason is None:
            self._guards.ready(position, min((self._oldest(one) for one in rewarded.samples), default=self._version))
            self._ready[position] = rewarded
        else:
            self._coming.groups.append(group)
            self._coming.why.append(reason)
            self._void(position, reason)

    def _oldest(self, sample: Trajectory) -> int:
        """Returns the oldest version of the weights that sampled a token of a sample."""
        return min((version for version in sample.versions if version >= 0), default=self._version)

    def _void(self, position: int, reason: Reason) -> None:
        self._journal.end(self._step, position, reason)
        self._coming.dropped[reason] += 1
        self._guards.end(position)
        self.tickets.end(position, reason)

    async def _drop(self, unwanted: Callable[[Ticket], bool], reason: Reason) -> None:
        """Gives up running groups. The tokens of their samples so far are void."""
        for position in await self._collector.stream().drop(unwanted):
            handed_over = self._collector.sampled_tokens.pop((*self._present.key, position), 0)
            self.tickets.sampled(handed_over)
            self.tickets.answer(position, handed_over)
            self._void(position, reason)

    def _rollouts(self, taken: list[int], version: int, waited_s: float) -> Rollouts:
        """Returns what a step trains on, with the groups that were dropped since the last one."""
        self._journal.train(self._step, taken)
        rollouts, self._coming, self._taken = self._coming, Rollouts(), taken
        rollouts.positions, rollouts.kept = taken, [self._ready.pop(position) for position in taken]
        rollouts.groups += [one.group for one in rollouts.kept]
        rollouts.why += [None] * len(taken)
        now, idle_s, pool = time.perf_counter(), self._fleet.idle_s(), self._environment.pool
        rollouts.rollout_s, rollouts.sampling_s = waited_s, now - self._took_at
        rollouts.grade_s, self._collector.grade_s = self._collector.grade_s, 0.0
        rollouts.left_out, self._passed_over = pool.passed_over - self._passed_over, pool.passed_over
        ages = [version - self._oldest(sample) for sample in rollouts.kept_samples]
        versions = [len({v for v in sample.versions if v >= 0}) for sample in rollouts.kept_samples]
        rollouts.beside = {
            "staleness_mean": sum(ages) / len(ages) if ages else 0.0,
            "staleness_p90": float(np.quantile(ages, 0.9)) if ages else 0.0,
            "staleness_max": max(ages, default=0),
            "versions_per_sample_max": max(versions, default=0),
            "groups_running": self._guards.running,
            "groups_ready": self._guards.ready_groups,
            "steps_ahead": self._guards.ahead,
            "void_overdue": rollouts.dropped["overdue"],
            "trainer_wait_s": waited_s,
            "reprefill_tokens": self._fleet.reprefilled_tokens - self._reprefilled,
            "engine_idle_share": (idle_s - self._idle_s) / (now - self._took_at),
        }
        if self._environment.curriculum is not None:
            rollouts.beside["void_curriculum"] = rollouts.dropped["curriculum"]
        self._took_at, self._idle_s, self._reprefilled = now, idle_s, self._fleet.reprefilled_tokens
        self._gave_up += rollouts.dropped["overdue"]
        self._observe(rollouts)
        issued = self.tickets.trained + self.tickets.void.total() + len(taken)
        if self._gave_up > _MOST_OVERDUE * issued and not self._alerted:
            self._alerted = True
            rollouts.alert = (
                f"{self._gave_up} of {issued} groups were overdue and dropped, which removes long samples; raise "
                'async.max_staleness, or set async.overdue = "wait"'
            )
        return rollouts

    def settle(self, rollouts: Rollouts, experience: Experience | None) -> dict[str, float]:
        trained = trained_tokens(rollouts, experience)
        return self._fleet.run(_called(lambda: self._ended(rollouts, trained)))

    def _ended(self, rollouts: Rollouts, trained: Sequence[int]) -> dict[str, float]:
        """Counts tokens of samples that are still under way, too."""
        self.tickets.discard(self._fleet.discarded_tokens - self._discarded)
        self._discarded = self._fleet.discarded_tokens
        account, running = super()._ended(rollouts, trained), self._collector.sampled_tokens.total()
        in_flight = self.tickets.in_flight + running
        return account | {"tokens_sampled": account["tokens_sampled"] + running, "tokens_in_flight": in_flight}

    def go_on(self, step: int) -> None:
        """Issues groups in the place of those that were trained on, under the terms of the next step, and notes what a checkpoint
        of this step holds."""
        self._fleet.run(self._went_on(step))

    async def _went_on(self, step: int) -> None:
        for position in self._taken:
            self._guards.end(position)
        if self._version != self._learner.version:
            self._journal.publish(self._learner.version)
        before, self._present = self._present, self._terms(step + 1)
        if moved := not before.of_the_stage(self._present):
            self._leave_stage()
        self._taken, self._step, self._version = [], step + 1, self._learner.version
        self._saved = {name: part.read() for name, part in super().parts().items()}
        if moved:
            await self._drop(lambda ticket: not ticket.terms.of_the_stage(self._present), "curriculum")
        self._issue(self._collector.stream())

    def _leave_stage(self) -> None:
        """Voids the groups that wait for a step, and leaves those that came for the next one out of its metrics, so that a stage is
        judged, and trained, by its own groups alone."""
        self._coming = Rollouts()
        for position in self._ready:
            self._void(position, "curriculum")
        self._ready.clear()

    def parts(self) -> dict[str, JsonPart]:
        """Returns the parts as they were when the last step ended. Groups that were issued since then are issued again."""
        parts = super().parts().items()
        return {name: JsonPart(partial(self._saved.get, name), part.write) for name, part in parts}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Ends the groups under way with the block."""
        with super().open():
            try:
                yield
            finally:
                if self._flow is not None:
                    self._fleet.run(_end(self._flow))


async def _called(function: Callable[[], R]) -> R:
    """Calls a function on the event loop."""
    return function()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):  # its error has been raised by `sample`
        await task
