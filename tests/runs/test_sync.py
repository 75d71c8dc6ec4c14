"""Copies to a directory, and to a host behind a command that stands in for ssh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe.cli import main
from nmoe.errors import InfrastructureError, UserError
from nmoe.runs.directory import RunDirectory
from nmoe.runs.sync import sync

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="no rsync here")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a run, whose metrics lie on another disk, and a data file; the process runs in it."""
    path = tmp_path / "work"
    (path / "data").mkdir(parents=True)
    monkeypatch.chdir(path)
    Path("mine.py").write_text("x = 1\n")
    Path(".gitignore").write_text("runs\ndata\n")
    git(path, "init", "--quiet")
    git(path, "add", ".")
    git(path, "commit", "--quiet", "-m", "mine")
    Path("data/pool one.jsonl").write_text("{}\n")
    RunDirectory.create(Path("runs/base"), "[run]\n", {}, resume=False).close()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "metrics.jsonl").write_text('{"step": 1}\n')
    Path("runs/base/metrics.jsonl").symlink_to(tmp_path / "scratch" / "metrics.jsonl")
    Path("runs/base/checkpoints/step_000001").mkdir()
    Path("runs/base/checkpoints/step_000001/adapter_model.safetensors").write_bytes(b"\x00weights")
    Path("runs/base/checkpoints/best").symlink_to("step_000001")
    return path


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str = "", path: Path | None = None) -> None:
    """A command in ssh's place, which runs what it is given here, in a home of its own, and notes the host. `path` is the PATH
    there."""
    (tmp_path / "home").mkdir(exist_ok=True)
    script = tmp_path / "fake ssh"
    lines = [
        "#!/bin/sh",
        f'echo "$1" >> "{tmp_path}/hosts"',
        "shift",
        f'cd "{tmp_path}/home"',
        f'export PATH="{path or "$PATH"}"',
        'sh -c "$*"',
        "ended=$?",
        then,
    ]
    script.write_text("\n".join([*lines, "exit $ended\n"]))
    script.chmod(0o755)
    monkeypatch.setenv("RSYNC_RSH", f"'{script}'")


def check_copy(copy: Path, work: Path) -> None:
    assert (copy / "data" / "pool one.jsonl").read_text() == "{}\n"
    assert (copy / "runs/base/metrics.jsonl").read_text() == '{"step": 1}\n'
    assert not (copy / "runs/base/metrics.jsonl").is_symlink(), "its disk is not there"
    assert (copy / "runs/base/checkpoints/best").readlink() == Path("step_000001")
    assert (copy / "runs/base/checkpoints/best/adapter_model.safetensors").read_bytes() == b"\x00weights"
    assert git(copy / "code", "rev-parse", "HEAD") == git(work, "rev-parse", "HEAD")
    assert (copy / "code/mine.py").read_text() == Path("mine.py").read_text()


@needs_rsync
@pytest.mark.parametrize("host", [False, True])
def test_code_runs_and_data_arrive_and_arrive_again(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    target, copy = (
        ("spare:far away", tmp_path / "home" / "far away") if host else (str(tmp_path / "far"), tmp_path / "far")
    )
    paths = [Path("runs"), Path("data/pool one.jsonl")]
    would = list(sync(target, paths, dry_run=True))
    assert would[0].startswith(f"would send commit {git(work, 'rev-parse', 'HEAD')} to ")
    assert "would copy runs/base/metrics.jsonl" in would
    assert not copy.exists()
    lines = list(sync(target, paths, dry_run=False))
    check_copy(copy, work)
    files = [file for file in copy.rglob("*") if file.is_file() and "code" not in str(file.relative_to(copy).parts[0])]
    assert lines[1].startswith(f"{len([file for file in files if 'best' not in file.parts])} files (")
    assert lines[1].endswith("their SHA-256 sums the same there")
    Path("mine.py").write_text("x = 2\n")
    git(work, "commit", "--quiet", "-am", "two")
    (copy / "data/pool one.jsonl").write_text("xx\n")  # of the same size: only a sum tells
    list(sync(target, paths, dry_run=False))
    check_copy(copy, work)
    assert (tmp_path / "hosts").exists() == host


@needs_rsync
def test_what_did_not_arrive_whole_is_told(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, then='[ -f "far/data/pool one.jsonl" ] && echo rot > "far/data/pool one.jsonl"')
    with pytest.raises(
        InfrastructureError, match=r"the copy differs from the original: spare: .*data/pool one.jsonl: FAILED"
    ):
        list(sync("spare:far", [Path("data")], dry_run=False))


@needs_rsync
def test_code_of_others_is_left_alone(work: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    (far / "code").mkdir(parents=True)
    (far / "code" / "notes.txt").write_text("notes\n")
    git(far, "init", "--quiet")
    git(far, "add", ".")
    git(far, "commit", "--quiet", "-m", "theirs")
    theirs = git(far, "rev-parse", "HEAD")
    with pytest.raises(UserError, match="far/code: is no git repository, so no code can be put there"):
        list(sync(str(far), [Path("data")], dry_run=False))
    assert (git(far, "rev-parse", "HEAD"), (far / "code/notes.txt").read_text()) == (theirs, "notes\n")
    shutil.rmtree(far / "code")
    list(sync(str(far), [Path("data")], dry_run=False))
    (far / "code/mine.py").write_text("x = 9\n")
    with pytest.raises(InfrastructureError, match=r"far/code: has changes.*mine.py"):
        list(sync(str(far), [Path("data")], dry_run=False))
    assert (far / "code/mine.py").read_text() == "x = 9\n"


@needs_rsync
def test_odd_names_are_copied_and_checked(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["-rf", "a\nb", "back\\slash", "it's [1]*", "ü"]
    for name in names:
        (Path("data") / name).write_text(name)
    fake_ssh(tmp_path, monkeypatch)
    list(sync("spare:-far", [Path("data")], dry_run=False))
    assert {file.name for file in (tmp_path / "home/-far/data").iterdir()} == {*names, "pool one.jsonl"}
    assert (tmp_path / "home/-far/data/a\nb").read_text() == "a\nb"


@needs_rsync
def test_refusals(work: Path, tmp_path: Path) -> None:
    def refused(said: str, path: str, target: str = "../far") -> None:
        with pytest.raises(UserError, match=said):
            list(sync(target, [Path(path)], dry_run=False))
        assert not (tmp_path / "far").exists()

    refused("gone: no such file", "gone")
    refused("lies not below", "../scratch")
    refused("no HOST:DIR", "data", "--help")
    refused("no HOST:DIR", "data", "spare:")
    refused("no HOST:DIR", "data", "spare::module")
    refused("no HOST:DIR", "data", "-oProxyCommand=touch far:x")
    refused("write the path without ~", "data", "spare:~/far")
    with RunDirectory.create(Path("runs/now"), "[run]\n", {}, resume=False):
        refused("runs/now: this run is being written", "runs")


def test_without_rsync_one_message_names_the_package(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"rsync is not installed.* apt-get install rsync"):
        list(sync("spare:far", [Path("data")], dry_run=False))


# documented: nmoe runs sync spare:work runs/base data/pool.jsonl --dry-run
# documented: nmoe runs sync spare:work runs/base data/pool.jsonl
@needs_rsync
def test_the_verb(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["nmoe", "runs", "sync", "../far", "data", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "would copy data/pool one.jsonl" in capsys.readouterr().out
