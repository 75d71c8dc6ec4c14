"""Programs that ask the policy: each sample is a process whose OpenAI client talks to the run.

    agent.py --POST /SESSION/v1/chat/completions--> Door --Episode's next turn--> engine
             <------------- message ---------------

The turns that a session sampled are the trajectory: ids, log-probabilities and versions as the engine gave them. The program's own
words never become trained tokens. A request that goes on verbatim where the last turn ended continues its branch. Any other begins
a new branch, whose prompt is the conversation as it was rendered.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

from nmoe.engine.remote.process import KEY
from nmoe.envs.tasks.live import EnvironmentLostError
from nmoe.errors import UserError
from nmoe.extras import needed_by
from nmoe.rollout.episode import Episode, Player
from nmoe.text.calls.pieces import Piece
from nmoe.text.conversation import ChatMessage, ToolDefinition
from nmoe.text.renderers import Renderer
from nmoe.types import Failure, Sample, Turn

# Characters of a program's last words that are shown.
_MOST_SHOWN = 400


class SessionEndedError(Exception):
    """A program asks for a turn that its episode may not have."""

    def __init__(self, message: str, failure: Failure | None) -> None:
        super().__init__(message)
        self.failure = failure


class Session:
    """The turns of one program. Requests that come at once are answered one after the other."""

    def __init__(self, episode: Episode, player: Player, renderer: Renderer, turns: int) -> None:
        self.episode, self._player, self._renderer, self._most = episode, player, renderer, turns
        self._lock = asyncio.Lock()
        self._asking: set[asyncio.Task[Any]] = set()
        self._over = False
        self.said: list[str] = []  # of each turn, as it was answered
        self.ended: Failure | None = None
        self.error: Exception | None = None
        """A failure of the engine or the renderer, which is for the run to raise and not for the program to bear."""

    async def turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition], most: int | None
    ) -> tuple[list[Piece], Sample, int]:
        """Samples a turn. Returns its pieces, the sample and the length of its prompt. A caller that is cancelled leaves no turn.

        Raises SessionEndedError if no turn is left, and UserError for a conversation that the format cannot express.
        """
        asking = asyncio.current_task()
        assert asking is not None, "a coroutine runs in a task"
        self._asking.add(asking)
        try:
            async with self._lock:
                with self.of_the_run(UserError):
                    prompt_ids = tuple(self._renderer.chat_ids(tuple(messages), tuple(tools)))
                with self.of_the_run():
                    sample = await self._sampled(prompt_ids, most)
                    reader = self._renderer.reader(prompt_ids, tuple(tools))
                    pieces = [*reader.feed(sample.token_ids), *reader.end(sample.finish_reason)]
                    self.said.append("".join(one.text for one in pieces if one.kind == "content"))
        except asyncio.CancelledError:
            if not self._over:
                raise
            raise SessionEndedError("the program has ended", None) from None
        finally:
            self._asking.remove(asking)
        return pieces, sample, len(prompt_ids)

    @property
    def waits(self) -> bool:
        """Whether the program waits for a turn."""
        return bool(self._asking)

    def close(self) -> None:
        """Gives up the turns that are being sampled: their tokens would belong to no trajectory."""
        self._over = True
        for one in self._asking:
            one.cancel()

    @contextmanager
    def of_the_run(self, *but: type[Exception]) -> Iterator[None]:
        """Keeps an exception for the run, `but` some that are the program's mistake."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (SessionEndedError, *but)):
                raise
            self.error = error
            raise SessionEndedError("the run has failed", "engine_error") from error

    def _end(self, failure: Failure, why: str) -> SessionEndedError:
        self.ended = failure
        return SessionEndedError(why, failure)

    async def _sampled(self, prompt_ids: tuple[int, ...], most: int | None) -> Sample:
        episode = self.episode
        if self._over or self.ended is not None or self.error is not None:
            raise SessionEndedError("the episode has ended before", self.ended)
        if len(episode.turns) >= self._most:
            raise self._end("budget_exceeded", f"the episode has had its {self._most} turns (budget.turns)")
        sample = await self._player.sample_next(episode, prompt_ids, most)
        if sample is None:
            why = "the episode has no tokens left (sampling.max_new_tokens, or the model's context)"
            raise self._end("truncated", why)
        self._append(prompt_ids, sample)
        if sample.finish_reason == "abort":
            raise self._end("engine_error", "the engine gave the turn up")
        return sample

    def _append(self, prompt_ids: tuple[int, ...], sample: Sample) -> None:
        episode = self.episode
        if not episode.turns:
            episode.prompt_ids = prompt_ids
            episode.turns.append(Turn((), sample))
            return
        before = episode.ids()
        if prompt_ids[: len(before)] == before and episode.turns[-1].sample.finish_reason == "stop":
            episode.turns.append(Turn(prompt_ids[len(before) :], sample, "user"))
        else:
            episode.turns.append(Turn(prompt_ids, sample, "prompt"))


