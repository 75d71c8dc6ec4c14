"""Plays the episodes of groups concurrently and grades them, group by group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nmoe.engine.api import Engine, Request
from nmoe.envs.environment import Environment
from nmoe.envs.rewards.conversation import samples_of
from nmoe.envs.rewards.reward import Reward, RewardError
from nmoe.envs.rewards.rewards import rated
from nmoe.envs.tasks.live import EnvironmentLostError
from nmoe.envs.tasks.own import TaskError
from nmoe.envs.tools.builtin import sandbox_limits
from nmoe.envs.tools.session import ToolSession
from nmoe.errors import UserError
from nmoe.rollout.episode import ConversationError, Episode, Player, request_seed
from nmoe.rollout.opening import Opened, opened
from nmoe.rollout.outside import play_outside
from nmoe.rollout.programs import Door, Session, run_program
from nmoe.rollout.tickets import Terms, Ticket
from nmoe.runs.waiting import all_or_none
from nmoe.sandbox.api import OpensSandboxes
from nmoe.sandbox.workspaces.prepare import Workspaces
from nmoe.sandbox.workspaces.sources import WorkspaceError
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Failure, Grade, Problem, Sample, Sampling, ToolEvent, TrainerState, Turn
from nmoe.work import WORK

_AT_THE_START = TrainerState()


class GradingError(Exception):
    """A grader or a conversation task raised an exception on the attached trajectory.

    The trajectory's grade is only the failure `grader_error`. The run stops; an exception never becomes reward 0.
    """

    def __init__(self, trajectory: Trajectory, doing: str = "grading") -> None:
        super().__init__(f"{doing} a sample of problem {trajectory.problem.id} raised an exception")
        self.trajectory = trajectory


class UserCodeFailedError(GradingError, UserError):
    """A user's reward, task or episode raised an exception or returned an invalid value.

    The mistake is in the user's code or service, so a command prints only its message.
    """

    def __init__(self, trajectory: Trajectory, message: str) -> None:
        super().__init__(trajectory)
        self.args = (f"problem {trajectory.problem.id}: {message}",)


def _failed(trajectory: Trajectory, error: BaseException | None, doing: str) -> GradingError:
    """Returns the error that ends the run: a UserCodeFailedError with just the message if the user's code is at fault, else a
    GradingError.
    """
    if isinstance(error, UserError):
        return UserCodeFailedError(trajectory, str(error))
    return GradingError(trajectory, doing)


@dataclass
class Collected:
    """Groups of graded trajectories in the order of their problems, with timings in seconds, and the number of tokens that the
    engine handed over.

    Grading overlaps with sampling and with other grading: `grade_s` is part of `rollout_s`, and is summed over all trajectories.
    """

    groups: list[Group]
    rollout_s: float
    grade_s: float
    sampled_tokens: int


class Stream:
    """Groups that are played on one event loop: `start` begins one, `finished` waits for the next that ends.

    Connections of rewards belong to the loop. A task keeps them open, so that they are closed with the loop if not by `close`.
    """

    def __init__(self, play: Callable[[Ticket], Coroutine[Any, Any, Group]], rewards: Sequence[Reward | Door]) -> None:
        """Makes a stream on the running loop. `rewards` are open from `opened` on."""
        self._play, self._rewards = play, rewards
        self.loop = asyncio.get_running_loop()
        self._playing: dict[asyncio.Task[Group], Ticket] = {}  # and those that have ended and were not yet asked for
        self._ended: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        self._open: asyncio.Future[None] = self.loop.create_future()
        self._keeping = self.loop.create_task(self._keep())

    async def _keep(self) -> None:
        async with AsyncExitStack() as stack:
            for reward in self._rewards:
                await stack.enter_async_context(reward.opened())
            self._open.set_result(None)
            await self.loop.create_future()  # until it is cancelled

    async def opened(self) -> None:
        """Waits until the rewards are open; raises what opening them raises."""
        await asyncio.wait([self._open, self._keeping], return_when=asyncio.FIRST_COMPLETED)
        if self._keeping.done():
            await self._keeping

    @property
    def lives(self) -> bool:
        """Whether groups can be played on the running loop. An engine may have left the loop that the stream was made on."""
        return self.loop is asyncio.get_running_loop() and not self._keeping.done()

    def start(self, ticket: Ticket) -> None:
        task = self.loop.create_task(self._play(ticket))
        self._playing[task] = ticket
        task.add_done_callback(self._ended.put_nowait)

    async def finished(self) -> tuple[Ticket, Group]:
        """Returns the next group that has ended, with its ticket. Raises what playing it raised."""
        while (ticket := self._playing.pop(task := await self._ended.get(), None)) is None:
            pass  # it was dropped
        return ticket, task.result()

    async def drop(self, unwanted: Callable[[Ticket], bool]) -> list[int]:
        """Ends the `unwanted` groups that `finished` has not returned, waits until their tools and requests have ended, and returns
        their positions."""
        dropped = {task: ticket.position for task, ticket in self._playing.items() if unwanted(ticket)}
        for task in dropped:
            del self._playing[task]
            task.cancel()
        await asyncio.gather(*dropped, return_exceptions=True)
        return [*dropped.values()]

    async def stop(self) -> None:
        """Ends all groups, and waits until their tools and requests have ended."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        self._playing, self._ended = {}, asyncio.Queue()

    async def close(self) -> None:
        """Ends all groups, and closes the rewards."""
        await self.stop()
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        if not self._keeping.cancelled():
            self._keeping.result()


