"""Writes docs/requirements.md from docs/requirements.toml: python scripts/requirements_page.py

The file has a table for each line of the source documents: its number, what it asks, its state, and the evidence. `faults` names
numbers that are missing or doubled, and evidence that is gone; a test requires that there are none.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from nmoe.cli.command import app
from nmoe.config.packaged import find_configuration, packaged_environment
from nmoe.errors import UserError

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "docs/requirements.toml", ROOT / "docs/requirements.md"
NUMBERS = range(1, 255)

STATES = {
    "done": "the code does it, and the evidence shows it",
    "open": "a part is missing, which the line names",
    "blocked": "the rest needs something that was not there: the line names it",
    "refused": "nmoe does not do it on purpose, and the line says why",
}
EVIDENCE = ("tests", "commands", "settings", "files", "pages")

HEAD = """# Requirements

Five documents began this project. Together they ask for reinforcement learning from verifiable rewards, without a stage of
fine-tuning before it: environments that bind problems, tools, format and verifier; a curriculum from format to efficiency;
verifiers of steps, and self-play that makes its data; an engine seam in which tokens and log-probabilities are never silently
wrong; the whole pipeline from tokenizer to served model; the monitoring and the discipline of a real training campaign; and
mixtures of experts with expert parallelism on many GPUs.

| document | asks for | lines |
|---|---|---|
{sources}

Each of its {count} lines is below, in words of this project. Where documents contradict each other, [decisions](decisions.md) and
these choices hold: no SFT by default, Harmony as the default format, TOML, `dr_grpo` as the default advantage, nmoe's engine as the
default, no requirement of a certain GPU.

| state | meaning | lines |
|---|---|---|
{states}

`python scripts/requirements_page.py` writes this page from `docs/requirements.toml`. A test fails where a test, command, setting,
file or page that a line names is gone.

| topic | done | open | blocked | refused |
|---|---|---|---|---|
{topics}
"""


def read(source: Path = SOURCE) -> dict[str, Any]:
    """Returns the file: `documents`, and `topics`, each with its `lines`."""
    return tomllib.loads(source.read_text())


def page(content: Mapping[str, Any]) -> str:
    """Returns the page of a file's content."""
    topics = content["topics"]
    lines = [line for topic in topics for line in topic["lines"]]
    by_source = Counter(line["source"] for line in lines)
    head = HEAD.format(
        count=len(lines),
        sources="\n".join(f"| {d['name']} | {d['asks']} | {by_source[d['id']]} |" for d in content["documents"]),
        states="\n".join(
            f"| {state} | {meaning} | {sum(line['state'] == state for line in lines)} |"
            for state, meaning in STATES.items()
        ),
        topics="\n".join(_counted(topic) for topic in topics),
    )
    return "\n".join([head, *(_section(topic) for topic in topics)])


def _counted(topic: Mapping[str, Any]) -> str:
    cells = []
    for state in STATES:
        numbers = [line["number"] for line in topic["lines"] if line["state"] == state]
        cells.append(str(len(numbers)) if state == "done" else ", ".join(map(str, numbers)))
    return f"| [{topic['title']}](#{slug(topic['title'])}) | {' | '.join(cells)} |"


def _section(topic: Mapping[str, Any]) -> str:
    rows = [f"| {line['number']} | {line['asks']} | {_state(line)} | {_shown(line)} |" for line in topic["lines"]]
    return "\n".join([f"## {topic['title']}\n", "| | asks for | state | evidence |", "|---|---|---|---|", *rows, ""])


def _state(line: Mapping[str, Any]) -> str:
    note = line.get("note", "")
    if line["state"] == "done":
        return f"done; {note}" if note else "done"
    return f"**{line['state']}**: {note}"


def _shown(line: Mapping[str, Any]) -> str:
    shown = [f"`{name}`" for name in line.get("tests", [])]
    shown += [f"`{command}`" for command in line.get("commands", [])]
    shown += [f"[`{key}`](reference/configuration.md)" for key in line.get("settings", [])]
    shown += [f"`{file}`" for file in line.get("files", [])]
    shown += [f"[{name.partition('#')[0].removesuffix('.md')}]({name})" for name in line.get("pages", [])]
    return "; ".join(shown)