class Door:
    """Listens for programs on this machine, one session for each, under a name that nothing else knows. `url` is its address: a
    session has the part `/NAME/v1` of it, or `/v1` for requests with the name as X-Session-ID."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._port = 0
        self.url = ""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Listens on the running loop until the block ends, each time on the same port if it is free: the clients of a process that
        outlives the block keep a pool of connections for each address."""
        with needed_by("an environment that asks the policy", "serve"):
            import uvicorn

            from nmoe.engine.server.listening import listening
            from nmoe.rollout.session_routes import application

        class Quiet(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals belong to the run

        with ExitStack() as stack:
            try:
                socket = stack.enter_context(listening("127.0.0.1", self._port))
            except UserError:
                socket = stack.enter_context(listening("127.0.0.1", 0))
            self._port = socket.getsockname()[1]
            self.url = f"http://127.0.0.1:{self._port}"
            config = uvicorn.Config(
                application(self._sessions),
                log_config=None,
                lifespan="off",
                timeout_graceful_shutdown=1,
                # Clients close idle connections after seconds. A connection that this side closes meets the next request.
                timeout_keep_alive=3600,
            )
            server = Quiet(config)
            serving = asyncio.ensure_future(server.serve([socket]))
            try:
                yield
            finally:
                server.should_exit = True
                await asyncio.wait([serving])
                if serving.cancelled():  # with its loop, which leaves connections open that nothing reads
                    await server.shutdown([socket])
                else:
                    serving.result()

    @contextmanager
    def session(self, session: Session) -> Iterator[str]:
        """Yields the name of a session, which answers until the block ends."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        try:
            yield name
        finally:
            session.close()
            del self._sessions[name]


async def ended_in_time(running: asyncio.Future[Any], session: Session, seconds: float) -> bool:
    """Waits for the other side of a session to end. Returns whether it has, and False if it took more than so many seconds in which
    it waited for no turn, or if the session failed."""
    left = seconds
    while not running.done() and left > 0 and session.error is None:
        began = time.monotonic()
        await asyncio.wait([running], timeout=min(left, 0.5))
        if not session.waits:
            left -= time.monotonic() - began
    return running.done()


async def run_program(
    command: Sequence[str], record: Mapping[str, Any], url: str, seed: int, session: Session, seconds: float
) -> Failure | None:
    """Runs a program to its end. It gets the record as JSON on standard input, and the address of the policy as OpenAI's clients
    read it. `seconds` bound the time in which it waits for no turn.

    Returns how the episode ended, None if the program ended it. A crash is reported on stderr and no failure, nor is a timeout the
    program's: the policy's answers may have led to either, so that the last one is graded. Raises EnvironmentLostError for a
    program that cannot be started, never asks for a turn, or ends with the code of a temporary failure, and what failed in the run
    while it sampled.
    """
    # Not the key of the engines, to which a run with [placement] gives one: the policy's words may choose what the program prints.
    inherited = {name: value for name, value in os.environ.items() if name != KEY}
    known = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "policy", "NMOE_SEED": str(seed)}
    # Files, because another process may hold the end of a pipe open for longer than the program runs.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as words:
        given.write(json.dumps(record).encode() + b"\n")
        given.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=words,
                env={**inherited, **known},
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentLostError(f"the program {command[0]} cannot be started: {error}") from None
        running = asyncio.ensure_future(process.wait())
        try:
            ended = await ended_in_time(running, session, seconds)
        finally:
            # With the processes of its group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await running
        if session.error is not None:
            raise session.error
        said = "" if ended else f"took longer than {seconds:g} s (budget.wall_s)"
        if ended and process.returncode:
            words.seek(max(0, words.seek(0, os.SEEK_END) - _MOST_SHOWN))
            last = " ".join(words.read().decode(errors="replace").split())
            said = f"ended with code {process.returncode}: {last}"
    if not session.episode.turns:
        raise EnvironmentLostError(f"the program {command[0]} {said or 'ended'}, and never asked for a turn")
    if ended and process.returncode == os.EX_TEMPFAIL:
        raise EnvironmentLostError(f"the program {command[0]} {said}")
    if said and session.ended is None:
        print(f"warning: the program {command[0]} {said}", file=sys.stderr, flush=True)
    return session.ended or (None if ended else "timeout")
