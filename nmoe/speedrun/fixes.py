"""Writes tokenizer and corpus of the base that `code_fix.toml` starts from: `python -m nmoe.speedrun.fixes`

Most documents practise one of two parts, without the definitions of the tools: writing a module of a given name, and editing a
faulty one that was read. The others are whole episodes with the environment's own prompt, which read the module, edit it, run the
tests and answer. Their edits follow habits, of which only the first one finds the fault:

    name      compares the lines with what the name says, and corrects the one that differs
    line      changes a line at random, mostly a right one
    nothing   answers without an edit

An episode whose tests fail may try once more. Some episodes end in broken form. No document has a module of the validation or eval
split.
"""

from __future__ import annotations

import difflib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from nmoe.config.packaged import ENVIRONMENTS
from nmoe.envs.environment import Environment
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks.code_fix import MODULE, PASSED, RUN_TESTS, Fault, new_module, plant, posed, results
from nmoe.envs.tasks.mutants import mutants
from nmoe.text.harmony import Harmony
from nmoe.text.renderers.harmony import render_tools
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem, ToolCall, ToolEvent

VOCABULARY = 704
DOCUMENTS = 24_000
# Shares of documents; the rest are episodes.
WRITING, EDITING = 0.25, 0.55
# Shares of the habits.
HABITS = {"name": 0.2, "line": 0.5, "nothing": 0.3}
TRIES_AGAIN, BROKEN = 0.3, 0.05
_THOUGHTS = {
    "name": "the name says",
    "line": "this line looks odd",
    "nothing": "it looks right",
}
DIRECTORY = Path("runs/code_fix")


def edit_between(before: str, after: str) -> tuple[str, str] | None:
    """Returns the arguments `old` and `new` of the edit that turns one text into the other; None if they are equal, or if `old`
    would not be unique.

    >>> edit_between("a = 1\\nb = 2\\n", "a = 1\\nb = 3\\n")
    ('b = 2', 'b = 3')
    """
    ours, theirs = before.splitlines(), after.splitlines()
    changes = [one for one in difflib.SequenceMatcher(None, ours, theirs, False).get_opcodes() if one[0] != "equal"]
    if not changes:
        return None
    first, last = min(one[1] for one in changes), max(one[2] for one in changes)
    begin, end = min(one[3] for one in changes), max(one[4] for one in changes)
    if first == last or begin == end:  # nothing to replace, or nothing to put there: with the line before
        first, begin = first - 1, begin - 1
    old, new = "\n".join(ours[first:last]), "\n".join(theirs[begin:end])
    indents = [len(line) - len(line.lstrip()) for line in (ours[first], theirs[begin])]
    if indents[0] == indents[1]:
        old, new = old[indents[0] :], new[indents[0] :]
    return (old, new) if before.count(old) == 1 else None


def new_fault(rng: random.Random) -> Fault:
    """Draws a fault of a module of the train split, which one edit corrects."""
    while True:
        fault = plant(rng, new_module(rng, rng.randint(1, 2)))
        if fault is None or split_of("code_fix", posed(fault)[0]) != "train":
            continue
        if edit_between(fault.source, fault.module.source) is not None:
            return fault


def run_tests(fault: Fault, source: str) -> str:
    """Returns what the fault's tests print for a version of its module."""
    inputs = [xs for xs, _ in fault.visible]
    for (xs, wanted), found in zip(fault.visible, results(fault.module, source, inputs), strict=True):
        if found != wanted:
            said = found.partition(": ")[2] if isinstance(found, str) else found
            return f"{xs}: {said}, not {wanted}\n"
    return f"{PASSED}\n"


def mutated(rng: random.Random, source: str) -> str:
    """Returns a version of a module with another fault."""
    kinds = mutants(source)
    return rng.choice(kinds[rng.choice(list(kinds))]).applied(source)


