"""`nmoe config import`: reads a launch, converts it, checks the result, and returns the text to print."""

from __future__ import annotations

from collections.abc import Iterator

from nmoe.config.launches import openrlhf, prime_rl, skyrl, slime, trl, verl
from nmoe.config.launches.convert import Imported, convert, recognised
from nmoe.config.launches.read import read_launch
from nmoe.config.launches.rows import Program
from nmoe.config.launches.write import LISTS, check, lines_of

PROGRAMS: tuple[Program, ...] = (
    *trl.PROGRAMS,
    *openrlhf.PROGRAMS,
    *verl.PROGRAMS,
    *skyrl.PROGRAMS,
    *slime.PROGRAMS,
    *prime_rl.PROGRAMS,
)
"""The programs whose launches can be read, in the order of messages and of the reference."""


def imported(text: str, program: str | None = None) -> Imported:
    """Returns a launch (a command, or the file that has it) in nmoe's keys, checked. Raises UserError if it cannot be read."""
    launch = read_launch(text)
    found = convert(launch, recognised(launch, PROGRAMS, program))
    check(found)
    return found


def summary(found: Imported) -> Iterator[str]:
    """Yields the lines to look at first, for stderr: values to fill in, refusals, unknown keys, the lengths of other lists."""
    lists = lines_of(found)
    for name in ("to_fill", "refused", "unknown"):
        for line in lists.get(name, ()):
            yield f"{LISTS[name].partition(':')[0].lower()}: {line}"
    yield (
        f"{found.program.name}: {len(found.values)} values for `nmoe {found.program.command}`; "
        f"{len(lists.get('differs', ()))} points learn otherwise, "
        f"{len(lists.get('without', ()))} keys have no counterpart, {len(found.unknown)} are unknown; the comments of the "
        f"TOML list them"
    )
