"""Attempts at an experiment: each gets a git branch, a tag and an entry in the research log, so that it is recorded and can be
returned to.

The conventions: branch `attempt-07-lower-lr`, tag `attempt-07-start` on the commit that is trained from, one thing changed since
the attempt before, and the results in the log afterwards.
"""

import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nmoe.config.commands import COMMANDS
from nmoe.config.kinds import command_for
from nmoe.config.loader import load_run
from nmoe.config.locate import Locator, Place
from nmoe.config.overrides import lay_over, override_document, read_override
from nmoe.errors import UserError
from nmoe.parsing import toml_of
from nmoe.runs.comparison import results_table
from nmoe.runs.directory import flat_keys
from nmoe.runs.provenance import changed_files, git, run_git
from nmoe.runs.storage import write_atomically

_NUMBER = re.compile(r"attempt-(\d+)-")
_ENTRY = re.compile(r"^## (attempt-\d+-\S+)$", re.MULTILINE)
_CONFIG = re.compile(r"^- configuration: `(.*)`$", re.MULTILINE)
_OVERRIDES = re.compile(r"^- overrides: `(.*)`$", re.MULTILINE)
_OPEN = "- results: none yet\n"
_SUBJECT_CHARACTERS = 72
# What an attempt is called, and where it writes, is no change.
_NO_CHANGE = ("run.name", "run.directory", "run.resume")


def start_attempt(
    description: str, config: Path, hypothesis: str, log: Path, overrides: Sequence[str] = ()
) -> Iterator[str]:
    """Begins an attempt: creates its branch with a commit of the new log entry, and the tag on that commit. Yields lines for the
    user. `overrides` are the settings that the attempt changes on the command line, such as `--optimizer.learning_rate=0.02`.

    Raises UserError, with nothing changed, outside a git repository, in a repository without a commit or with uncommitted changes,
    for a `config` that is not one of its files or that its command would refuse, and for a description that cannot be part of a
    branch's name.
    """
    top, log, config = _top(log), log.resolve(), config.resolve()
    hypothesis = " ".join(hypothesis.split())
    if not hypothesis:
        raise UserError("--hypothesis is empty; state the expected result of the attempt")
    if run_git(top, "rev-parse", "--verify", "--quiet", "HEAD") is None:
        raise UserError(f"{top} has no commit yet; commit the code and the configuration")
    if broken := [text for text in overrides if "\n" in text]:
        raise UserError(f"{broken[0]!r}: the log cannot hold an override of several lines; write it into {config}")
    if (
        not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", description)
        or ".." in description
        or description.endswith((".", ".lock"))
    ):
        raise UserError(
            f"{description!r}: an attempt's name is of lower-case letters, digits, - and ., such as higher-lr"
        )
    if not config.is_file() or not config.is_relative_to(top):
        raise UserError(f"{config}: no file of the repository {top}, which keeps the configuration of each attempt")
    if run_git(top, "check-ignore", "--quiet", str(config)) is not None:
        raise UserError(f"{config}: is ignored by git, so that no commit would keep it; change .gitignore")
    if run_git(top, "ls-files", "--error-unmatch", "--", str(config)) is None:
        raise UserError(f"{config}: no commit holds it; commit it first")
    outputs = Path(load_run(config, COMMANDS[command_for(config, overrides)], overrides).run.directory)
    tables = _tables(config.read_text(), str(config), overrides)
    if files := changed_files(top, outputs):
        raise UserError(f"{top} has changes that no commit holds: {', '.join(files[:5])}; commit or stash them first")
    known = _NUMBER.findall(f"{git(top, 'branch', '--all')}\n{git(top, 'tag')}")
    number = 1 + max(map(int, known), default=0)
    branch, tag = f"attempt-{number:02d}-{description}", f"attempt-{number:02d}-start"
    before, kept = _read(log), log.read_bytes() if log.exists() else None
    changes = list(_changes(top, number - 1, log, config, tables))
    entry = [
        f"## {branch}\n",
        f"- hypothesis: {hypothesis}",
        f"- configuration: `{config.relative_to(top)}`",
        *([f"- overrides: `{shlex.join(overrides)}`"] if overrides else []),
    ]
    entry += [f"- changed: {change}" for change in changes]
    home = run_git(top, "symbolic-ref", "--short", "HEAD") or git(top, "rev-parse", "HEAD")
    git(top, "switch", "--quiet", "--create", branch)
    try:
        lines = "\n".join([(before or "# Research log\n").rstrip() + "\n", *entry, _OPEN])
        write_atomically(log, lines.encode())
        _commit(top, log, hypothesis, f"attempt {number:02d} starts", [f"changed: {change}" for change in changes])
        git(top, "tag", tag)
    except BaseException:  # Ctrl-C, too
        run_git(top, "reset", "--quiet", "--", str(log))
        if run_git(top, "ls-files", "--error-unmatch", "--", str(log)) is not None:
            git(top, "checkout", "--quiet", "--", str(log))
        git(top, "checkout", "--quiet", home, "--")
        # Git may ignore the log, so that no checkout brings it back.
        if kept is None:
            log.unlink(missing_ok=True)
        elif log.read_bytes() != kept:
            write_atomically(log, kept)
        git(top, "branch", "--quiet", "-D", branch)
        raise
    yield f"branch {branch}, tag {tag}, entry in {log.relative_to(top)}"
    yield from (f"changed: {change}" for change in changes)
    if len(changes) > 1:
        yield f"warning: {len(changes)} things have changed since the attempt before, so that no difference will have one cause"
    yield "next: train with --require-clean, then nmoe runs log RUN... --lesson TEXT"


