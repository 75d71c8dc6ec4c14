"""Writes the training texts of the speedrun's new small model: synthetic conversations with planted faults.

The faults leave something that reinforcement learning can improve. The pretraining corpus has questions and answers in
Harmony, or close to it, with three kinds of fault, each at a rate set below:

- skill: a minority of documents follows the right procedure, the others a wrong one (copying instead of reversing, forgetting
  the carry, sorting downwards);
- format: messages lack their end, their channel or their final answer;
- length: some documents ramble before they reason.

The tool corpus, for mid-training before `tools.toml`, asks for sums of the environment `tools`, in well-formed Harmony.
Most documents practise one of two parts: a call that copies the sum, without an answer, or the reading of an output
without a call. The others are whole conversations with the environment's own prompt. In a minority of them the call
computes the sum and its output is the answer. In the rest the call copies another sum, the output is ignored, the call
is not JSON or names an unknown tool, or the answer is guessed without a call.

The corpus for `five_stages.toml` also asks for sums. It contains every behaviour that this environment rewards, but
none of them reliably: most calls are in vain, some documents think before they answer and work out by hand, column by
column, some of what the tool is going to do, and some give the answer on no channel, where it does not count.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_environment
from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.environment import Environment
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import generated_task
from nmoe.envs.tools.builtin import builtin_tools
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.envs.tools.session import ToolSession
from nmoe.text.harmony import MESSAGE, RETURN, Harmony, HarmonyTokenizer
from nmoe.text.renderers.harmony import render_tools
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem, ToolCall, ToolEvent

# Shares of documents. The rest of each is of a third kind: a guess, swapped ends, shuffled digits; broken form.
ADD_RIGHT, ADD_NO_CARRY = 0.35, 0.4
REVERSE_RIGHT, REVERSE_COPY = 0.2, 0.5
SORT_RIGHT, SORT_DOWN = 0.25, 0.5
PROPER, WITHOUT_ANALYSIS = 0.75, 0.07
RAMBLES = 0.3
# Problems one digit longer than reinforcement learning will ever train on.
LONGER = 0.15

# A worked answer: what stands in the analysis and in the final message.
Worked = tuple[str, str]


def _digit_steps(left: str, right: str, carries: bool) -> Worked:
    """Returns the column-wise steps and the result of an addition, from the right: "7+5=12 4+8+1=13" and "132".

    Without `carries`, carries are forgotten: "7+5=12 4+8=12" and "122".
    """
    steps, digits, carry = [], "", 0
    width = max(len(left), len(right))
    for a, b in zip(reversed(left.zfill(width)), reversed(right.zfill(width)), strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}" + ("+1" if carry else "") + f"={total}")
        digits = str(total % 10) + digits
        carry = total // 10 if carries else 0
    last = total // 10
    return " ".join(steps), (str(last) if last else "") + digits


def columns(question: str) -> list[str]:
    """Returns the columns of a sum from the right: `["7+5=12", "4+8+1=13"]` for "Add: 47 + 85"."""
    left, right = question.removeprefix("Add: ").split(" + ")
    return _digit_steps(left, right, carries=True)[0].split()


def _add(rng: random.Random, question: str, gold: str) -> Worked:
    left, right = question.removeprefix("Add: ").split(" + ")
    draw = rng.random()
    if draw < ADD_RIGHT:
        return _digit_steps(left, right, carries=True)
    if draw < ADD_RIGHT + ADD_NO_CARRY:
        return _digit_steps(left, right, carries=False)
    return "a guess", "".join(str(rng.randrange(10)) for _ in gold)


def _reverse(rng: random.Random, question: str, gold: str) -> Worked:
    digits = question.removeprefix("Reverse: ")
    draw = rng.random()
    if draw < REVERSE_RIGHT:
        return "from the back", gold
    if draw < REVERSE_RIGHT + REVERSE_COPY:
        return "as it stands", digits
    return "ends change place", digits[-1] + digits[1:-1] + digits[0]


def _sort(rng: random.Random, question: str, gold: str) -> Worked:
    draw = rng.random()
    if draw < SORT_RIGHT:
        return "smallest first", gold
    if draw < SORT_RIGHT + SORT_DOWN:
        return "largest first", gold[::-1]
    digits = list(gold)
    rng.shuffle(digits)
    return "mixed up", "".join(digits)


# How often each skill is drawn: adding takes the longest to learn.
_DRAWN = ("add", "add", "add", "reverse", "reverse", "sort", "sort")
# Difficulties as in skills.toml.
SKILLS: dict[str, tuple[tuple[int, int], Callable[[random.Random, str, str], Worked]]] = {
    "add": ((2, 2), _add),
    "reverse": ((4, 6), _reverse),
    "sort": ((4, 6), _sort),
}


def _document(rng: random.Random, harmony: Harmony, question: str, work: str, answer: str) -> dict[str, Any]:
    """Makes a document of a conversation whose question is read but not learned.

    The answer has one of several formats, of which only the first two can be parsed.
    """
    prompt = harmony.render_prompt([Message("user", question)])
    return {"token_ids": prompt + _reply(rng, harmony, work, answer), "prompt_tokens": len(prompt)}


def _reply(rng: random.Random, harmony: Harmony, work: str, answer: str) -> list[int]:
    if rng.random() < RAMBLES:
        work = "well let me see now " + work
    thought = Message("assistant", work, channel="analysis")
    reply = Message("assistant", answer, channel="final")
    draw = rng.random()
    if draw < PROPER:
        return harmony.render_completion([thought, reply])
    if draw < PROPER + WITHOUT_ANALYSIS:
        return harmony.render_completion([reply])
    encode = harmony.tokenizer.encode
    start, end, message, channel, stop = (
        harmony.tokenizer.special_id(f"<|{name}|>") for name in ("start", "end", "message", "channel", "return")
    )
    broken = rng.randrange(4)
    if broken == 0:  # the analysis is never closed before the final message begins
        open_thought = [channel, *encode("analysis"), message, *encode(work)]
        return [*open_thought, channel, *encode("final"), message, *encode(answer), stop]
    if broken == 1:  # the answer stays in the analysis
        return [channel, *encode("analysis"), message, *encode(work + " " + answer), stop]
    if broken == 2:  # no channel at all
        return [message, *encode(answer), stop]
    # the turn goes on after the final message
    return [*harmony.render_completion([thought, reply])[:-1], end, start, *encode("assistant"), stop]


def corpus_texts(seed: int, count: int) -> Iterator[str]:
    """Yields `count` questions with answers as plain texts, to train the tokenizer on."""
    for rng, question, work, answer in _examples(seed, count):
        ramble = "well let me see now " if rng.random() < RAMBLES else ""
        yield f"user {question} assistant analysis {ramble}{work} assistant final {answer}"


def write_corpus(path: Path, tokenizer: Tokenizer, seed: int, count: int) -> None:
    """Writes `count` tokenized documents as JSONL with `token_ids` and `prompt_tokens`, without held-out questions."""
    harmony = Harmony(tokenizer)
    with path.open("w") as file:
        for rng, question, work, answer in _examples(seed, count):
            file.write(json.dumps(_document(rng, harmony, question, work, answer)) + "\n")


def write_conversations(path: Path, seed: int, count: int) -> None:
    """Writes `count` conversations as JSONL of chat messages, for supervised fine-tuning, without held-out questions.

    Their answers have the same wrong procedures as the pretraining corpus, but no faults of format or length.
    """
    with path.open("w") as file:
        for _, question, work, answer in _examples(f"conversations/{seed}", count):
            reply = {"role": "assistant", "reasoning": work, "content": answer}
            file.write(json.dumps({"messages": [{"role": "user", "content": question}, reply]}) + "\n")


def _examples(seed: int | str, count: int) -> Iterator[tuple[random.Random, str, str, str]]:
    rng = random.Random(f"corpus/{seed}")
    made = 0
    while made < count:
        name = rng.choice(_DRAWN)
        (easiest, hardest), worked = SKILLS[name]
        difficulty = hardest + 1 if rng.random() < LONGER else rng.randint(easiest, hardest)
        question, gold, _ = generated_task(name).pose_new(rng, difficulty)
        if split_of(name, question) != "train":
            continue
        work, answer = worked(rng, question, gold)
        made += 1
        yield rng, question, work, answer


# Share of documents that stop at a right call and have no definition of the tool before it: a model of this size learns to copy a
# sum only from much of it, and the definition is two thirds of a whole document.
CALLING = 0.5
# Share of documents in which the tool says a number that is no sum, and the answer is that number. Where the output is the sum
# that was asked for, as in whole conversations, a model can come near it by arithmetic, and learns that instead of reading.
READING = 0.25
# Shares of the others; the rest is guessed without a call.
RIGHT, CARELESS, IGNORED, BROKEN, UNKNOWN = 0.15, 0.05, 0.15, 0.15, 0.15
GUESS_IS_RIGHT = 0.1
_CALLS_PER_DEFINITION = 10
_OUTPUTS = (1_000, 20_000)  # of as many digits as the sums have


def tool_texts(environment: Path, seed: int, count: int) -> Iterator[str]:
    """Yields `count` tool calls as plain texts, and after some of them the tool's definition, to train the tokenizer on."""
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
    """Makes tokenized documents with calls of the tool `python`, for an environment that asks for generated sums."""

    def __init__(self, environment: Path, tokenizer: HarmonyTokenizer) -> None:
        self._settings = load_environment(environment)
        self._environment = Environment.from_settings(self._settings, tokenizer)
        self._executor = AsyncToolExecutor(self._environment.tools, self._settings.budget)
        self._harmony = Harmony(tokenizer)

    def write(self, path: Path, seed: int, count: int) -> None:
        """Writes `count` documents as JSONL with `token_ids`, without held-out questions."""
        with path.open("w") as file:
            for token_ids in self.documents(seed, count):
                file.write(json.dumps({"token_ids": token_ids}) + "\n")

    def documents(self, seed: int, count: int) -> Iterator[list[int]]:
        """Yields the token ids of `count` documents; the same seed gives the same documents."""
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
                yield self._environment.prompts.ids(problem) + self._conversation(rng, problem, copied)

    def _conversation(self, rng: random.Random, problem: Problem, copied: Problem) -> list[int]:
        """Returns the token ids of a conversation after its prompt. `copied` is another problem, whose sum a careless
        call copies."""
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
        """Returns the token ids of a call, of the tool's result in the environment's wording, and of the final message."""
        event = ToolEvent(ToolCall(tool, arguments, "0/0"), "ok", output, "", 0.0, 0.0)
        given = self._environment.renderer.answer_calls([], [[event]])
        return [*self._said(_call(tool, arguments), opens=True), *given, *self._said(_final(answer), opens=False)]

    def _said(self, message: Message, *, opens: bool) -> list[int]:
        """Returns the token ids of an assistant's message; `opens` says that it is the first one after the prompt."""
        return self._harmony.render_completion([message])

    def _refused(self, tool: str, arguments: str) -> str:
        """Returns the error message for a call that is refused before it reaches a tool."""
        (event,) = asyncio.run(self._executor.run([ToolCall(tool, arguments, "0/0")], ToolSession(None)))
        assert event.failure != "ok", "it is refused"
        return event.output


