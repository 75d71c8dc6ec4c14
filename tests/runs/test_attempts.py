"""Attempts in a repository of their own: what `nmoe runs attempt`, `log` and `table` write, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nmoe.cli import main
from nmoe.errors import UserError
from nmoe.runs.attempts import finish_attempt, start_attempt
from nmoe.runs.comparison import results_table
from nmoe.runs.directory import RunDirectory

CONFIG = "[run]\nseed = {seed}\nsteps = 3\n\n"
CONFIG += '[model]\npath = "base"\n\n[records]\npath = "r"\n\n[optimizer]\nlearning_rate = {rate}\n'
LOG = Path("research_log.md")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a configuration, in which the process runs."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "t")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "t@t")
    path = tmp_path / "work"
    path.mkdir()
    monkeypatch.chdir(path)
    git("init", "--quiet", "--initial-branch=main")
    Path("sft.toml").write_text(CONFIG.format(seed=0, rate=0.01))
    git("add", ".")
    git("commit", "--quiet", "-m", "mine")
    return path


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def begin(name: str, hypothesis: str = "it learns", config: str = "sft.toml") -> list[str]:
    return list(start_attempt(name, Path(config), hypothesis, LOG))


def change(rate: float, more: str = "") -> None:
    Path("sft.toml").write_text(CONFIG.format(seed=0, rate=rate) + more)
    git("commit", "--quiet", "-am", "another rate")


def make_run(path: Path, seed: int, value: float, rate: float = 0.01, commit: str = "abcdef0123456789") -> None:
    provenance = {"argv": ["nmoe", "sft"], "git_commit": commit, "git_dirty": seed == 2, "cpu": "EPYC", "threads": 2}
    with RunDirectory.create(path, CONFIG.format(seed=seed, rate=rate), provenance, resume=False) as run:
        run.ledger.metrics(3, {"loss": 1.0})
        result = {"mode": "greedy", "dataset": "sort", "problems": 9, "low": value - 0.1, "high": value + 0.1}
        run.ledger.evaluation(3, {"results": [result | {"value": value}]})


def test_an_attempt_is_a_branch_a_tag_and_an_entry(repository: Path) -> None:
    start = git("rev-parse", "HEAD")
    begin("base")
    assert git("symbolic-ref", "--short", "HEAD") == "attempt-01-base"
    assert git("rev-parse", "attempt-01-start") == git("rev-parse", "HEAD")
    assert git("rev-parse", "HEAD~") == git("rev-parse", "main") == start
    first = "- changed: nothing, this is the first attempt"
    assert git("show", "--name-only", "--format=%B") == f"it learns (attempt 01 starts)\n\n{first}\n\n\nresearch_log.md"
    change(0.02)
    assert begin("higher-lr", "faster")[1:-1] == ["changed: `optimizer.learning_rate` from 0.01 to 0.02"]
    assert LOG.read_text() == (
        "# Research log\n\n## attempt-01-base\n\n- hypothesis: it learns\n- configuration: `sft.toml`\n"
        "- changed: nothing, this is the first attempt\n- results: none yet\n\n"
        "## attempt-02-higher-lr\n\n- hypothesis: faster\n- configuration: `sft.toml`\n"
        "- changed: `optimizer.learning_rate` from 0.01 to 0.02\n- results: none yet\n"
    )
    assert git("status", "--porcelain") == ""


def test_a_long_reason_is_cut_in_the_subject_and_whole_in_the_details(repository: Path) -> None:
    begin("base", "a rate of 1e-5 learns faster than the rate before, because its gradients are small")
    subject, _, whole, changed = git("show", "--no-patch", "--format=%B").splitlines()
    assert subject == "a rate of 1e-5 learns faster than the rate ... (attempt 01 starts)"
    assert whole == "- a rate of 1e-5 learns faster than the rate before, because its gradients are small"
    assert changed == "- changed: nothing, this is the first attempt"


def test_what_is_spelled_out_but_the_default_is_no_change_and_two_changes_are_warned_of(repository: Path) -> None:
    begin("base")
    change(0.02, "max_grad_norm = 0.5\nbeta1 = 0.9\n")
    lines = begin("two")
    assert lines[1:3] == [
        "changed: `optimizer.learning_rate` from 0.01 to 0.02",
        "changed: `optimizer.max_grad_norm` from 1.0 to 0.5",
    ]
    assert lines[3].startswith("warning: 2 things have changed since the attempt before")


def test_refusals_change_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, name: str = "base", config: str = "sft.toml", log: Path = LOG) -> None:
        with pytest.raises(UserError, match=said):
            list(start_attempt(name, Path(config), "x", log))

    refused("is of lower-case letters", "Higher LR")
    refused("no file of the repository", config="../other.toml")
    refused("lies outside of the repository", log=Path("../log.md"))
    Path("new.py").touch()
    refused("has changes that no commit holds: new.py; commit or stash")
    Path("new.py").unlink()
    hook = Path(".git/hooks/pre-commit")
    hook.write_text("#!/bin/sh\necho no commits today >&2\nexit 1\n")
    hook.chmod(0o755)
    refused("git commit: no commits today")
    hook.unlink()
    assert git("branch", "--format=%(refname:short)") == "main"
    assert (git("tag"), git("status", "--porcelain"), LOG.exists()) == ("", "", False)
    monkeypatch.chdir(repository.parent)
    refused("is in no git repository")


def test_an_ignored_log_is_kept_where_git_refuses_it(repository: Path) -> None:
    Path(".gitignore").write_text("*.md\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "ignore")
    LOG.write_bytes(b"mine\r\n")
    with pytest.raises(UserError, match=r"git add: .*ignored"):
        begin("base")
    assert LOG.read_bytes() == b"mine\r\n"
    assert git("branch", "--format=%(refname:short)") == "main"


def test_what_no_commit_holds_is_refused(repository: Path) -> None:
    Path("runs").mkdir()
    Path("runs/other.toml").write_text(CONFIG.format(seed=0, rate=0.1))
    with pytest.raises(UserError, match=r"runs/other.toml: no commit holds it; commit it first"):
        begin("base", config="runs/other.toml")
    git("checkout", "--quiet", "--orphan", "empty")
    with pytest.raises(UserError, match="has no commit yet"):
        begin("base")
    git("checkout", "--quiet", "--force", "--detach", "main")
    with pytest.raises(UserError, match="HEAD is on no branch"):
        list(finish_attempt(["runs/base"], "x", LOG))


def test_overrides_are_checked_and_count_as_changes(repository: Path) -> None:
    def with_overrides(name: str, *overrides: str) -> list[str]:
        return list(start_attempt(name, Path("sft.toml"), "x", LOG, overrides))

    with pytest.raises(UserError, match=r"optimizer.learning_rte"):
        with_overrides("typo", "--optimizer.learning_rte=1")
    with_overrides("base", "--optimizer.learning_rate=0.02", '--model.path="a b"')
    assert "- overrides: `--optimizer.learning_rate=0.02 '--model.path=\"a b\"'`\n" in LOG.read_text()
    assert begin("file")[1:3] == [
        "changed: `model.path` from 'a b' to 'base'",
        "changed: `optimizer.learning_rate` from 0.02 to 0.01",
    ]
    assert with_overrides("both", "--optimizer.learning_rate=0.03", "--optimizer.beta1=0.8")[1:3] == [
        "changed: `optimizer.learning_rate` from 0.01 to 0.03",
        "changed: `optimizer.beta1` from 0.9 to 0.8",
    ]


def test_runs_of_one_seed_and_a_run_named_twice_are_no_independent_draws(repository: Path) -> None:
    for name, value in (("a", 0.5), ("b", 0.7)):
        make_run(Path("runs") / name, 0, value)
    assert "| a | 1 | 3 | greedy on sort | 50.0% | 50.0% | 50.0% [40.0%, 60.0%] |" in results_table(
        ["runs/a", "runs/../runs/a"]
    )
    assert "| a and 1 more | 1 | 3 | greedy on sort | 60.0% | 50.0% | 60.0% |" in results_table(["runs/*"])


def test_results_are_written_into_the_entry_of_the_branch(repository: Path) -> None:
    begin("base")
    for seed, value in enumerate((0.5, 0.9, 0.7)):
        make_run(Path("runs") / f"base-{seed}", seed, value)
    Path("unfinished.py").touch()
    list(finish_attempt(["runs/base-*"], "it  learns", LOG))
    text = LOG.read_text()
    assert "none yet" not in text
    assert "- lesson: it learns\n- results:\n\n| experiment | seeds |" in text
    row = "base-0 and 2 more | 3 | 3 | greedy on sort | 70.0% | 50.0% | 70.0% [18.0%, 96.1%]"
    said = f"it learns (attempt 01 ends)\n\n- {row} | EPYC, 2 threads | abcdef0123, abcdef0123+"
    assert git("show", "--name-only", "--format=%B") == f"{said}\n\n\nresearch_log.md"
    with pytest.raises(UserError, match="--lesson is empty"):
        list(finish_attempt(["runs/base-*"], " ", LOG))
    git("switch", "--quiet", "main")
    with pytest.raises(UserError, match=r"has no entry for the branch main"):
        list(finish_attempt(["runs/base-*"], "x", LOG))


def test_a_row_of_the_table_is_an_experiment_over_its_seeds(repository: Path) -> None:
    for seed, value in enumerate((0.5, 0.9, 0.7)):
        make_run(Path("runs") / f"base-{seed}", seed, value)
    make_run(Path("runs/wide"), 0, 0.8, rate=0.02)
    # Mean 0.7, deviation 0.2, error 0.2 / sqrt(3), t of 2 degrees of freedom 4.302653: 0.4968, or 2.3659 in log odds, to either
    # side of log(0.7 / 0.3) = 0.8473.
    assert results_table(["runs/*"]) == (
        "| experiment | seeds | steps | result | median | worst | mean [95%] | machine | commit |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| base-0 and 2 more | 3 | 3 | greedy on sort | 70.0% | 50.0% | 70.0% [18.0%, 96.1%] "
        "| EPYC, 2 threads | abcdef0123, abcdef0123+ |\n"
        "| wide | 1 | 3 | greedy on sort | 80.0% | 80.0% | 80.0% [70.0%, 90.0%] | EPYC, 2 threads | abcdef0123 |\n"
    )
    with Path("runs/wide/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "held_out')  # torn by a kill
    assert "| wide | 1 | 3 | greedy on sort | 80.0% |" in results_table(["runs/wide"])
    (Path("runs/wide/eval") / "step_000003.json").unlink()
    with pytest.raises(UserError, match="runs/wide: has no evaluation"):
        results_table(["runs/wide"])


# documented: nmoe runs attempt higher-lr --config grpo.toml --hypothesis "1e-5 learns faster"
# documented: nmoe runs log runs/higher-lr --lesson "faster, but the entropy collapses"
# documented: nmoe runs attempt
# documented: nmoe runs log
# documented: nmoe runs table
@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        (
            "attempt",
            ["lower", "--config", "sft.toml", "--hypothesis", "x"],
            "branch attempt-02-lower, tag attempt-02-start",
        ),
        (
            "attempt",
            ["lower", "--config", "sft.toml", "--hypothesis", "x", "--optimizer.learning_rate", "0.5"],
            "changed: `optimizer.learning_rate` from 0.01 to 0.5",
        ),
        ("log", ["runs/one", "--lesson", "y"], "results of attempt-01-base in research_log.md"),
        ("table", ["runs/one"], "| one | 1 | 3 | greedy on sort | 50.0% |"),
    ],
)
def test_the_verbs(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    arguments: list[str],
    said: str,
) -> None:
    begin("base")
    make_run(Path("runs/one"), 0, 0.5)
    monkeypatch.setattr(sys, "argv", ["nmoe", "runs", verb, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert said in capsys.readouterr().out
