"""Conversation tasks: a state machine plays the user and responds to the policy's answers until the conversation is over."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmoe.envs.tasks.task import Attempt, QuestionTask
from nmoe.types import Exchange, Problem, Verdict

State = Mapping[str, Any]


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the policy that ends in an answer: the extracted answer, and the turn's text without reasoning.
    `AssistantTurn(answer="17", text="17")`.
    """

    answer: str
    text: str


@dataclass(frozen=True)
class Response:
    """The simulated user's response to a turn: `Response({"left": 2}, "higher")`.

    Holds the next state, the user's next message (None if the conversation is over), and the reward of the turn.
    """

    state: State
    user: str | None
    reward: float = 0.0


class AnsweringTask(QuestionTask, ABC):
    """The base of tasks that answer the policy's turns, until the episode is over. The rewards of its exchanges add up."""

    def earned(self, attempt: Attempt) -> Verdict:
        """Returns the verdict whose score is the sum of the rewards; the answer is correct if it reaches 1."""
        total = sum(exchange.reward for exchange in attempt.exchanges)
        said = f"{total:g} earned in {len(attempt.exchanges)} turns"
        return Verdict("correct" if total >= 1 else "incorrect", total, "episode", said)


class ConversationTask(AnsweringTask, ABC):
    """The base of conversation tasks.

    A state is JSON and is recorded with every exchange. `start` and `respond` depend on their arguments alone, so that a
    conversation can be replayed: the same answers lead to the same states, messages and rewards. An exception in either is a
    bug in the task and stops the run.

    The rewards of a conversation add up. The answer is correct if the sum reaches 1; the score is the sum clipped to [0, 1].
    """

    @abstractmethod
    def start(self, problem: Problem) -> State:
        """Returns the state before the policy's first turn."""

    @abstractmethod
    def respond(self, problem: Problem, state: State, said: AssistantTurn, rng: random.Random) -> Response:
        """Returns the simulated user's response to a turn of the policy, whose text may be anything.

        `rng` is seeded by the run's seed, the problem's position, the sample and the turn.
        """

    def exchange(
        self, problem: Problem, before: Exchange | None, said: AssistantTurn, *, turn: int, seed: int
    ) -> Exchange:
        """Returns the record of the response to the policy's answer in turn `turn`; `before` is the previous exchange, None at the
        start.

        Raises TypeError or ValueError for a response that cannot be recorded.
        """
        state = plain_json(self.start(problem) if before is None else before.state)
        response = self.respond(problem, state, said, random.Random(seed))
        if response.user is not None and not response.user.strip():
            raise ValueError("the user says nothing; a conversation that is over has user = None")
        reward = float(response.reward)
        if reward - reward != 0:
            raise ValueError(f"a reward is a finite number, not {reward}")
        return Exchange(turn, plain_json(response.state), response.user, reward)

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        """Verifies by the sum of the exchanges' rewards. An answer without exchanges, such as a gold answer, is judged as the only
        turn of a conversation.
        """
        exchanges = attempt.exchanges or [
            self.exchange(problem, None, AssistantTurn(attempt.answer, attempt.answer), turn=0, seed=0)
        ]
        total = sum(exchange.reward for exchange in exchanges)
        count = "1 exchange" if len(exchanges) == 1 else f"{len(exchanges)} exchanges"
        correct = total >= 1
        return Verdict(
            "correct" if correct else "incorrect",
            min(max(total, 0.0), 1.0),
            "conversation",
            f"{total:g} earned in {count}",
        )


def plain_json(state: State) -> dict[str, Any]:
    """Returns a deep copy of a state. Raises TypeError for a value that JSON does not preserve."""
    copied = _copy(state, "state")
    if not isinstance(copied, dict):
        raise TypeError(f"a state is a JSON object, not {type(state).__name__}")
    return copied


def _copy(value: Any, path: str) -> Any:
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and value - value == 0):
        return value
    if isinstance(value, list):
        return [_copy(one, f"{path}[{index}]") for index, one in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _copy(one, f"{path}.{key}") for key, one in value.items()}
    raise TypeError(f"{path} is not JSON: {value!r}")
