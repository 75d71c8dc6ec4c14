"""Tasks that users write: `Task`, one prompt and one graded answer, and `MultiTurnEnv`, an episode of several turns.

Both are named by `task = "my_module:Name"` in an environment, or passed to `nmoe.train_rl`. The adapters below make either of them
a task as the rest of nmoe knows it (docs/guides/environments.md).
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import random
import traceback
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from nmoe.envs.tasks.conversation import AssistantTurn, ConversationTask, Response, State, plain_json
from nmoe.envs.tasks.record_fields import split_prompt
from nmoe.envs.tasks.task import AnswerForm, Attempt, GeneratedTask, Posed, QuestionTask, RecordTask
from nmoe.errors import UserError
from nmoe.types import Message, Problem, Verdict

Record = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]]


class Task:
    """The smallest task that a user writes: a prompt and a grade.

        >>> import nmoe
        >>> class Shout(nmoe.Task):
        ...     def prompt(self, record):
        ...         return f"Write {record['word']} in capital letters."
        ...     def grade(self, record, answer):
        ...         return answer == record["word"].upper()
        >>> Shout().grade({"word": "moe"}, "MOE")
        True

    A record is one object of the task pool. `grade` returns True or False, or a score between 0 and 1, of which 1 is correct. An
    exception in it stops the run. It may be `async`.

    Two more methods are optional. `generate(rng, difficulty)` makes a record, for an environment without a dataset. It depends on
    its arguments alone, so that a problem is the same in every run and belongs to one split. `gold(record)` gives a right answer,
    which is graded before a run starts.

    Two attributes are for `nmoe env certify`. `one_answer = False` says that a problem has several right answers, and
    `reads_message = True` that `grade` looks for the answer among the words of a message.
    """

    one_answer: bool = True
    reads_message: bool = False

    def prompt(self, record: Record) -> Prompt:
        """Returns the prompt: a text, or messages such as {"role": "user", "content": "..."}. The default is the record's field
        `prompt`.
        """
        if "prompt" not in record:
            raise UserError(
                f"{_name(self)} has no prompt: define `prompt(self, record)`, or give the records a field 'prompt' (their fields "
                f"are {', '.join(map(repr, record)) or 'none'})"
            )
        prompt: Prompt = record["prompt"]
        return prompt

    @abstractmethod
    def grade(self, record: Record, answer: str) -> bool | float:
        """Returns the grade of an answer: the final message without reasoning or, where the format is plain text, the content of
        its box or, without a box, the whole text.
        """


class MultiTurnEnv:
    """An episode: a prompt, and a response to every turn of the policy until the episode is done.

        >>> import nmoe
        >>> class Guess(nmoe.MultiTurnEnv):
        ...     def prompt(self):
        ...         self.hidden, self.tries = self.rng.randint(1, 8), 4
        ...         return "I think of a number from 1 to 8. Which one is it?"
        ...     def step(self, turn):
        ...         self.tries -= 1
        ...         if turn.answer == str(self.hidden):
        ...             return None, 1.0, True
        ...         return "another one", 0.0, self.tries == 0
        >>> run = nmoe.train_rl(
        ...     {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 128},
        ...     env=Guess,
        ...     config={"run.steps": 1, "batch.prompts_per_step": 2, "batch.group_size": 2, "sampling.max_new_tokens": 8},
        ... )
        >>> run.metrics[0]["correctness/Guess"]
        0.0

    Each episode has its own instance. Its attributes are its state: JSON values, recorded with every turn, so that an episode can
    be replayed. Attributes whose names begin with `_` are shared by all episodes and not recorded; lists and dicts of the class
    are shared, too, so an episode may only read them. `record` is the object of the task pool, empty where there is no dataset.
    `rng` is a random.Random: the problem seeds it in `prompt`; in `step` the seed depends on run, problem, sample and turn.
    `difficulty` belongs to the generated problem.
    """

    record: Record = MappingProxyType({})
    rng: random.Random
    difficulty: int = 1

    @abstractmethod
    def prompt(self) -> Prompt:
        """Begins the episode and returns its prompt: a text, or messages such as {"role": "user", "content": "..."}."""

    @abstractmethod
    def step(self, turn: AssistantTurn) -> tuple[Prompt | None, float, bool]:
        """Responds to a turn of the policy. Returns the user's next message, the reward of this turn, and whether the episode is
        done.

        The rewards of an episode add up to its score; the episode counts as solved from a score of 1 on. An exception stops the
        run.
        """


class TaskError(UserError):
    """A user's task raised an exception or returned something invalid."""


