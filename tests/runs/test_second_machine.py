"""Packages and evaluations of a second machine, behind a command that stands in for ssh."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from test_sync import fake_ssh, git, needs_rsync, work

from nmoe.cli import main
from nmoe.errors import UserError
from nmoe.runs.second_machine import (
    StillRunningError,
    compare_packages,
    fetch_evaluation,
    start_evaluation,
)
from nmoe.runs.sync import sync

__all__ = ["work"]

pytestmark = needs_rsync
TARGET = "spare:far $(touch bad) 'away"
DIRECTORY = TARGET.partition(":")[2]
# Evaluates in nmoe's place: says its arguments, waits for a file, writes its result.
FAKE = """
import pathlib, sys, time
print("asked", sys.argv[1:], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_bytes(b'{"result": "\\xc3\\xbc"}')
print("accuracy 50%")
sys.exit(int(pathlib.Path("go").read_text() or 0))
"""


@pytest.fixture
def there(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The target directory, to which a repository with a stand-in for nmoe was sent; in its PATH is no tmux."""
    (work / "nmoe").mkdir()
    (work / "nmoe/__main__.py").write_text(FAKE)
    (work / "nmoe/__init__.py").touch()
    git(work, "add", ".")
    git(work, "commit", "--quiet", "-m", "nmoe")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "mkdir", "cat", "rm", "mv", "tail", "dirname", "nohup", "git", "rsync", "sha256sum"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    python3 = tools / "python3"
    python3.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python3.chmod(0o755)
    fake_ssh(tmp_path, monkeypatch, path=tools)
    list(sync(TARGET, [], dry_run=False))
    return tmp_path / "home" / DIRECTORY


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Makes Python there see other versions of packages."""
    for name, one in versions.items():
        about = tmp_path / "other" / f"{name}-{one}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {one}\n")
    python3 = tmp_path / "tools/python3"
    python3.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/other:$PYTHONPATH" exec {sys.executable} "$@"\n')


def ended(there: Path, name: str) -> None:
    deadline = time.monotonic() + 120
    while not (there / "evals" / name / "exit").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_packages_that_differ_are_named_with_the_command(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = compare_packages(TARGET)
    assert line.endswith("packages have the same versions there")
    installed(tmp_path, monkeypatch, numpy="1.0", torch=version("torch").split("+")[0] + "+cu999")
    (line,) = compare_packages(TARGET)
    here = version("numpy")
    assert line.startswith(f"warning: other packages: numpy 1.0 there, {here} here; to make them equal: ")
    assert line.endswith(f" -m pip install numpy=={here}'")
    assert list(compare_packages(str(tmp_path))) == []


# documented: nmoe runs sync spare:work runs/base --eval "runs/base sort" --name base-sort
# documented: nmoe runs sync spare:work --fetch base-sort
def test_an_evaluation_is_started_and_its_result_fetched(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["nmoe", "runs", "sync", TARGET, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    start = ("runs", "--eval", "runs/base 'x y; touch bad' $(touch bad)", "--name", "first")
    code, said = verb(*start)
    assert (code, "evaluation first started by nohup" in said) == (0, True)
    code, said = verb(*start)
    assert (code, "spare: the evaluation first is running; fetch its result: nmoe runs sync" in said) == (2, True)
    code, said = verb("--fetch", "first")
    assert (code, "the evaluation first has not ended" in said, "tail -f" in said) == (1, True, True)
    (there / "go").touch()
    ended(there, "first")
    code, said = verb("--fetch", "first")
    assert (code, said.splitlines()[-2:]) == (0, ["accuracy 50%", "evals/spare/first/result.json"])
    for file in ("result.json", "log.txt"):
        assert Path("evals/spare/first", file).read_bytes() == (there / "evals/first" / file).read_bytes()
    assert Path("evals/spare/first/result.json").read_bytes() == b'{"result": "\xc3\xbc"}'
    asked = ["eval", "runs/base", "x y; touch bad", "$(touch", "bad)", "--results", "evals/first/problems"]
    assert Path("evals/spare/first/log.txt").read_text().startswith(f"asked {asked}"[:-1])
    code, said = verb(*start)
    assert (code, "the evaluation first has ended" in said, "give another --name" in said) == (2, True, True)
    assert not list(tmp_path.rglob("bad"))
    assert verb("--fetch", "x", "runs")[0] == verb("--eval", "a", "--name", "b", "--dry-run")[0] == 2


def test_in_tmux_where_there_is_one(there: Path, tmp_path: Path) -> None:
    tmux = tmp_path / "tools/tmux"
    tmux.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/tmux"\nshift 4\n"$@" &\n')
    tmux.chmod(0o755)
    (there / "go").touch()
    lines = list(start_evaluation(TARGET, "runs/base sort", "one"))
    assert "evaluation one started in the tmux session nmoe-one" in lines
    ended(there, "one")
    script = f"{there}/evals/one/run.sh"
    assert (tmp_path / "tmux").read_text().splitlines() == ["new-session", "-d", "-s", "nmoe-one", "sh", script]
    tmux.write_text("#!/bin/sh\nexit 1\n")
    assert "evaluation two started by nohup, because no tmux runs there" in list(start_evaluation(TARGET, "a b", "two"))
    ended(there, "two")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
def test_tmux_keeps_it(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose terminal nothing holds open is ended by tmux."""
    (tmp_path / "tools/tmux").symlink_to(str(shutil.which("tmux")))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))  # a server of its own, which ends with its session
    list(start_evaluation(TARGET, "runs/base sort", "one"))
    deadline = time.monotonic() + 120
    while not (there / "evals/one/log.txt").exists() or not (there / "evals/one/log.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (there / "go").touch()
    ended(there, "one")
    assert list(fetch_evaluation(TARGET, "one"))[-1] == "evals/spare/one/result.json"


def test_one_that_failed_or_was_killed_says_so_and_starts_again(there: Path) -> None:
    (there / "go").write_text("3")
    list(start_evaluation(TARGET, "runs/base sort", "one"))
    ended(there, "one")
    kept = there / "evals/one/problems"
    kept.write_text("kept")
    with pytest.raises(
        UserError, match=r"one ended with exit code 3: asked .*; accuracy 50%; its log: .*; start it again"
    ):
        list(fetch_evaluation(TARGET, "one"))
    list(start_evaluation(TARGET, "runs/base sort", "one"))
    ended(there, "one")
    assert kept.read_text() == "kept"
    # As if the machine had gone down: no such process, and no exit code.
    gone = subprocess.Popen(["true"])
    gone.wait()
    (there / "evals/one/pid").write_text(str(gone.pid))
    (there / "evals/one/exit").unlink()
    with pytest.raises(UserError, match="the evaluation one killed") as told:
        list(fetch_evaluation(TARGET, "one"))
    assert not isinstance(told.value, StillRunningError)
    assert not Path("evals").exists()


def test_what_is_missing_there_is_one_message(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, python: str | None = None) -> None:
        with pytest.raises(UserError, match=match):
            list(start_evaluation(TARGET, "runs/base sort", "one", python))
        assert not (there / "evals").exists()

    refused(r"spare: no gone there; make one: .* -m venv \.venv && \.venv/bin/pip install -e \.", python="gone")
    with pytest.raises(UserError, match="no evaluation one was started in far "):
        list(fetch_evaluation(TARGET, "one"))
    (there / "code/nmoe").rename(there / "code/other")
    python3 = tmp_path / "tools/python3"
    # Without site-packages there is neither nmoe nor any of its packages.
    python3.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    refused("spare: .* has no nmoe, and .*/code holds none; name one that has it by --python")
    (there / "code/other").rename(there / "code/nmoe")
    refused(
        f"packages are missing: .*torch missing there, {version('torch').split('+')[0]} here.* -m pip install .*torch=="
    )
    python3.unlink()
    refused("spare: no Python there; make one: ")
    (line,) = compare_packages(TARGET)
    assert line.startswith("warning: spare: no Python there; make one: ")
    (tmp_path / "tools/rsync").unlink()
    for dry_run in (True, False):
        with pytest.raises(UserError, match=r"^spare: rsync is not installed there; run: .*apt-get install rsync'$"):
            list(sync(TARGET, [Path("data")], dry_run=dry_run))
    assert not (there / "data").exists()


@pytest.mark.parametrize(
    ("target", "arguments", "name", "said"),
    [
        ("far", "a b", "one", "far: is a directory of this machine"),
        ("spare:far", "a 'b", "one", "No closing quotation; quote it as for a shell"),
        ("spare:far", "a b --out=x", "one", "--out=x: the results lie in evals/one there; leave it out"),
        ("spare:far", "a b", None, "--name : give the evaluation a name of letters"),
        ("spare:far", "a b", "../one", "--name ../one: give the evaluation a name of letters"),
    ],
)
def test_refusals(target: str, arguments: str, name: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(start_evaluation(target, arguments, name))