class Collector:
    """Samples completions of an environment's problems with an engine, runs their tools and conversations, and grades them.

    `model` identifies the model in each trajectory. `workspaces` provides the files that each trajectory starts with, if the
    environment has any.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        context_tokens: int,
        sandboxes: OpensSandboxes | None = None,
        model: Mapping[str, str | int] | None = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._context_tokens = context_tokens
        self._sandboxes = sandboxes
        self._model = model or {}
        self._workspaces = workspaces
        self._player = Player(engine, environment, context_tokens)
        self.sampled_tokens = self._player.sampled_tokens
        """The tokens that the engine handed over since `sample` began, by the key of their group."""
        self.grade_s = 0.0
        """Seconds of grading since `sample` began, summed over trajectories."""
        self._stream: Stream | None = None
        self._lasting = False  # whether the stream outlives a batch
        self._door = Door()

    def collect(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: Sampling,
        key: tuple[str | int, ...],
        positions: Sequence[int] | None = None,
        on_group: Callable[[Group], None] | None = None,
        state: TrainerState | None = _AT_THE_START,
    ) -> Collected:
        """Samples and grades a group of `samples` trajectories for each problem; fills in stop tokens and seeds.

        Seeds depend only on `key` and the problem's position. Without `positions`, that is its index in `problems`, which
        suffices for a list that is sampled once. `state` is the position in the run that `[[rewards]]` receive; None skips
        these rewards, as in evaluations of correctness. `on_group` is called with each finished group, in a thread of the engine.

        Raises UserError for a prompt that does not fit the context and GradingError if a grader, a conversation task or a reward
        raises. Any exception or interrupt ends all running tools.
        """
        terms = self.terms(samples, sampling, key, state)
        named = zip(range(len(problems)) if positions is None else positions, problems, strict=True)
        return self.sample([Ticket(position, problem, terms) for position, problem in named], on_group)

    def terms(
        self,
        samples: int,
        sampling: Sampling,
        key: tuple[str | int, ...],
        state: TrainerState | None,
        give_start: bool = False,
    ) -> Terms:
        """Returns the terms of groups that are issued now, with the weights of the curriculum's stage. With `give_start`, each
        sample continues the beginning of the answer that the stage gives in training."""
        given = self._environment.prompts.given_ids if give_start else ()
        return Terms(samples, sampling, key, state, given, self._environment.grader.weights)

    def sample(self, tickets: Sequence[Ticket], on_group: Callable[[Group], None] | None = None) -> Collected:
        """Starts the groups of all tickets, and waits for all of them. `on_group` and errors are as in `collect`."""
        began, self.grade_s = time.perf_counter(), 0.0
        self.sampled_tokens.clear()
        groups = self._engine.run(self._all(tickets, on_group))
        seconds = time.perf_counter() - began
        return Collected(groups, seconds, self.grade_s, self.sampled_tokens.total())

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keeps one stream for all batches of the block, and with it the connections of rewards, as far as the engine's event loop
        lives on.

        The loop of engine servers does. An engine in this process needs the calling thread to compute, so that no group could be
        played while that thread trains: it has a loop for each `run`, and each batch has another stream.
        """
        self._lasting = True
        try:
            yield
        finally:
            self._lasting = False
            if self._stream is not None and not self._stream.loop.is_closed():
                self._engine.run(self._close())
            self._stream = None

    async def _close(self) -> None:
        if self._stream is not None and self._stream.lives:
            await self._stream.close()

    def take_answers(self, recorded: Callable[[Episode], tuple[list[ToolEvent], bool]]) -> None:
        """Has tools answered by a record, as `Player.recorded` says."""
        self._player.recorded = recorded

    def stream(self, rewarded: bool = True) -> Stream:
        """Returns the stream of the running loop. Its rewards are opened for it if groups are `rewarded`."""
        if self._stream is None or not self._stream.lives:
            doors = (self._door,) if self._environment.asks else ()
            self._stream = Stream(self.play, (*doors, *(self._environment.rewards if rewarded else ())))
        return self._stream

    async def _all(self, tickets: Sequence[Ticket], on_group: Callable[[Group], None] | None) -> list[Group]:
        groups: dict[int, Group] = {}
        stream = self.stream(self._lasting or any(ticket.terms.state is not None for ticket in tickets))
        try:
            await stream.opened()
            for ticket in tickets:
                stream.start(ticket)
            while len(groups) < len(tickets):
                ticket, group = await stream.finished()
                if on_group is not None:
                    on_group(group)
                groups[id(ticket)] = group
        except BaseException:
            await stream.stop()
            raise
        finally:
            if not self._lasting:
                await stream.close()
        return [groups[id(ticket)] for ticket in tickets]

    async def play(self, ticket: Ticket) -> Group:
        """Samples and grades a group on the running loop. Its rewards have to be open (`stream`)."""
        terms = ticket.terms
        if self._environment.asks:
            return await self._that_asked(ticket)
        if not self._environment.lives:
            return await self._played(ticket, [None] * terms.samples)
        seed = request_seed(*terms.key, ticket.position, "open")
        async with opened(self._environment, ticket.problem, terms.samples, seed) as (problem, episodes):
            return await self._played(replace(ticket, problem=problem), episodes)

    async def _played(self, ticket: Ticket, episodes: Sequence[Opened]) -> Group:
        problem, position, terms = ticket.problem, ticket.position, ticket.terms
        prompts, max_new_tokens = self._environment.prompts, terms.sampling.max_new_tokens
        prompt_ids = prompts.check(problem, self._context_tokens, max_new_tokens)
        key, given = (*terms.key, position), terms.given
        sampling = replace(
            terms.sampling,
            max_new_tokens=prompts.token_limit(max_new_tokens),
            stop_ids=self._environment.renderer.stop_ids,
            seed=request_seed(*key),
        )
        first_turns: list[asyncio.Future[Sample]] = [
            asyncio.get_running_loop().create_future() for _ in range(terms.samples)
        ]

        async def trajectory(index: int) -> Trajectory:
            turns = [Turn(given, await first_turns[index], "form" if given else "tool")]
            return await self._trajectory(
                Episode(problem, index, key, prompt_ids, sampling, turns, position, episodes[index]), terms.weights
            )

        async def sample_first_turns() -> None:
            named = f"{terms.key}/{position}"
            request = Request((*prompt_ids, *given), terms.samples, sampling, named, order=position)
            async with aclosing(self._player.samples(request, key)) as sampled:
                async for index, sample in sampled:
                    first_turns[index].set_result(sample)

        _, *trajectories = await all_or_none([sample_first_turns(), *map(trajectory, range(terms.samples))])
        return Group(problem, await self._rewarded(trajectories, terms.state))

    async def _that_asked(self, ticket: Ticket) -> Group:
        problem, terms = ticket.problem, ticket.terms
        sampling = replace(
            terms.sampling,
            max_new_tokens=self._environment.prompts.token_limit(terms.sampling.max_new_tokens),
            stop_ids=self._environment.renderer.stop_ids,
        )
        key = (*terms.key, ticket.position)
        episodes = [Episode(problem, index, key, (), sampling, [], ticket.position) for index in range(terms.samples)]
        trajectories = await all_or_none([self._asking(one, terms.weights) for one in episodes])
        return Group(problem, await self._rewarded(trajectories, terms.state))

    async def _asking(self, episode: Episode, weights: Mapping[str, float]) -> Trajectory:
        """Plays an episode whose other side asks the policy for turns: a program, or an environment in another process."""
        environment, problem = self._environment, episode.problem
        episode.sampling = replace(episode.sampling, seed=request_seed(*episode.key, episode.index))
        session = Session(episode, self._player, environment.renderer, environment.budget.turns)
        ended: Failure | None
        broken: UserError | None = None
        try:
            with self._door.session(session) as name:
                ended = await self._other_side(episode, session, name)
        except EnvironmentLostError as error:
            ended, episode.lost = "environment_error", str(error)
        except TaskError as error:
            ended, broken = "environment_error", error
        if not episode.turns:
            episode.prompt_ids = tuple(environment.prompts.ids(problem))
            episode.turns.append(Turn((), Sample([], [], [], "abort")))
        async with ToolSession(self._sandboxes, None, {}, None) as tools:
            if broken is not None:
                raise _failed(self._ungraded(episode, tools, weights), broken, "playing") from broken
            try:
                # The program has the conversation: its last turn is the answer.
                grade = await environment.grader.grade(
                    problem,
                    episode.turns[-1:],
                    episode.sampling.max_new_tokens,
                    weights=weights,
                    ended=ended,
                    session=tools,
                    exchanges=episode.exchanges,
                )
            except Exception as error:
                raise _failed(self._ungraded(episode, tools, weights), error, "grading") from error
        return self._done(episode, replace(grade, reason=episode.lost), None)

    async def _other_side(self, episode: Episode, session: Session, name: str) -> Failure | None:
        environment, problem = self._environment, episode.problem
        seconds, seed = environment.budget.wall_s, episode.sampling.seed
        if environment.host is not None:
            return await play_outside(environment.host, f"{self._door.url}/v1", name, session, seconds)
        assert environment.command is not None, "an environment that asks has either"
        messages = [{"role": one.role, "content": one.content} for one in environment.prompts.messages(problem)]
        given = {"id": problem.id, "question": problem.question, "messages": messages}
        return await run_program(environment.command, given, f"{self._door.url}/{name}/v1", seed, session, seconds)

    async def _rewarded(self, trajectories: list[Trajectory], state: TrainerState | None) -> list[Trajectory]:
        """Returns the trajectories with the ratings of `[[rewards]]` added to their grades, except after infrastructure failures.
        Raises UserCodeFailedError for a reward that raises.
        """
        if state is None or not self._environment.rewards:
            return trajectories
        trajectories = [replace(trajectory, trainer_state=state) for trajectory in trajectories]
        judged = [trajectory for trajectory in trajectories if trajectory.trainable]
        if not judged:
            return trajectories
        began = time.perf_counter()
        try:
            grades = await rated(self._environment.rewards, samples_of(self._environment, judged, state))
        except RewardError as error:
            trajectory = judged[error.index]
            weights = {
                **trajectory.grade.weights,
                **{reward.name: reward.weight for reward in self._environment.rewards},
            }
            ungraded = replace(trajectory.grade, weights=weights, failure="grader_error", reason=str(error))
            raise UserCodeFailedError(replace(trajectory, grade=ungraded), str(error)) from error
        WORK.pieces += 1
        self.grade_s += time.perf_counter() - began
        graded = {trajectory.index: grade for trajectory, grade in zip(judged, grades, strict=True)}
        return [replace(one, grade=graded.get(one.index, one.grade)) for one in trajectories]

    async def _trajectory(self, episode: Episode, weights: Mapping[str, float]) -> Trajectory:
        problem = episode.problem
        prepare = None if self._workspaces is None else partial(self._workspaces.prepare, problem)
        files, access = self._environment.prompts.files(problem), self._environment.access
        async with ToolSession(self._sandboxes, prepare, files, access) as session:
            ended: Failure | None
            reason = None
            try:
                await session.prepare()
            except WorkspaceError as error:
                ended, reason = error.failure, str(error)
            else:
                try:
                    ended = await self._player.play(episode, session)
                except ConversationError as error:
                    cause = error.__cause__
                    raise _failed(self._ungraded(episode, session, weights), cause, "answering") from cause
            began = time.perf_counter()
            try:
                grade = await self._environment.grader.grade(
                    problem,
                    episode.turns,
                    episode.sampling.max_new_tokens,
                    weights=weights,
                    ended=ended,
                    tool_events=episode.tool_events,
                    session=session,
                    exchanges=episode.exchanges,
                )
            except Exception as error:
                raise _failed(self._ungraded(episode, session, weights), error, "grading") from error
            self.grade_s += time.perf_counter() - began
            if episode.lost:
                grade = replace(grade, reason=episode.lost)
            WORK.pieces += 1
            workspace = {"failed": reason} if reason is not None else await self._keep_files(episode, session, grade)
        return self._done(episode, grade, workspace)

    def _ungraded(self, episode: Episode, session: ToolSession, weights: Mapping[str, float]) -> Trajectory:
        ungraded = Grade(0.0, {}, "grader_error", {}, None, weights=dict(weights))
        return self._done(episode, ungraded, None if session.prepared is None else session.prepared.provenance)

    def _done(self, episode: Episode, grade: Grade, workspace: Mapping[str, Any] | None) -> Trajectory:
        return Trajectory(
            problem=episode.problem,
            index=episode.index,
            prompt_ids=episode.prompt_ids,
            turns=tuple(episode.turns),
            grade=grade,
            sampling=episode.sampling,
            tool_events=episode.tool_events,
            environment=self._environment.identity,
            model=self._model,
            workspace=workspace,
            exchanges=tuple(episode.exchanges),
        )

    async def _keep_files(self, episode: Episode, session: ToolSession, grade: Grade) -> Mapping[str, Any] | None:
        """Returns the record of the workspace: its source and, if its `keep` setting asks for it, the path where its files were
        kept, or why they were not; None without a workspace.
        """
        if session.prepared is None:
            return None
        assert self._workspaces is not None, "only `workspaces` prepares files"
        record = dict(session.prepared.provenance)
        if session.opened is not None:
            name = "-".join(map(str, (*episode.key, episode.problem.id, episode.index)))
            failed = grade.verdict is None or grade.verdict.outcome != "correct"
            limits = sandbox_limits(self._environment.budget)
            try:
                kept = await self._workspaces.save(session.opened, session.prepared, name, failed=failed, limits=limits)
            except WorkspaceError as error:
                record["not_kept"] = str(error)
            else:
                record["kept"] = None if kept is None else str(kept)
        return record