@contextmanager
def of_the_user(who: str) -> Iterator[None]:
    """Turns an exception of the user's code in the `with` block into a TaskError with the task's name and the line.

    UserErrors pass unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError(f"{who} raised {type(error).__name__}: {error}, at {frame.filename}:{frame.lineno}") from error


def _name(task: Any) -> str:
    return type(task).__qualname__


def as_json(value: Any, what: str) -> str:
    try:
        return json.dumps(plain_json(value), ensure_ascii=False)
    except TypeError as error:
        raise UserError(f"{what}: {error}") from None


class OwnTask(QuestionTask, RecordTask):
    """The base of the adapters of users' tasks: the record travels with its problem, as JSON in the problem's metadata."""

    answer_form: AnswerForm = "whole"
    _name: str

    def messages(self, problem: Problem) -> list[Message]:
        return [
            *map(_message, json.loads(str(problem.metadata.get("messages", "[]")))),
            Message("user", problem.question),
        ]

    def check_gold(self, problem: Problem) -> None:
        return

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return "An answer.", "Another answer."

    def _posed(self, prompt: Prompt, gold: str, **metadata: str) -> Posed:
        try:
            history, question = split_prompt(prompt, "prompt")
        except UserError as error:
            raise UserError(f"task {self._name}: {error}") from None
        if history:
            metadata["messages"] = json.dumps([[one.role, one.content] for one in history], ensure_ascii=False)
        return question, gold, metadata


def _message(pair: tuple[str, str]) -> Message:
    role, content = pair
    return Message(role, content, channel="final" if role == "assistant" else None)


class GradedTask(OwnTask):
    """Adapts a user's `Task` to `QuestionTask`."""

    def __init__(self, task: Any, name: str) -> None:
        self._task, self._name = task, name
        self._has_gold = hasattr(task, "gold")
        self.one_answer = getattr(task, "one_answer", self.one_answer)
        self.reads_message = getattr(task, "reads_message", self.reads_message)

    def read_record(self, record: Record) -> Posed:
        kept = as_json(record, f"task {self._name}")
        record = json.loads(kept)
        with of_the_user(f"task {self._name}: prompt"):
            prompt = self._task.prompt(record)
        with of_the_user(f"task {self._name}: gold"):
            gold = str(self._task.gold(record)) if self._has_gold else ""
        return self._posed(prompt, gold, given=kept)

    def knows_answer(self, problem: Problem) -> bool:
        return self._has_gold

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, f"not {problem.gold}"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        with of_the_user(f"task {self._name}: grade"):
            graded = self._task.grade(json.loads(str(problem.metadata["given"])), attempt.answer)
            score = await graded if inspect.isawaitable(graded) else graded
        if isinstance(score, bool):
            return Verdict.of(score, "grade", f"grade returned {score}")
        score = _number(score, f"task {self._name}: grade")
        if not 0 <= score <= 1:
            raise TaskError(
                f"task {self._name}: grade returned {score:g}; a score is between 0 and 1, of which 1 is correct"
            )
        return Verdict("correct" if score == 1 else "incorrect", score, "grade", f"grade returned {score:g}")


class GeneratedGradedTask(GradedTask, GeneratedTask):
    """Adapts a user's `Task` that has `generate`."""

    def pose_new(self, rng: random.Random, difficulty: int) -> Posed:
        with of_the_user(f"task {self._name}: generate"):
            record = self._task.generate(rng, difficulty)
        if not isinstance(record, Mapping):
            raise UserError(f"task {self._name}: generate returned {record!r}; a record is a dict")
        return self.read_record(record)