def faults(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each number that is missing or doubled, each line that lacks what its state needs, and each piece of
    evidence that is gone."""
    lines = [line for topic in content["topics"] for line in topic["lines"]]
    counted = Counter(line["number"] for line in lines)
    yield from (f"{number}: missing" for number in NUMBERS if number not in counted)
    yield from (f"{number}: {times} times" for number, times in counted.items() if times > 1)
    yield from (f"{number}: no line of the documents" for number in counted if number not in NUMBERS)
    documents = {document["id"] for document in content["documents"]}
    for line in lines:
        yield from (f"{line['number']}: {fault}" for fault in _faults_of(line, documents))


def _faults_of(line: Mapping[str, Any], documents: set[str]) -> Iterator[str]:
    if unknown := line.keys() - {"number", "source", "asks", "state", "note", *EVIDENCE}:
        yield f"unknown keys {sorted(unknown)}"
    if line["state"] not in STATES:
        yield f"state {line['state']!r} is none of {', '.join(STATES)}"
    if line["source"] not in documents:
        yield f"no document {line['source']!r}"
    if line["state"] == "done" and not any(line.get(kind) for kind in EVIDENCE):
        yield "done without evidence"
    if line["state"] != "done" and not line.get("note"):
        yield f"{line['state']} without a reason"
    for kind, gone in (
        ("test", [name for name in line.get("tests", []) if not has_test(name)]),
        ("command", [text for text in line.get("commands", []) if not has_command(text)]),
        ("setting", [key for key in line.get("settings", []) if key not in settings()]),
        ("file", [name for name in line.get("files", []) if not (ROOT / name).exists()]),
        ("page", [name for name in line.get("pages", []) if not has_page(name)]),
    ):
        yield from (f"{kind} {name!r} is gone" for name in gone)


def has_test(name: str) -> bool:
    """Returns whether a test exists: `tests/rl/test_ppo.py::test_name`, or with a class between the two. Nothing is imported."""
    file, _, test = name.partition("::")
    return (ROOT / file).is_file() and test in _tests(ROOT / file)


@cache
def _tests(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(file.read_text()).body
    found = {node.name for node in body if isinstance(node, functions)}
    for kind in body:
        if isinstance(kind, ast.ClassDef):
            found |= {f"{kind.name}::{node.name}" for node in kind.body if isinstance(node, functions)}
    return found


@cache
def has_command(text: str) -> bool:
    """Returns whether the verb of a command, its options and the packaged names after it exist. A command of Python or of a shell
    needs its file."""
    words = text.split()
    if words[0] == "torchrun" or words[:2] == ["python", "-m"]:
        module = words[words.index("-m") + 1]
        words = ["nmoe", *module.split(".")[1:], *words[words.index("-m") + 2 :]]
    if words[0] != "nmoe":
        return (ROOT / words[words[0] == "python"]).is_file()
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    named = {word.partition("=")[0] for word in rest if word.startswith("--")}
    known = named <= options | {f"--{key}" for key in settings()}
    return not hasattr(command, "commands") and known and all(_is_packaged(word) for word in rest[:1])


def _is_packaged(word: str) -> bool:
    """Returns whether a command's first argument is packaged, a placeholder, a path or an option."""
    if word.startswith("-") or not re.fullmatch(r"[a-z0-9_.]+", word):
        return True
    for find in (find_configuration, packaged_environment):
        try:
            find(word)
        except UserError:
            continue
        return True
    return False


@cache
def settings() -> frozenset[str]:
    """Returns the keys of the reference of settings, with their tables: `algorithm.clip_low`."""
    found, table = set(), ""
    for row in (ROOT / "docs/reference/configuration.md").read_text().splitlines():
        if heading := re.match(r"###? `\[+([\w.]+)\]+`", row):
            table = heading[1]
        elif row.startswith("#"):
            table = ""
        elif key := re.match(r"\| `(\w+)` \|", row):
            found.add(f"{table}.{key[1]}" if table else key[1])
    return frozenset(found)


def has_page(name: str) -> bool:
    """Returns whether a page of docs/ and the heading behind its `#` exist."""
    file, _, anchor = name.partition("#")
    path = ROOT / "docs" / file
    return path.is_file() and (not anchor or anchor in _headings(path))


@cache
def _headings(path: Path) -> frozenset[str]:
    return frozenset(slug(found) for found in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE))


def slug(heading: str) -> str:
    """Returns the anchor that the book gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def main(arguments: Sequence[str] = ()) -> int:
    content = read()
    found = list(faults(content))
    for fault in found:
        print(fault, file=sys.stderr)
    if found:
        return 1
    PAGE.write_text(page(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