class FixDocuments:
    """Makes the tokenized documents of the corpus; the same seed gives the same ones."""

    def __init__(self, environment: Environment, tokenizer: Tokenizer) -> None:
        self._environment, self._harmony = environment, Harmony(tokenizer)

    def documents(self, seed: int, count: int) -> Iterator[dict[str, object]]:
        rng = random.Random(f"fixes/{seed}")
        for _ in range(count):
            fault, draw = new_fault(rng), rng.random()
            if draw < WRITING:
                prompt = self._harmony.render_prompt([Message("user", f"Write {fault.module.name}.")])
                said = self._harmony.render_completion([Message("assistant", fault.module.source, "final")])
            elif draw < WRITING + EDITING:
                prompt, said = self._practice(fault)
            else:
                problem = Problem("", "code_fix", *posed(fault)[:2], "")
                prompt, said = self._environment.prompts.ids(problem), self._episode(rng, fault)
            yield {"token_ids": prompt + said, "prompt_tokens": len(prompt)}

    def _practice(self, fault: Fault) -> tuple[list[int], list[int]]:
        """Returns the reading of a faulty module without the environment's prompt, and the right edit."""
        read = Message("tool", fault.source, "commentary", recipient="assistant", name="functions.read")
        asked = Message("user", posed(fault)[0])
        prompt = self._harmony.render_prompt([asked, _call("read", {"path": MODULE}), read])
        edit = self._edit(random.Random(0), "name", fault, fault.source)
        assert edit is not None, "new_fault draws such ones alone"
        arguments = {"path": MODULE, "old": edit[0], "new": edit[1]}
        return prompt, self._harmony.render_completion([_thought("name"), _call("edit", arguments)])

    def _episode(self, rng: random.Random, fault: Fault) -> list[int]:
        self._ids: list[int] = []
        source = fault.source
        self._called("read", {"path": MODULE}, source)
        habits = rng.choices(list(HABITS), list(HABITS.values()), k=2)
        for attempt, habit in enumerate(habits):
            edit = self._edit(rng, habit, fault, source)
            if edit is None:
                break
            old, new = edit
            source = source.replace(old, new)
            self._called("edit", {"path": MODULE, "old": old, "new": new}, f"edited {MODULE}", habit)
            found = run_tests(fault, source)
            self._called("python", {"code": RUN_TESTS}, found)
            if found == f"{PASSED}\n" or attempt or rng.random() >= TRIES_AGAIN:
                break
        thought = [_thought("nothing")] if edit is None else []
        ids = self._harmony.render_completion([*thought, Message("assistant", "Done.", "final")])
        return self._ids + (ids[1:] if rng.random() < BROKEN else ids)

    def _edit(self, rng: random.Random, habit: str, fault: Fault, source: str) -> tuple[str, str] | None:
        """Returns the edit of a habit, None for none."""
        right = fault.module.source
        if habit == "nothing" or source == right:
            return None
        return edit_between(source, right if habit == "name" else mutated(rng, source))

    def _called(self, tool: str, arguments: dict[str, str], output: str, habit: str = "") -> None:
        thoughts = [_thought(habit)] if habit else []
        event = ToolEvent(ToolCall(tool, "", "0/0"), "ok", output, "", 0.0, 0.0)
        self._ids += self._harmony.render_completion([*thoughts, _call(tool, arguments)])
        self._ids += self._environment.renderer.answer_calls([], [[event]])


def _thought(habit: str) -> Message:
    return Message("assistant", _THOUGHTS[habit], "analysis")


def _call(tool: str, arguments: dict[str, str]) -> Message:
    text = json.dumps(arguments)
    return Message("assistant", text, "commentary", recipient=f"functions.{tool}", content_type="json")


def texts(seed: int, count: int) -> Iterator[str]:
    """Yields modules, faults, edits and results as plain texts, to train the tokenizer on."""
    rng = random.Random(f"texts/{seed}")
    for _ in range(count):
        fault = new_fault(rng)
        edit = edit_between(fault.source, fault.module.source)
        assert edit is not None, "new_fault draws such ones alone"
        arguments = json.dumps({"path": MODULE, "old": edit[0], "new": edit[1]})
        yield f"Fix {fault.module.name}."
        yield from (
            "Write ",
            "Correct ",
            "Done.",
            "analysis",
            "final",
            "commentary",
            "assistant",
            "user",
            "json",
            PASSED,
        )
        for tool in ("read", "edit", "python"):
            yield f"functions.{tool}"
            yield f"commentary to=functions.{tool} json"
        yield f'{arguments}{{"code": "{RUN_TESTS}"}}{{"path": "{MODULE}"}}'
        yield f"{fault.source}{run_tests(fault, fault.source)}edited {MODULE}"
        yield f"error (tool_error): the text stands 2 times in {MODULE}, not once"
        yield from _THOUGHTS.values()


def write(directory: Path, seed: int = 0, documents: int = DOCUMENTS) -> None:
    """Writes `tokenizer/` and `corpus.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = ENVIRONMENTS / "code_fix.toml"
    tools = Environment.from_toml(path, Tokenizer.train([], 264)).tools.values()
    shown = [render_tools([tool.definition for tool in tools])] * (documents // 200)
    tokenizer = Tokenizer.train([*texts(seed, documents // 20), *shown], VOCABULARY)
    tokenizer.save(directory / "tokenizer")
    made = FixDocuments(Environment.from_toml(path, tokenizer), tokenizer).documents(seed, documents)
    with (directory / "corpus.jsonl").open("w") as file:
        for document in made:
            file.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
