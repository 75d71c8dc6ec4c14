"""Plays one trajectory from prompt to end: the policy samples a turn, its tool calls are run and answered, and the next turn
follows.

A turn is sampled and never re-encoded. A tool's answer is appended in the same branch, so that the next turn's prompt begins
with every token of the turns before and the engine finds their keys in its prefix cache. The user's messages in a conversation
task are appended likewise if the format leaves the history as it was sampled. In other formats they begin a new branch, whose
prompt is the conversation rendered anew. An environment without tools or conversation uses the same code with one turn.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from nmoe.engine.api import Engine, Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks.live import EnvironmentLostError, Live
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.envs.tools.session import ToolSession
from nmoe.types import INFRASTRUCTURE, Exchange, Failure, Given, Problem, Sample, Sampling, ToolEvent, Turn
from nmoe.work import WORK

R = TypeVar("R")


def request_seed(*key: str | int) -> int:
    """Returns a 64-bit seed that is a pure function of its key: (run seed, "train", position in the pool).

    From the second turn on, the key also has sample and turn; the first turns of a group are samples of one request. Nothing
    that depends on timing may be in the key, such as the step, a refill or an index in the batch.
    """
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")


@contextmanager
def _stopped(clock: asyncio.Timeout) -> Iterator[None]:
    """Stops a timeout's clock while the block runs."""
    loop, due = asyncio.get_running_loop(), clock.when()
    assert due is not None, "only this function stops the clock"
    left = due - loop.time()
    clock.reschedule(None)
    yield
    clock.reschedule(loop.time() + left)


class ConversationError(Exception):
    """A conversation task raised an exception. The run stops and saves the trajectory as sampled until then."""


@dataclass
class Episode:
    """The state of one sample while it is played. `key` identifies the group of samples, and `position` is its problem's;
    `sampling` has the parameters of the first turn. `live` is the open episode of a task that has one, or why it did not open.
    """

    problem: Problem
    index: int
    key: tuple[str | int, ...]
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    turns: list[Turn]
    position: int = 0
    live: Live | EnvironmentLostError | None = None
    rounds: list[list[ToolEvent]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    lost: str = ""  # why the environment was lost

    @property
    def tool_events(self) -> tuple[ToolEvent, ...]:
        return tuple(event for events in self.rounds for event in events)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sample.token_ids) for turn in self.turns)

    def ids(self) -> tuple[int, ...]:
        """Returns the current context as token ids: the prompt of the last branch and all tokens after it."""
        start = max((index for index, turn in enumerate(self.turns) if turn.given == "prompt"), default=0)
        after = (token_id for turn in self.turns[start:] for token_id in (*turn.given_ids, *turn.sample.token_ids))
        return (*(() if start else self.prompt_ids), *after)


