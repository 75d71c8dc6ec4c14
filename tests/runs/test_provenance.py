"""Provenance: what it says, and whom it does not name."""

import getpass
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from nmoe.cli.arguments import file_and_overrides
from nmoe.config.commands import RunConfig
from nmoe.errors import UserError
from nmoe.recipes.setup import settle
from nmoe.runs.directory import RunDirectory
from nmoe.runs.provenance import MAX_DIFF_BYTES, provenance, refuse_dirty


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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nmoe.runs.provenance.PACKAGE", package)

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
    record = provenance(0, 1)
    assert record["git_untracked"] == ["package/new.py"]
    assert "git_diff" not in record, "no tracked file has changed"
    (package / "__init__.py").write_text("changed = 1\n")
    assert provenance(0, 1)["git_diff"].endswith("@@ -0,0 +1 @@\n+changed = 1\n")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a committed file, in which the process runs; the package is not from a checkout."""
    monkeypatch.setattr("nmoe.runs.provenance.PACKAGE", tmp_path / "installed")
    (tmp_path / "installed").mkdir()
    repository = tmp_path / "code"
    repository.mkdir()
    git(repository, "init", "--quiet")
    (repository / "mine.py").write_text("x = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "mine")
    monkeypatch.chdir(repository)
    return repository


def test_the_repository_of_the_working_directory_is_named_too(code: Path) -> None:
    record = provenance(0, 1)
    assert (record["git_commit"], record["directory_commit"]) == (None, git(code, "rev-parse", "HEAD"))
    assert record["directory_dirty"] is False


def test_the_diff_is_kept_with_the_run_and_bounded(code: Path, tmp_path: Path) -> None:
    (code / "mine.py").write_text("x = 2\n")
    (code / "other.py").touch()
    with RunDirectory.create(tmp_path / "run", "[run]\nsteps = 1\n", provenance(0, 1), resume=False):
        pass
    kept = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert (kept["git_diff"], kept["git_untracked"], kept["directory_dirty"]) == ("code.diff", ["other.py"], True)
    assert "-x = 1\n+x = 2\n" in (tmp_path / "run" / "code.diff").read_text()
    git(code, "stash", "--quiet")
    git(code, "apply", str(tmp_path / "run" / "code.diff"))
    assert (code / "mine.py").read_text() == "x = 2\n", "the diff and the commit give the code back"
    (code / "mine.py").write_text("x = 3\n" * 100_000)
    bounded = provenance(0, 1)["git_diff"]
    assert MAX_DIFF_BYTES < len(bounded) < MAX_DIFF_BYTES + 100
    assert "cut here: the whole diff has" in bounded


def test_a_dirty_tree_is_refused_with_the_files_named(code: Path, tmp_path: Path) -> None:
    refuse_dirty(code / "runs")
    (code / "runs" / "first").mkdir(parents=True)
    (code / "runs" / "first" / "metrics.jsonl").touch()
    refuse_dirty(code / "runs")  # what a run wrote is no change of code
    (code / "mine.py").write_text("x = 2\n")
    for number in range(6):
        (code / f"new{number}.py").touch()
    with pytest.raises(
        UserError, match=r"holds: mine.py, new0.py, new1.py, new2.py, new3.py and 2 more; commit or stash"
    ):
        refuse_dirty(Path("runs"))


def test_names_of_any_letters_are_told_apart(code: Path) -> None:
    run = code / 'läufe "x"' / "first"
    run.mkdir(parents=True)
    (run / "provenance.json").touch()
    (run / "metrics.jsonl").touch()
    refuse_dirty(run.parent)
    refuse_dirty(code)  # runs in the repository itself are known by their records
    (code / "naïve.py").touch()
    for outputs in (run.parent, code, code.parent):
        with pytest.raises(UserError, match=r"holds: naïve.py; commit"):
            refuse_dirty(outputs)


@pytest.mark.parametrize("required", [True, False])
def test_a_run_that_requires_it_does_not_start_from_a_dirty_tree(code: Path, required: bool) -> None:
    run = {"name": "one", "steps": 1, "threads": torch.get_num_threads(), "require_clean": required}
    config = RunConfig.model_validate({"run": run, "model": {"path": "base", "device": "cpu"}})
    settle(config)
    (code / "mine.py").write_text("x = 2\n")
    with pytest.raises(UserError, match=r"run.require_clean: .*/code has changes") if required else nullcontext():
        settle(config)


def test_the_option_stands_for_the_key() -> None:
    assert file_and_overrides(["--require-clean", "sft.toml", "--run.steps", "3"]) == (
        Path("sft.toml"),
        ["--run.require_clean=true", "--run.steps=3"],
    )


def test_where_there_is_no_repository_none_can_be_clean(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code.parent)
    with pytest.raises(UserError, match="is in no git repository"):
        refuse_dirty(Path("runs"))


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    record = provenance(0, 1)
    assert (record["git_commit"], record["git_dirty"]) == (None, None)
