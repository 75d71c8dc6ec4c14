"""An environment of nmoe for a trainer that samples by itself: records to ask, and grades of what its policy said.

Everything else happens as in a run of nmoe: the same collector plays an episode with its tools, its conversation, its sandbox and
its rewards, and asks an engine for the policy's turns. Here that engine gets them from the other trainer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast

from nmoe.adapters.messages import (
    Said,
    asked_last,
    message_tokenizer,
    text_of,
    text_with_reasoning,
    tools_in_words,
    turn_ids,
)
from nmoe.adapters.rewards import FROM_TRAINER, FromTrainer, check_alone, comparing, shared_rewards
from nmoe.api.environments import Env, environment_settings
from nmoe.background import Background
from nmoe.config.environment import EnvironmentSettings, SystemByFormat
from nmoe.config.tables.rewards import Rubric
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Engine, Request
from nmoe.envs.environment import Environment
from nmoe.envs.grade import COMPONENTS
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import InfrastructureError, UserError
from nmoe.rollout.collector import Collector, Stream
from nmoe.rollout.tickets import Ticket
from nmoe.runs.waiting import all_or_none
from nmoe.trajectory import Group
from nmoe.types import INFRASTRUCTURE, Grade, Message, Problem, Sample, Sampling, TrainerState

Split = Literal["train", "validation", "eval"]
Finish = Literal["stop", "length"]

# Tokens are the trainer's matter, so that no limit in tokens applies here.
_NO_LIMIT = 2**40
_NOTHING = FromTrainer()
_LABEL = re.compile(r"(train|validation|eval)/([0-9]{1,15})/(.+)")


@dataclass(frozen=True)
class Step:
    """What follows a turn of the policy: the messages that it reads next, or its grade, with which the episode is over."""

    messages: list[dict[str, Any]]
    grade: Grade | None

    @property
    def done(self) -> bool:
        return self.grade is not None


class SharedEnvironment:
    """An environment of nmoe whose policy is sampled elsewhere.

        >>> from nmoe.adapters.environment import SharedEnvironment
        >>> shared = SharedEnvironment("word_problems")
        >>> [row] = shared.rows(1)
        >>> row["prompt"][-1]["role"], row["label"].split("/")[:2]
        ('user', ['train', '0'])
        >>> [grade] = shared.grade([row["label"]], ["I do not know."])
        >>> grade.score
        0.0

    `environment` is what `nmoe.train_rl` takes. The answer is the policy's message without reasoning in think tags, or in an
    environment of plain text (`format = "boxed"`) all that it said. A curriculum does not move here: the weights are the ones of
    `stage`, by default the last. Limits in tokens are left to the trainer. Methods may be called from any thread.
    """

    def __init__(self, environment: Env, *, stage: str | None = None) -> None:
        """Loads the environment, and grades the gold answers of its records. Raises UserError for an environment that cannot be
        graded elsewhere, and what loading one in a run raises."""
        settings = environment_settings(environment, "environment")
        self.settings = _for_messages(settings, stage)
        self.name = self.settings.env_id
        self._environment = Environment.from_settings(self.settings, message_tokenizer())
        if self._environment.asks:
            raise UserError(
                f"environment {self.name!r}: a program asks the policy there, which another trainer cannot run"
            )
        if self.plain and self.takes_turns:
            raise UserError(
                f"environment {self.name!r} answers the policy in plain text, and other trainers know turns as messages; write "
                'format = "chat"'
            )
        weights = self._environment.grader.weights
        if weights["efficiency"] > 0:
            raise UserError(
                f"environment {self.name!r} rewards efficiency, which counts the policy's tokens, and only its trainer knows them; "
                "set the weight to 0, or name another stage"
            )
        rewards = self.settings.rewards
        self._environment.rewards = shared_rewards(self.name, self._environment.rewards, rewards)
        self.compares = comparing(rewards)
        """The rewards that compare the samples of a group."""
        self._pools = {"train": self._environment.pool}
        self._begun: Counter[str] = Counter()  # the episodes of each label
        self._counting = threading.Lock()
        with ExitStack() as stack:
            runtime = stack.enter_context(ToolRuntime(self._environment, SandboxSettings()))
            self._collector = Collector(
                cast(Engine, _Elsewhere()),
                self._environment,
                2 * _NO_LIMIT,
                runtime.sandboxes,
                workspaces=runtime.workspaces,
            )
            self.background = Background(
                self.name, f"the environment {self.name!r} was closed, so that nothing in it can be played or graded"
            )
            stack.callback(self.background.end)
            stream = self.background.wait(self._opened())
            self._end = weakref.finalize(self, _ended, self.background, stream, runtime)
            stack.pop_all()

    async def _opened(self) -> Stream:
        stream = self._collector.stream()
        await stream.opened()
        return stream

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that the policy may call, as chat APIs declare them."""
        return [tool.definition.as_function() for tool in self._environment.tools.values()]

    @property
    def plain(self) -> bool:
        """Whether the policy's text is all answer, without reasoning and calls."""
        return self.settings.format == "boxed"

    def alone(self) -> Self:
        """Returns the environment, for a trainer that hands over one completion at a time, without its tokens and its own step.
        Raises UserError for rewards that need more."""
        check_alone(self.name, self._environment.rewards, self.settings.rewards)
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether an episode may have several turns, so that one completion is not all of it."""
        return bool(self._environment.tools) or self._environment.converses

    @property
    def turns(self) -> int:
        """The turns that an episode has at most."""
        return self._environment.budget.turns if self.takes_turns else 1

    @property
    def asks_itself(self) -> bool:
        """Whether an episode makes its prompt only when it is opened."""
        return self._environment.lives

    @property
    def components(self) -> list[str]:
        """The components of a grade that mean something here. Efficiency does not, since it counts the policy's tokens."""
        of_grade = [
            name for name in COMPONENTS if name != "efficiency" and (self._environment.tools or name != "tool_use")
        ]
        return [*of_grade, *(reward.name for reward in self._environment.rewards)]

    def size(self, split: Split = "train") -> int | None:
        """Returns the number of problems, None of endless ones."""
        return self._pool(split).size

    def rows(self, count: int | None = None, *, split: Split = "train") -> list[dict[str, Any]]:
        """Returns the first `count` problems, by default all, as `{"prompt": [messages], "label": "train/0/1f0c22d9"}`.

        The label names the problem to `grade` and `episode`: its split, its position, and a hash by which another version of the
        environment is noticed. Raises UserError for all of an endless environment, and for a held-out split that there is not.
        """
        size = self.size(split)
        if count is None and size is None:
            raise UserError(f"environment {self.name!r} has endless problems: say how many")
        last = count if size is None else size if count is None else min(count, size)
        return [self.row(position, split) for position in range(last or 0)]

    def row(self, position: int, split: Split = "train") -> dict[str, Any]:
        """Returns the problem at a position, as `rows` does."""
        problem = self._pool(split).order.at(position)
        return {"prompt": self._messages(problem), "label": f"{split}/{position}/{self._digest(problem)}"}

    def with_tools(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages whose system message declares the tools, for trainers whose chat template is not given them."""
        tools = [tool.definition for tool in self._environment.tools.values()]
        if not tools:
            return messages
        has = messages[0]["role"] == "system"
        words = "\n\n".join([*([messages[0]["content"]] if has else []), tools_in_words(tools)])
        return [{"role": "system", "content": words}, *messages[has:]]

    def problem(self, label: str) -> Problem:
        """Returns the problem of a label. Raises UserError for a label of other records than these."""
        found = _LABEL.fullmatch(label)
        if found is None:
            raise UserError(f"{label!r:.80} is no label of a record of nmoe, such as 'train/0/1f0c22d9'")
        problem = self._pool(found[1]).order.at(int(found[2]))  # type: ignore[arg-type]
        if self._digest(problem) != found[3]:
            raise UserError(
                f"the label {label!r} is of another environment than {self.name!r} as it is now, or of another version; "
                "write the records again"
            )
        return problem

    def _pool(self, split: Split) -> Any:
        if split not in self._pools:
            self._pools[split] = self._environment.held_out(split).pool  # type: ignore[arg-type]
        return self._pools[split]

    def _messages(self, problem: Problem) -> list[dict[str, Any]]:
        return [_as_dict(message) for message in self._environment.prompts.messages(problem)]

    def _digest(self, problem: Problem) -> str:
        said = [problem.id, problem.gold, problem.task_type, self._messages(problem)]
        graded_by = [dict(problem.metadata), dict(problem.columns)]
        return hashlib.sha256(json.dumps([*said, *graded_by], default=str).encode()).hexdigest()[:8]

    def grade(
        self,
        labels: Sequence[str],
        completions: Sequence[Said],
        finishes: Sequence[Finish] | None = None,
        *,
        opens_reasoning: bool | Sequence[bool] | None = None,
        samples: int | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        state: TrainerState | None = None,
    ) -> list[Grade]:
        """Grades completions of one turn, one for each label. `finishes` says for each whether it ended by itself ("stop", the
        default) or was cut, and `opens_reasoning` for all or each whether its prompt ended in an opened think tag.

        The other arguments are for `[[rewards]]`: `samples` completions in a row, with the same label, are a group whose samples
        they may compare; `completion_ids` are the policy's tokens, and `state` is the trainer's.

        Raises UserError in an environment of several turns, for a reward that lacks what the trainer would have to give, and for a
        completion that closes reasoning without opening it, if `opens_reasoning` is None; InfrastructureError where a grade was
        lost; and what a grader raises. None of it is reward 0.
        """
        return self.background.wait(
            self._graded(labels, completions, finishes, opens_reasoning, samples, FromTrainer(completion_ids, state))
        )

    async def agrade(
        self,
        labels: Sequence[str],
        completions: Sequence[Said],
        finishes: Sequence[Finish] | None = None,
        *,
        opens_reasoning: bool | Sequence[bool] | None = None,
    ) -> list[Grade]:
        """Grades completions, each alone, for another event loop. If the caller is cancelled, so is the grading."""
        return await self.background.awaited(self._graded(labels, completions, finishes, opens_reasoning))

    async def _graded(
        self,
        labels: Sequence[str],
        completions: Sequence[Said],
        finishes: Sequence[Finish] | None,
        opens_reasoning: bool | Sequence[bool] | None,
        samples: int | None = None,
        given: FromTrainer = _NOTHING,
    ) -> list[Grade]:
        if self.takes_turns:
            raise UserError(
                f"environment {self.name!r} has tools or answers the policy, so that one completion is not all of an episode; "
                "play it turn by turn"
            )
        count = len(labels)
        ended: Sequence[Finish] = ["stop"] * count if finishes is None else finishes
        opens = opens_reasoning
        opened = [opens] * count if opens is None or isinstance(opens, bool) else opens
        said = zip(completions, ended, opened, strict=True)
        sampled = [self.sample(one, end, is_open) for one, end, is_open in said]
        if not len(sampled) == count == len(completions if given.completion_ids is None else given.completion_ids):
            raise UserError(f"{count} labels, {len(sampled)} completions and their tokens do not belong together")
        plays = []
        groups = self._groups(labels, samples)
        for of in groups:
            ids = None if given.completion_ids is None else [given.completion_ids[index] for index in of]
            turns = _Given([sampled[index] for index in of])
            plays.append(self._play(labels[of[0]], turns, (labels[of[0]],), FromTrainer(ids, given.state)))
        played = await all_or_none(plays)
        grades: dict[int, Grade] = {}
        for group, indices in zip(played, groups, strict=True):
            grades |= {index: _known(one.grade) for index, one in zip(indices, group.trajectories, strict=True)}
        return [grades[index] for index in range(count)]

    def _groups(self, labels: Sequence[str], samples: int | None) -> list[list[int]]:
        """Returns the indices of each group. Raises UserError where the samples of a group are not all there, and a reward compares
        them."""
        if not self.compares:
            groups: dict[str, list[int]] = {}
            for index, label in enumerate(labels):
                groups.setdefault(label, []).append(index)
            return [*groups.values()]
        reward = f"environment {self.name!r}: the reward {self.compares[0]!r} (replay = false) compares the samples of a group"
        if samples is None:
            raise UserError(f"{reward}: say how many samples a group has")
        in_row = [[*range(start, start + samples)] for start in range(0, len(labels), samples)]
        for of in in_row:
            if of[-1] >= len(labels) or any(labels[index] != labels[of[0]] for index in of):
                raise UserError(
                    f"{reward}, and completions {of[0]} to {of[-1]} of {len(labels)} are not {samples} of one problem; let each "
                    "process have whole groups, or leave the reward out"
                )
        return in_row

    def sample(self, said: Said, finish: Finish, opens_reasoning: bool | None) -> Sample:
        """Returns a turn of the policy as the environment's engine would. Raises UserError as `grade` does."""
        text = text_of(said) if self.plain else text_with_reasoning(said, opens_reasoning)
        ids = turn_ids(text, finish == "stop")
        return Sample(ids, [0.0] * len(ids), [0] * len(ids), finish)

    def episode(self, label: str, *, opens_reasoning: bool | None = None) -> SharedEpisode:
        """Returns an episode of a record, to be played turn by turn. `opens_reasoning` says whether the chat template ends every
        prompt in an opened think tag; None if it is unknown.

        Each episode of a record draws other seeds, so that its samples are not answered alike. A live environment is opened with
        the same seed for all of them, because the samples of a group answer one question. Raises UserError as `alone` does.
        """
        with self.alone()._counting:
            number = self._begun[label]
            self._begun[label] += 1
        return SharedEpisode(self, label, opens_reasoning, (label,) if self.asks_itself else (label, number))

    async def _play(
        self, label: str, turns: _Given | _Asked, key: tuple[str | int, ...], given: FromTrainer = _NOTHING
    ) -> Group:
        problem = self.problem(label)
        collector, sampling = self._collector, Sampling(_NO_LIMIT)
        terms = collector.terms(turns.samples, sampling, key, given.state or TrainerState())
        context = copy_context()
        context.run(_TURNS.set, turns)
        context.run(FROM_TRAINER.set, given)
        position = int(label.split("/")[1])
        play = collector.play(Ticket(position, problem, terms))
        try:
            return await asyncio.get_running_loop().create_task(play, context=context)
        finally:
            collector.sampled_tokens.pop((*key, position), None)  # which only a run of nmoe accounts for

    def close(self) -> None:
        """Ends all episodes, and closes connections and sandboxes. Whoever waits gets a UserError. It also happens where nothing
        refers to the environment any more."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedEpisode:
    """An episode that another trainer plays: `begin`, then `step` with each turn of its policy until the step is done.

        >>> from nmoe.adapters.environment import SharedEnvironment
        >>> episode = SharedEnvironment("guess").episode(label)
        >>> [asked] = episode.begin()
        >>> episode.step("50").messages
        [{'role': 'user', 'content': 'lower'}]
        >>> episode.close()

    The methods that begin with `a` are for event loops. An episode to which nothing refers any more is closed.
    """

    def __init__(
        self, shared: SharedEnvironment, label: str, opens_reasoning: bool | None, key: tuple[str | int, ...]
    ) -> None:
        """Makes an episode; `SharedEnvironment.episode` does."""
        self._shared, self._label = shared, label
        self._opens_reasoning, self._key = opens_reasoning, key
        self._turns = _Asked()
        self._playing: asyncio.Task[Group] | None = None

    @property
    def asks(self) -> bool:
        """Whether the episode waits for a turn of the policy: it has begun, has no grade and raised nothing."""
        return self._playing is not None and not self._playing.done()

    def begin(self) -> list[dict[str, Any]]:
        """Opens the episode, and returns the messages of its prompt."""
        return self._shared.background.wait(self._begin())

    async def abegin(self) -> list[dict[str, Any]]:
        return await self._shared.background.awaited(self._begin())

    def step(self, said: Said, finish: Finish = "stop") -> Step:
        """Answers a turn of the policy. Raises InfrastructureError if the grade was lost, and what a task or a grader raises."""
        return self._shared.background.wait(self._step(said, finish))

    async def astep(self, said: Said, finish: Finish = "stop") -> Step:
        return await self._shared.background.awaited(self._step(said, finish))

    def close(self) -> None:
        """Ends the episode where it is."""
        if not self._shared.background.ended:
            self._shared.background.wait(self._close())

    async def aclose(self) -> None:
        if not self._shared.background.ended:
            await self._shared.background.awaited(self._close())

    async def _begin(self) -> list[dict[str, Any]]:
        if self._playing is not None:
            raise UserError("the episode has begun already; take another one")
        playing = asyncio.ensure_future(self._shared._play(self._label, self._turns, self._key))
        self._playing = playing
        # A trainer may drop an episode, where its engine failed, without closing it.
        weakref.finalize(self, self._shared.background.call, playing.cancel).atexit = False
        return (await self._next()).messages

    async def _step(self, said: Said, finish: Finish) -> Step:
        if not self.asks:
            raise UserError("the episode is over, or has not begun; take another one")
        self._turns.said.put_nowait(self._shared.sample(said, finish, self._opens_reasoning))
        step = await self._next()
        ids = [] if isinstance(said, str) else [call.get("id") for call in said.get("tool_calls") or ()]
        answers = [message for message in step.messages if message["role"] == "tool"]
        # The policy's server has named its calls, and here they are counted. Calls in the text come before them.
        for message, own in zip(answers[max(len(answers) - len(ids), 0) :], ids, strict=False):
            message["tool_call_id"] = own or message["tool_call_id"]
        return step

    async def _next(self) -> Step:
        assert self._playing is not None, "an episode is played from its begin on"
        asking = asyncio.ensure_future(self._turns.asked.get())
        await asyncio.wait([asking, self._playing], return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            if self._shared.plain:  # has one turn, and no messages in its tokens
                return Step(self._shared._messages(self._shared.problem(self._label)), None)
            return Step(asked_last(asking.result().prompt_ids), None)
        asking.cancel()
        if self._playing.cancelled():
            raise UserError("the episode was closed")
        (trajectory,) = self._playing.result().trajectories
        return Step([], _known(trajectory.grade))

    async def _close(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.wait([self._playing])


@dataclass
class _Given:
    """The samples of a group of one turn each."""

    given: list[Sample]

    @property
    def samples(self) -> int:
        return len(self.given)

    async def take(self, request: Request) -> list[Sample]:
        return self.given


@dataclass
class _Asked:
    """The turns of one sample, each asked for and then said."""

    asked: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)
    said: asyncio.Queue[Sample] = field(default_factory=asyncio.Queue)
    samples: int = 1

    async def take(self, request: Request) -> list[Sample]:
        await self.asked.put(request)
        return [await self.said.get()]


_TURNS: ContextVar[_Given | _Asked] = ContextVar("turns")
"""Where the turns of the group come from that the task plays."""


class _Elsewhere:
    """The part of an engine that a collector calls, for turns that are sampled elsewhere."""

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        for index, sample in enumerate(await self.generate(request)):
            yield index, sample

    async def generate(self, request: Request) -> list[Sample]:
        return await _TURNS.get().take(request)


def _ended(background: Background, stream: Stream, runtime: ToolRuntime) -> None:
    """Closes what an environment holds, and ends its thread."""
    if background.is_current:  # as the garbage collector may have it
        threading.Thread(target=_ended, args=(background, stream, runtime)).start()
        return
    try:
        background.end(stream.close())
    finally:
        # After the main thread no other can begin, and sandboxes end with this process.
        if threading.main_thread().is_alive():
            runtime.close()


def _for_messages(settings: EnvironmentSettings, stage: str | None) -> EnvironmentSettings:
    """Returns the settings for policies of any chat template: without what only tokens have, and with a stage's weights."""
    plain = settings.format == "boxed"
    systems = settings.system_by_format
    system = systems.boxed if plain else systems.chat
    changed: dict[str, Any] = {
        "format": "boxed" if plain else "chat",
        "system": settings.system if system is None else system,
        "system_by_format": SystemByFormat(),
        "reasoning_effort": None,
        "chat_template_kwargs": {},
        "budget": settings.budget.model_copy(update={"prompt_tokens": None, "completion_tokens": None}),
    }
    stages = () if settings.curriculum is None else settings.curriculum.stages
    names = [one.name for one in stages]
    if stage is not None and stage not in names:
        raise UserError(
            f"environment {settings.env_id!r} has no stage {stage!r}: "
            + (f"it has {', '.join(names)}" if names else "it has no curriculum")
        )
    if stages:
        chosen = stages[-1] if stage is None else stages[names.index(stage)]
        changed |= {"curriculum": None, "rubric": Rubric(**chosen.weights.model_dump())}
    return settings.model_copy(update=changed)


def _known(grade: Grade) -> Grade:
    """Returns a grade that is one. Raises InfrastructureError for a sample that nmoe would mask."""
    if grade.failure in INFRASTRUCTURE:
        said = grade.reason or (grade.verdict.reason if grade.verdict is not None else "")
        raise InfrastructureError(
            f"the completion has no grade, because of {grade.failure}" + (f": {said}" if said else "")
        )
    return grade


def _as_dict(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def shared_by_name(environment: str, stage: str | None = None) -> SharedEnvironment:
    """Returns the environment of a file or a packaged name, loaded once in a process, for samples that are graded alone."""
    key = (environment, stage)
    with _LOADING:
        if key not in _LOADED:
            _LOADED[key] = SharedEnvironment(Path(environment), stage=stage).alone()
    return _LOADED[key]


_LOADED: dict[tuple[str, str | None], SharedEnvironment] = {}
_LOADING = threading.Lock()