class EpisodeTask(OwnTask, ConversationTask, GeneratedTask):
    """Adapts a user's `MultiTurnEnv` to `ConversationTask`: a state machine whose state is the attributes of the instance."""

    def __init__(self, template: MultiTurnEnv, name: str) -> None:
        self._template, self._name = template, name
        self._shared = _shared_by(type(template))
        self._kept(template, "its attributes")

    def read_record(self, record: Record) -> Posed:
        kept = as_json(record, f"task {self._name}")
        return self._begun(kept, random.Random(kept), 1)

    def pose_new(self, rng: random.Random, difficulty: int) -> Posed:
        return self._begun("{}", rng, difficulty)

    def _begun(self, kept: str, rng: random.Random, difficulty: int) -> Posed:
        episode = self._instance(kept, rng, difficulty)
        with of_the_user(f"task {self._name}: prompt"):
            prompt = episode.prompt()
        state = self._kept(episode, "after prompt()")
        question, gold, metadata = self._posed(prompt, "", given=kept, state=state)
        return question, gold, {**metadata, "difficulty": difficulty}

    def _instance(self, kept: str, rng: random.Random, difficulty: int) -> MultiTurnEnv:
        episode = copy.copy(self._template)
        vars(episode).update(plain_json(self._state(episode)))
        episode.record, episode.rng, episode.difficulty = json.loads(kept), rng, difficulty
        return episode

    def _kept(self, episode: MultiTurnEnv, when: str) -> str:
        """Returns the episode's state as JSON text. Raises UserError for a value that JSON does not preserve, and TaskError if a
        class attribute that all episodes share has changed.
        """
        for name, value in self._shared.items():
            if getattr(type(episode), name, None) != value:
                raise TaskError(
                    f"task {self._name}: {when}: the class's own `{name}` has changed, which all episodes share; set `self.{name}` "
                    f"in prompt(), or call it `_{name}` where that is meant"
                )
        try:
            return as_json(self._state(episode), f"task {self._name}: {when}")
        except UserError as error:
            raise UserError(
                f"{error}; attributes are recorded with every turn: use lists, dicts with text keys, texts and numbers, or a name "
                "that begins with _"
            ) from None

    @staticmethod
    def _state(episode: MultiTurnEnv) -> dict[str, Any]:
        given = ("record", "rng", "difficulty")
        return {name: value for name, value in vars(episode).items() if name not in given and not name.startswith("_")}

    def knows_answer(self, problem: Problem) -> bool:
        return False

    def start(self, problem: Problem) -> State:
        state: State = json.loads(str(problem.metadata["state"]))
        return state

    def respond(self, problem: Problem, state: State, said: AssistantTurn, rng: random.Random) -> Response:
        metadata = problem.metadata
        episode = self._instance(str(metadata["given"]), rng, int(metadata["difficulty"]))
        for name in self._state(episode).keys() - state.keys():
            delattr(episode, name)
        vars(episode).update(copy.deepcopy(dict(state)))
        who = f"task {self._name}: step"
        with of_the_user(who):
            returned = episode.step(said)
        user, reward = said_and_paid(returned, who)
        kept = json.loads(self._kept(episode, "after step()"))
        return Response(kept, user, reward)

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        return self.earned(attempt)


def _shared_by(kind: type) -> dict[str, Any]:
    """Returns copies of a class's public lists, dicts and sets, by which a change made in a step by mistake is found."""
    shared: dict[str, Any] = {}
    for name in dir(kind):
        value = getattr(kind, name, None)
        if name.startswith("_") or not isinstance(value, list | dict | set):
            continue
        try:
            shared[name] = set(value) if isinstance(value, set) else plain_json({"": value})[""]
        except TypeError:
            continue  # not to be compared by value
    return shared


def said_and_paid(returned: Any, who: str) -> tuple[str | None, float]:
    """Returns the user's next message, None if the episode is done, and the reward, from what the `step` of a user's episode
    returned. Raises TaskError for anything else than (messages, reward, done)."""
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TaskError(f"{who} returned {returned!r}, not (messages, reward, done)")
    messages, reward, done = returned
    if not isinstance(done, bool):
        raise TaskError(f"{who} returned done = {done!r}, not True or False")
    return None if done else _user_message(messages, who), _number(reward, who)


def _number(value: Any, who: str) -> float:
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    # numpy and torch numbers
    if callable(item := getattr(value, "item", None)) and getattr(value, "size", 1) != 0:
        return _number(item(), who)
    raise TaskError(f"{who} returned the reward {value!r}, not a finite number")


def _user_message(messages: Any, who: str) -> str:
    if isinstance(messages, str) and messages.strip():
        return messages
    if isinstance(messages, Sequence) and len(messages) == 1 and isinstance(messages[0], Mapping):
        message = messages[0]
        if message.get("role") == "user" and isinstance(content := message.get("content"), str) and content.strip():
            return content
    raise TaskError(
        f"{who} returned the messages {messages!r}; an episode that is not done needs the user's next message: a text that is not "
        "empty, or a list with one {'role': 'user', 'content': ...}"
    )
