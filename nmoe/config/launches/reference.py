"""Renders the catalogues as Markdown: docs/reference/imports.md, which `python scripts/reference_pages.py` writes."""

from __future__ import annotations

from collections.abc import Iterator

from nmoe.config.launches.command import PROGRAMS
from nmoe.config.launches.rows import Program, Row

_HEAD = """# Keys of other trainers

What [`nmoe config import`](cli.md#nmoe-config-import) makes of the keys of TRL, OpenRLHF, verl, SkyRL, slime and prime-rl.
`python scripts/reference_pages.py` writes this page from the tables that the command reads. `*` stands for any ending. A default
of the other trainer is written where it is another than nmoe's. The guide is [coming from another
trainer](../guides/other_trainers.md).
"""


def page() -> str:
    """Returns the whole page: for each program the keys that have a counterpart, and those that have none."""
    return "\n".join([_HEAD, *(part for program in PROGRAMS for part in _program(program))])


def _program(program: Program) -> Iterator[str]:
    yield f"## {program.name}\n"
    yield f"Becomes a configuration for `nmoe {program.command}`. Keys and defaults: {program.source}.\n"
    for text in program.always:
        yield f"Always otherwise: {text}.\n"
    yield "| keys | keys of nmoe | how |\n|---|---|---|"
    for row in program.rows:
        if row.convert is not None and row.theirs:
            yield f"| {_keys(row.theirs)} | {_keys(row.ours) or 'none'} | {_cell(row.text)} |"
    yield "\n| keys without a counterpart | why |\n|---|---|"
    for reason, rows in _by_reason(program).items():
        yield f"| {', '.join(_keys(row.theirs) for row in rows)} | {_cell(reason)} |"
    yield ""
    if program.aliases:
        spelled = ", ".join(f"`{old}`: `{new}`" for old, new in program.aliases.items() if old != new)
        yield f"Other spellings: {spelled}.\n"


def _by_reason(program: Program) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in program.rows:
        if row.convert is None:
            found.setdefault(row.text, []).append(row)
    return found


def _keys(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
