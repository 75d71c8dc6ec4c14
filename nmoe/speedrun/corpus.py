"""The speedrun's pretraining corpus: conversations with poor skills and loose formatting.

Every document is a question and an answer in Harmony, or close to it. Three kinds of fault are planted, each at a rate set
below, so that reinforcement learning has something to improve:

- skill: a minority of documents follows the right procedure, the others a wrong one (copying instead of reversing, forgetting the
  carry, sorting downwards);
- format: messages lack their end, their channel or their final answer;
- length: some documents ramble before they reason.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import pose_new
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

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
    """Adds column by column from the right: "7+5=12 4+8+1=13" and "132". Without carries: "7+5=12 4+8=12" and "122"."""
    steps, digits, carry = [], "", 0
    width = max(len(left), len(right))
    for a, b in zip(reversed(left.zfill(width)), reversed(right.zfill(width)), strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}" + ("+1" if carry else "") + f"={total}")
        digits = str(total % 10) + digits
        carry = total // 10 if carries else 0
    last = total // 10
    return " ".join(steps), (str(last) if last else "") + digits


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
    """The conversation as a document whose question is read but not learned, with its answer in one of several forms, of which only
    the first two parse."""
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
    """Plain text of `count` questions and answers, for training the tokenizer."""
    for rng, question, work, answer in _examples(seed, count):
        ramble = "well let me see now " if rng.random() < RAMBLES else ""
        yield f"user {question} assistant analysis {ramble}{work} assistant final {answer}"


def write_corpus(path: Path, tokenizer: Tokenizer, seed: int, count: int) -> None:
    """Writes `count` documents as JSONL with `token_ids` and `prompt_tokens`. Held-out questions never occur."""
    harmony = Harmony(tokenizer)
    with path.open("w") as file:
        for rng, question, work, answer in _examples(seed, count):
            file.write(json.dumps(_document(rng, harmony, question, work, answer)) + "\n")


def write_conversations(path: Path, seed: int, count: int) -> None:
    """Writes `count` conversations as chat messages, one JSON object per line, for supervised fine-tuning. They have the skill
    faults of the corpus, but none of format or length. Held-out questions never occur."""
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
        question, gold, _ = pose_new(name, rng, difficulty)
        if split_of(name, question) != "train":
            continue
        work, answer = worked(rng, question, gold)
        made += 1
        yield rng, question, work, answer
