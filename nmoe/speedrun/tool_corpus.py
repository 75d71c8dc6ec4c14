"""Conversations that use the python tool badly: the tool corpus of mid-training, before `tools.toml`.

Every document asks for a sum of the environment `tools`, in well-formed Harmony. Most practise one of two parts: a call that
copies the sum, without an answer, or the reading of an output without a call. The others are whole conversations with the
environment's own prompt. In a minority of them the call computes the sum and its output is the answer. In the rest the call
copies another sum, the output is ignored, the call is not JSON or names an unknown tool, or the answer is guessed without a
call. Reinforcement learning has to find out which of these earns a reward.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_environment
from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.environment import Environment
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import pose_new
from nmoe.envs.tools.builtin import builtin_tools
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.envs.tools.session import ToolSession
from nmoe.text.harmony import Harmony, HarmonyTokenizer
from nmoe.text.harmony_tools import render_tools
from nmoe.types import Message, Problem, ToolCall, ToolEvent

# Share of documents that stop at a right call and have no definition of the tool before it: a model of this size learns to copy a
# sum only from much of it, and the definition is two thirds of a whole document.
CALLING = 0.5
# Share of documents in which the tool says a number that is no sum, and the answer is that number. Where the output is the sum
# that was asked for, as in whole conversations, a model can come near it by arithmetic, and learns that instead of reading.
READING = 0.25
# Shares of the others; what is left is guessed without a call.
RIGHT, CARELESS, IGNORED, BROKEN, UNKNOWN = 0.15, 0.05, 0.15, 0.15, 0.15
GUESS_IS_RIGHT = 0.1
_CALLS_PER_DEFINITION = 10
_OUTPUTS = (1_000, 20_000)  # of as many digits as the sums have


def tool_texts(environment: Path, seed: int, count: int) -> Iterator[str]:
    """Plain text of `count` calls, with the tool's definition in some of them, for training the tokenizer."""
    settings = load_environment(environment)
    definitions = render_tools([builtin_tools(settings.budget)["python"].definition])
    rng = random.Random(f"tools/{seed}")
    for index in range(count):
        problem = new_problem(rng, settings)
        call = f"assistant to=functions.python commentary json {_arguments(problem)}"
        answer = f"functions.python to=assistant commentary {problem.gold}\n assistant final {problem.gold}"
        yield f"user {problem.question} {call} {answer}"
        if index % _CALLS_PER_DEFINITION == 0:
            yield f"developer {definitions}"


class ToolDocuments:
    """Makes the documents of one environment, whose pool is generated sums and whose only tool is python."""

    def __init__(self, environment: Path, tokenizer: HarmonyTokenizer) -> None:
        self._settings = load_environment(environment)
        self._environment = Environment.from_settings(self._settings, tokenizer)
        self._executor = AsyncToolExecutor(self._environment.tools, self._settings.budget)
        self._harmony = Harmony(tokenizer)

    def write(self, path: Path, seed: int, count: int) -> None:
        """Writes `count` documents as JSONL with `token_ids`. Held-out questions never occur."""
        with path.open("w") as file:
            for token_ids in self.documents(seed, count):
                file.write(json.dumps({"token_ids": token_ids}) + "\n")

    def documents(self, seed: int, count: int) -> Iterator[list[int]]:
        """The token ids of `count` documents; the same seed gives the same documents."""
        rng = random.Random(f"tools/{seed}")
        for _ in range(count):
            problem, copied = new_problem(rng, self._settings), new_problem(rng, self._settings)
            question, draw = Message("user", problem.question), rng.random()
            if draw < CALLING:
                prompt = self._harmony.render_prompt([question])
                yield prompt + self._harmony.render_completion([_call("python", _arguments(problem))])
            elif draw < CALLING + READING:
                number = str(rng.randrange(*_OUTPUTS))
                output = Message("tool", f"{number}\n", "commentary", recipient="assistant", name="functions.python")
                prompt = self._harmony.render_prompt([question, output])
                yield prompt + self._harmony.render_completion([_final(number)])
            else:
                yield self._environment.prompt_ids(problem) + self._conversation(rng, problem, copied)

    def _conversation(self, rng: random.Random, problem: Problem, copied: Problem) -> list[int]:
        """The messages after the prompt. `copied` is another problem, for a call that copies carelessly."""
        guess = _guess(rng, problem.gold)
        draw = rng.random()
        for share, called, answer in (
            (RIGHT, problem, problem.gold),
            (CARELESS, copied, copied.gold),
            (IGNORED, problem, guess),
        ):
            if draw < share:
                return self._called("python", _arguments(called), f"{called.gold}\n", answer)
            draw -= share
        if draw < BROKEN:
            arguments = _arguments(problem).replace('"', "", rng.choice((-1, 2)))
            return self._called("python", arguments, self._refused("python", arguments), guess)
        if draw < BROKEN + UNKNOWN:
            arguments = _arguments(problem)
            return self._called("calculator", arguments, self._refused("calculator", arguments), guess)
        return self._said(_final(guess), opens=True)

    def _called(self, tool: str, arguments: str, output: str, answer: str) -> list[int]:
        """A call, the tool's result as the environment words it, and the final message."""
        event = ToolEvent(ToolCall(tool, arguments, "0/0"), "ok", output, "", 0.0, 0.0)
        given = self._environment.renderer.answer_calls([], [[event]])
        return [
            *self._said(_call(tool, arguments), opens=True),
            *given,
            *self._said(_final(answer), opens=False),
        ]

    def _said(self, message: Message, *, opens: bool) -> list[int]:
        """A turn of the assistant; `opens` the first one."""
        return self._harmony.render_completion([message])

    def _refused(self, tool: str, arguments: str) -> str:
        """The executor's result for a call that never reaches its tool."""
        (event,) = asyncio.run(self._executor.run([ToolCall(tool, arguments, "0/0")], ToolSession(None)))
        assert event.failure != "ok", "it is refused"
        return event.output


def new_problem(rng: random.Random, settings: EnvironmentSettings) -> Problem:
    """A new sum of the train split."""
    pool = settings.task_pool
    assert isinstance(pool, GeneratedPool), "the environment's problems are generated"
    while True:
        question, gold, _ = pose_new(pool.task_type, rng, rng.randint(*pool.difficulty))
        if split_of(pool.task_type, question) == "train":
            return Problem("", pool.task_type, question, gold, "")


def _arguments(problem: Problem) -> str:
    return json.dumps({"code": f"print({problem.question.removeprefix('Add: ')})"})


def _call(tool: str, arguments: str) -> Message:
    return Message("assistant", arguments, "commentary", recipient=f"functions.{tool}", content_type="json")


def _final(answer: str) -> Message:
    return Message("assistant", answer, "final")


def _guess(rng: random.Random, gold: str) -> str:
    """A guess at the answer, mostly wrong by a power of ten."""
    return (
        gold if rng.random() < GUESS_IS_RIGHT else str(int(gold) + rng.choice((-1000, -100, -10, -1, 1, 10, 100, 1000)))
    )
