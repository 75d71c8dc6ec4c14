"""Launches of other trainers: each of the hand-written ones in tests/config/launches becomes a configuration that nmoe takes, with the
values written beside it."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.commands import COMMANDS
from nmoe.config.launches.command import PROGRAMS, imported, summary
from nmoe.config.launches.convert import Imported, convert, nested, recognised
from nmoe.config.launches.read import read_launch, scalar
from nmoe.config.launches.shell import statements
from nmoe.config.launches.write import written
from nmoe.config.loader import load_run
from nmoe.errors import UserError

LAUNCHES = Path(__file__).parent / "launches"
KEYS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "trainer_keys.json").read_text())


def cases() -> Iterator[Any]:
    for file in sorted(LAUNCHES.glob("*.txt")):
        for block in file.read_text().split("=== ")[1:]:
            title, _, rest = block.partition("\n")
            command, *expected = rest.split("\n--- ")
            yield pytest.param(command, "\n".join(expected).strip(), id=f"{file.stem}: {title}")


@pytest.fixture
def at_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the launches name, as the working directory."""
    folder = tmp_path / "launches"
    shutil.copytree(LAUNCHES, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("command", "expected"), cases())
def test_a_launch_becomes_a_configuration(command: str, expected: str, at_launches: Path) -> None:
    found = imported(command)
    assert found.unknown == []
    assert found.refused == []
    wanted = tomllib.loads(expected)
    assert {key: value for key, value in flat(nested(found.values)) if key in dict(flat(wanted))} == dict(flat(wanted))
    file = at_launches / "mine.toml"
    file.write_text(written(found))
    load_run(file, COMMANDS[found.program.command])
    every_key_is_named(command, found)


def flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables with dotted keys; a table's index in an array is a part of its key."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        name = f"{above}.{key}".lstrip(".")
        tables = isinstance(below, dict) or (isinstance(below, list) and below and isinstance(below[0], dict))
        if tables and not name.endswith((".columns", "columns", "chat_template_kwargs")):
            yield from flat(below, name)
        else:
            yield name, below


def every_key_is_named(command: str, found: Imported) -> None:
    text = written(found)
    for one in read_launch(command).given.values():
        assert one.key in text, f"{one.key} is dropped"


def test_there_are_ten_launches_of_each_trainer() -> None:
    counted: dict[str, int] = {}
    for file in LAUNCHES.glob("*.txt"):
        counted[file.stem] = file.read_text().count("\n=== ") + 1
    assert counted == {"openrlhf": 10, "trl": 10, "verl": 10, "skyrl": 10, "documents": 4}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_of_a_trainer_is_in_its_catalogue(name: str) -> None:
    (program,) = [one for one in PROGRAMS if one.name == name.partition(" of ")[0]]
    assert [key for key in KEYS[name] if not program.knows(key)] == []


# The newest version of each package; older ones have some other defaults.
NEWEST = [name for name in KEYS if not name.endswith((" openrlhf 0.9.3", " skyrl_train 0.3.1"))]


@pytest.mark.parametrize("name", NEWEST)
def test_defaults_are_those_of_the_package(name: str) -> None:
    (program,) = [one for one in PROGRAMS if one.name == name.partition(" of ")[0]]
    keys = KEYS[name]
    stated = {key: as_json(value) for key, value in program.defaults.items() if key in keys}
    computed = {key: value for key, value in keys.items() if isinstance(value, str) and ("(" in value or "{" in value)}
    assert {key: value for key, value in stated.items() if value != keys[key] and key not in computed} == {}


def as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
