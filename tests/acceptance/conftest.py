"""Drives the `nmoe` command as a user would: in a process of its own, or in this one where only the start-up would differ."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked, Result

from nmoe import cli


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Result]:
    """Runs `nmoe` in a process of its own, in `tmp_path`."""

    def command(*arguments: str | Path, stdin: str = "") -> Result:
        return Forked(tmp_path, *arguments, stdin=stdin).ended()

    return command


@pytest.fixture
def nmoe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `nmoe` in this process, in `tmp_path`."""

    def nmoe(*arguments: str | Path, stdin: str = "") -> Result:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["nmoe", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capfd.readouterr()
        return Result(exit_.value.code, captured.out, captured.err)

    return nmoe