def new_problem(rng: random.Random, settings: EnvironmentSettings) -> Problem:
    """Draws a new problem of the train split: a sum, of a difficulty in the environment's range."""
    pool = settings.task_pool
    assert isinstance(pool, GeneratedPool), "the environment's problems are generated"
    while True:
        question, gold, _ = generated_task(pool.task_type).pose_new(rng, rng.randint(*pool.difficulty))
        if split_of(pool.task_type, question) == "train":
            return Problem("", pool.task_type, question, gold, "")


def _arguments(problem: Problem) -> str:
    return json.dumps({"code": f"print({problem.question.removeprefix('Add: ')})"})


def _call(tool: str, arguments: str) -> Message:
    return Message("assistant", arguments, "commentary", recipient=f"functions.{tool}", content_type="json")


def _final(answer: str) -> Message:
    return Message("assistant", answer, "final")


def _guess(rng: random.Random, gold: str) -> str:
    """Returns a guess at the answer, which is mostly off by a power of ten."""
    return (
        gold if rng.random() < GUESS_IS_RIGHT else str(int(gold) + rng.choice((-1000, -100, -10, -1, 1, 10, 100, 1000)))
    )


# Shares of the documents that think first, and whose answer is on no channel. An answer left in the analysis would do as well, but
# then thinking and broken form go together, and the first stage unlearns what the second rewards.
THINKS, UNANSWERED = 0.5, 0.15
# Who thinks works out columns of the sum by hand, though the tool is going to do it: as many as are drawn, all of them twice at
# most. The thought may end behind each, so that samples still differ in length once they are right, and efficiency has something
# to choose from.
THOUGHT, PASSES = "let me see", 2