class Player:
    """Plays episodes of one environment with one engine, and counts the tokens that it hands over."""

    def __init__(self, engine: Engine, environment: Environment, context_tokens: int) -> None:
        self._engine = engine
        self._environment = environment
        self._context_tokens = context_tokens
        self._executor = AsyncToolExecutor(environment.tools, environment.budget)
        self.recorded: Callable[[Episode], tuple[list[ToolEvent], bool]] | None = None
        """In a replay: returns the results of the last turn's tools, and whether the episode's time was up."""
        self.sampled_tokens: Counter[tuple[str | int, ...]] = Counter()  # of groups that are played, by their keys

    async def samples(self, request: Request, key: tuple[str | int, ...]) -> AsyncGenerator[tuple[int, Sample], None]:
        """Yields the first turns of the group of this key, each with its index, as they finish."""
        async with aclosing(self._engine.samples(request)) as sampled:
            async for index, sample in sampled:
                self.sampled_tokens[key] += len(sample.token_ids)
                WORK.pieces += 1
                yield index, sample

    async def play(self, episode: Episode, session: ToolSession) -> Failure | None:
        """Plays an episode from its first sampled turn to its end. Raises ConversationError if the task raises.

        `budget.wall_s` bounds the tools and the task. Its clock stops while a turn is sampled: how long an engine takes, with a
        queue or a publication of weights before it, is not the policy's doing, and `timeout` is a failure that is graded.

        Returns the failure that ended the episode before the policy did; None if the policy or the task ended it.
        """
        if not self._environment.tools and not self._environment.converses:
            return None
        if isinstance(episode.live, EnvironmentLostError):
            episode.lost = str(episode.live)
            return "environment_error"
        try:
            async with asyncio.timeout(self._environment.budget.wall_s) as clock:
                ended = None
                while ended is None:
                    ended = await self._next_turn(episode, session, clock)
            if isinstance(episode.live, Live):
                await self._of_the_task(episode, episode.live.close())
        except EnvironmentLostError as error:
            episode.lost = str(error)
            return "environment_error"
        except TimeoutError:
            if not clock.expired():
                raise
            return "timeout"
        return None if ended == "ok" else ended

    async def _next_turn(self, episode: Episode, session: ToolSession, clock: asyncio.Timeout) -> Failure | None:
        """Answers the last turn's tool calls or message, and samples another turn. Returns None if the episode continues, else how
        it ended.

        "ok" means that the policy or the task ended it.
        """
        environment, budget = self._environment, self._environment.budget
        last = episode.turns[-1].sample
        # Without tools, a turn that calls one is an answer out of form, as in a task that does not converse.
        may_call = environment.tools and last.finish_reason == "stop"
        calls = environment.renderer.calls(len(episode.turns) - 1, last.token_ids) if may_call else []
        if not calls:
            return await self._next_answer(episode, clock)
        if len(episode.turns) >= budget.turns or len(episode.tool_events) + len(calls) > budget.tool_calls:
            return "budget_exceeded"
        if self.recorded is not None:
            events, late = self.recorded(episode)
        else:
            # Each call of a server has its deadline: to be late is not the doing of the policy.
            with _stopped(clock) if self._executor.asks_server(calls) else nullcontext():
                events, late = await self._executor.run(calls, session), False
        episode.rounds.append(events)
        for event in events:
            if event.failure in INFRASTRUCTURE:
                return event.failure
        if session.lost or late:
            return "timeout"
        given = environment.renderer.answer_calls(environment.prompts.messages(episode.problem), episode.rounds)
        return await self._sample_on(episode, "tool", given, clock)

    async def _next_answer(self, episode: Episode, clock: asyncio.Timeout) -> Failure | None:
        """Has the task respond to the last turn as the user, and samples another turn; returns as `_next_turn` does."""
        problem, turns, exchanges = episode.problem, episode.turns, episode.exchanges
        exchange = await self._of_the_task(episode, self._answer(episode, clock))
        if exchange is None:
            return "ok"
        exchanges.append(exchange)
        if exchange.user is None:
            return "ok"
        if len(turns) >= self._environment.budget.turns:
            return "budget_exceeded"
        kind, given = self._environment.prompts.follow_up(problem, turns, episode.tool_events, exchanges)
        return await self._sample_on(episode, kind, given, clock)

    async def _answer(self, episode: Episode, clock: asyncio.Timeout) -> Exchange | None:
        """Returns the answer to the last turn, None if the task does not answer it."""
        problem, turns, exchanges = episode.problem, episode.turns, episode.exchanges
        if not isinstance(episode.live, Live):
            return self._environment.respond(problem, episode.sampling.seed, episode.index, turns, exchanges)
        said = self._environment.to_answer(problem, turns, exchanges)
        if said is None:
            return None
        # Another clock bounds it: to be late is not the doing of the policy.
        with _stopped(clock):
            return await episode.live.step(said, len(turns) - 1)

    @staticmethod
    async def _of_the_task(episode: Episode, call: Awaitable[R]) -> R:
        try:
            return await call
        except EnvironmentLostError:
            raise
        except Exception as error:
            raise ConversationError(f"problem {episode.problem.id}: its task raised an exception") from error

    async def _sample_on(
        self, episode: Episode, kind: Given, given: list[int], clock: asyncio.Timeout
    ) -> Failure | None:
        prompt_ids = tuple(given) if kind == "prompt" else (*episode.ids(), *given)
        with _stopped(clock):
            sample = await self.sample_next(episode, prompt_ids)
        if sample is None:
            return "truncated"
        episode.turns.append(Turn(tuple(given), sample, kind))
        return None

    async def sample_next(
        self, episode: Episode, prompt_ids: tuple[int, ...], most: int | None = None
    ) -> Sample | None:
        """Samples the episode's next turn, of at most `most` tokens; None if the budget or the context has no token left."""
        left = episode.sampling.max_new_tokens - episode.sampled_tokens
        tokens = min(left, self._context_tokens - len(prompt_ids), left if most is None else most)
        return None if tokens < 1 else await self._sample(episode, prompt_ids, tokens)

    async def _sample(self, episode: Episode, prompt_ids: tuple[int, ...], tokens: int) -> Sample:
        key = (*episode.key, episode.index, len(episode.turns))
        sampling = replace(episode.sampling, max_new_tokens=tokens, seed=request_seed(*key))
        request = Request(prompt_ids, 1, sampling, "/".join(map(str, key)), order=episode.position)
        (sample,) = await self._engine.generate(request)
        self.sampled_tokens[episode.key] += len(sample.token_ids)
        WORK.pieces += 1
        return sample