def finish_attempt(runs: Sequence[str], lesson: str, log: Path) -> Iterator[str]:
    """Writes the results of the runs into the log entry of the current branch's attempt, and commits only the log; yields a line
    for the user. Raises UserError on a branch without an entry in the log."""
    top, log = _top(log), log.resolve()
    if (branch := run_git(top, "symbolic-ref", "--short", "HEAD")) is None:
        raise UserError(f"{top}: HEAD is on no branch; git switch to the attempt's branch")
    text = _read(log) or ""
    before, found, entry = text.partition(f"## {branch}\n")
    if not found:
        raise UserError(f"{log}: has no entry for the branch {branch}; nmoe runs attempt begins one")
    entry, following, rest = _split_entry(entry)
    lesson, table = " ".join(lesson.split()), results_table(runs)
    if not lesson:
        raise UserError("--lesson is empty; state what the attempt showed")
    kept = f"{entry.replace(_OPEN, '').rstrip()}\n- lesson: {lesson}\n- results:\n\n{table}"
    write_atomically(log, f"{before}{found}{kept}{following}{rest}".encode())
    numbers = _NUMBER.match(branch)
    which = branch if numbers is None else f"attempt {numbers[1]}"
    _commit(top, log, lesson, f"{which} ends", [row.strip("| ") for row in table.splitlines()[2:]])
    yield f"results of {branch} in {log.relative_to(top)}"


def _split_entry(text: str) -> tuple[str, str, str]:
    following = _ENTRY.search(text)
    return (text, "", "") if following is None else (text[: following.start()], "\n", text[following.start() :])


def _changes(top: Path, last: int, log: Path, config: Path, tables: dict[str, Any]) -> Iterator[str]:
    """Yields the differences of these settings from the configuration of attempt number `last`, as it was at that attempt's
    start."""
    if not last:
        yield "nothing, this is the first attempt"
        return
    tag = f"attempt-{last:02d}-start"
    # The last entry alone: one before it may have overrides, and this one none.
    entry = (run_git(top, "show", f"{tag}:{log.relative_to(top)}") or "").rpartition("\n## ")[2]
    names, overrides = _CONFIG.findall(entry), shlex.split(" ".join(_OVERRIDES.findall(entry)))
    old = run_git(top, "show", f"{tag}:{names[-1]}") if names else None
    if old is None:
        raise UserError(
            f"{tag}: no such tag with an entry in {log.relative_to(top)}, so that the changes since are not known"
        )
    before, now = (_keys(each, config) for each in (_tables(old, f"{tag}: {names[-1]}", overrides), tables))
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key) and key not in _NO_CHANGE]
    for key in keys:
        yield f"`{key}` from {before.get(key, 'absent')!r} to {now.get(key, 'absent')!r}"
    if not keys:
        yield "no key of the configuration"


def _keys(tables: dict[str, Any], config: Path) -> dict[str, Any]:
    """Returns the settings by dotted keys, defaults included; without defaults if the command's settings have changed since."""
    try:
        return flat_keys(
            COMMANDS[command_for(config)].model_validate(tables).model_dump(mode="json", exclude_none=True)
        )
    except ValidationError:
        return flat_keys(tables)


def _tables(text: str, where: str, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        tables = toml_of(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}: not readable as TOML ({error})") from error
    for override in overrides:
        if (given := read_override(override)) is not None:
            lay_over(tables, Locator(Place(where), {}), *override_document(*given, override))
    return tables


def _read(log: Path) -> str | None:
    """Returns the log's text; None if there is no log yet."""
    try:
        return log.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"{log}: is not UTF-8 ({error}); convert it, or name another log by --log") from error
    except OSError as error:
        raise UserError(f"{log}: cannot be read ({error.strerror}); name another log by --log") from error


def _top(log: Path) -> Path:
    """Returns the repository of the working directory. Raises UserError if there is none, or if it does not contain the log."""
    if (top := run_git(Path.cwd(), "rev-parse", "--show-toplevel")) is None:
        raise UserError(f"{Path.cwd()}: is in no git repository, so no attempt can be begun; run git init and commit")
    if not log.resolve().is_relative_to(top):
        raise UserError(f"{log}: lies outside of the repository {top}; --log names a file in it")
    return Path(top)


def _commit(top: Path, log: Path, why: str, what: str, points: Sequence[str]) -> None:
    """Commits the log alone. The message begins with the reason, cut to the length of a subject, and the attempt's number; the
    details follow."""
    git(top, "add", "--", str(log))
    short = textwrap.shorten(why, _SUBJECT_CHARACTERS - len(what) - 3, placeholder=" ...")
    details = [*([why] if short != why else []), *points]
    body = "\n".join(f"- {point}" for point in details)
    git(top, "commit", "--quiet", "-m", f"{short} ({what})", "-m", body, "--only", "--", str(log))
