"""Lists the packaged environments, configurations and data preparations, and shows the text of one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nmoe.config.loader import load_environment
from nmoe.config.packaged import (
    Packaged,
    packaged_configuration,
    packaged_configurations,
    packaged_environment,
    packaged_environments,
    packaged_pipeline,
    packaged_pipelines,
    packaged_preparation,
    packaged_preparations,
)
from nmoe.errors import UserError

_PATH = re.compile(r'\b(path\s*=\s*)"([^"\n]+)"')


def list_environments() -> Iterator[str]:
    """Returns the lines of a table of the packaged environments: name, version, format, type of task pool, package, description.

    An environment that cannot be read is listed with the reason.
    """
    return columns(
        [("NAME", "VERSION", "FORMAT", "POOL", "FROM", "DESCRIPTION"), *map(_environment, packaged_environments())]
    )


def list_configurations() -> Iterator[str]:
    """Returns the lines of a table of the packaged configurations, preparations and pipelines: name, command, package, description.
    Command and description come from the file's leading comment: the command line in it, and its first sentence."""
    listed = [*packaged_configurations(), *packaged_preparations(), *packaged_pipelines()]
    return columns([("NAME", "COMMAND", "FROM", "DESCRIPTION"), *map(_configuration, listed)])


def show_configuration(named: str) -> str:
    """Returns the text of a packaged configuration, preparation or pipeline, so that a copy works in any directory: a relative path
    to an environment is replaced by the environment's name or an absolute path. Raises UserError if there is none of this name."""
    name = named.removesuffix(".toml")
    for known, find in ((packaged_preparations, packaged_preparation), (packaged_pipelines, packaged_pipeline)):
        if any(one.name == name for one in known()):
            return _from_anywhere(find(named))
    return _from_anywhere(packaged_configuration(named))


def show_environment(named: str) -> str:
    """Returns the text of a packaged environment, so that a copy works in any directory: data paths are made absolute. Raises
    UserError if there is none of this name."""
    return _from_anywhere(packaged_environment(named))


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table: each column as wide as its widest cell, except the last."""
    rows = list(rows)
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()


def _environment(one: Packaged) -> tuple[str, ...]:
    try:
        if one.path is None:
            raise UserError(one.problem)
        settings = load_environment(one.path)
    except UserError as error:
        return one.name, "-", "-", "-", one.package, f"cannot be used: {'; '.join(str(error).splitlines())}"
    return one.name, settings.version, settings.format, settings.task_pool.type, one.package, settings.description


def _configuration(one: Packaged) -> tuple[str, ...]:
    try:
        if one.path is None:
            raise UserError(one.problem)
        head = _text(one.path).partition("\n[")[0]
    except UserError as error:
        return one.name, "-", one.package, f"cannot be used: {error}"
    comment = [line.removeprefix("#") for line in head.splitlines() if line.startswith("#")]
    text = " ".join(line.strip() for line in comment if not line.startswith("   "))
    command = re.search(rf"\bnmoe [a-z ]+? {re.escape(one.name)}(?![\w/])", head)
    return one.name, command[0] if command else "-", one.package, re.split(r"\.(?: |$)", text)[0]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _from_anywhere(file: Path) -> str:
    names = {one.path.resolve(): one.name for one in packaged_environments() if one.path is not None}

    def written(match: re.Match[str]) -> str:
        path = (file.parent / match[2]).resolve()
        return f'{match[1]}"{names.get(path, path)}"' if path.exists() else match[0]

    return _PATH.sub(written, _text(file))
