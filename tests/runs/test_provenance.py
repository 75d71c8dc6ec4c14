"""Provenance: what it says, and whom it does not name."""

import getpass
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import nmoe
from nmoe.runs.provenance import provenance


def test_it_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jo")
    monkeypatch.setattr(sys, "argv", ["/home/jo/env/bin/nmoe", "rl", "/home/jo/x.toml", "--data.path=/home/jo/d"])
    record = json.loads(json.dumps(provenance(seed=7, threads=3)))
    assert record["argv"] == ["nmoe", "rl", "~/x.toml", "--data.path=~/d"]
    assert (record["seed"], record["threads"], record["device"]) == (7, 3, "cpu")
    assert record["torch"] == torch.__version__
    assert record["transformers"] == importlib.metadata.version("transformers")
    assert record["python"] == platform.python_version()
    assert record["cores"] == os.cpu_count()
    started = datetime.strptime(record["started_utc"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - started) < timedelta(minutes=1)


def test_it_names_no_host_no_user_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_leak")
    monkeypatch.setattr(sys, "argv", ["nmoe"])
    text = json.dumps(provenance(0, 1))
    assert "hf_do_not_leak" not in text
    for name in (socket.gethostname(), getpass.getuser()):
        assert f'"{name}"' not in text
        assert f"/{name}/" not in text


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(nmoe, "__file__", str(package / "__init__.py"))

    def found() -> tuple[str | None, bool | None]:
        record = provenance(0, 1)
        return record["git_commit"], record["git_dirty"]

    assert found() == (None, None)  # no repository at all
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "someone else's")
    assert found() == (None, None)  # a repository around an installed package
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "--quiet", "-m", "the package")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert found() == (commit, False)
    (package / "new.py").touch()
    assert found() == (commit, True)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    record = provenance(0, 1)
    assert (record["git_commit"], record["git_dirty"]) == (None, None)