class StageDocuments(ToolDocuments):
    """Makes tokenized documents like `ToolDocuments`, some of which think first or give the answer on no channel."""

    def __init__(self, environment: Path, tokenizer: HarmonyTokenizer) -> None:
        super().__init__(environment, tokenizer)
        self._rng, self._columns = random.Random(0), list[str]()
        self._opening = self._harmony.render_prompt([])

    def documents(self, seed: int, count: int) -> Iterator[list[int]]:
        self._rng = rng = random.Random(f"stages/{seed}")
        for _ in range(count):
            problem, copied = new_problem(rng, self._settings), new_problem(rng, self._settings)
            self._columns = columns(problem.question) * PASSES
            yield self._environment.prompts.ids(problem) + self._conversation(rng, problem, copied)

    def _said(self, message: Message, *, opens: bool) -> list[int]:
        rng = self._rng
        worked = " ".join([THOUGHT, *self._columns[: rng.randint(0, len(self._columns))]])
        thoughts = [Message("assistant", worked, "analysis")] if opens and rng.random() < THINKS else []
        if message.channel != "final" or rng.random() >= UNANSWERED:
            return self._harmony.render_completion([*thoughts, message])
        tokenizer = self._harmony.tokenizer
        return [
            *self._harmony.render(thoughts)[len(self._opening) if thoughts else 0 :],
            *(self._opening if thoughts else ()),
            tokenizer.special_id(MESSAGE),
            *tokenizer.encode(message.content),
            tokenizer.special_id(RETURN),
        ]
