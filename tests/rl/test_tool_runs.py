"""Runs on environments with tools and workspaces: what is in force is said, and what cannot be had is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.errors import InfrastructureError
from nmoe.rl.launch import train
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.sandbox.api import SandboxSetupError

RUN = """
[run]
steps = 2
threads = 1
[model]
tokenizer = "WORKSHOP/tokenizer"
[model.shape]
hidden_size = 16
layers = 1
heads = 1
kv_heads = 1
head_dim = 16
intermediate_size = 16
context_tokens = 900
[sandbox]
level = "landlock"
warm = 1
[environment]
env_id = "e"
[environment.task_pool]
type = "generated"
task_type = "reverse"
[environment.tools]
use = ["python"]
[environment.rubric]
efficiency = 1.0
[environment.workspace]
directory = "HERE/files"
[environment.budget]
disk_mb = 8
[sampling]
max_new_tokens = 8
[batch]
prompts_per_step = 2
group_size = 2
max_refills = 0
"""


@pytest.fixture
def run(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMOE_WORKSPACES", str(tmp_path / "workspaces"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files/data.txt").write_text("1\n")
    path = tmp_path / "x.toml"
    path.write_text(RUN.replace("WORKSHOP", str(workshop)).replace("HERE", str(tmp_path)))
    return path


def start(path: Path, *overrides: str) -> Path:
    return train(load_run(path, RLConfig, [f"--run.directory={path.parent}/runs", *overrides]))


def test_a_run_says_what_is_in_force(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = start(run)
    log = (directory / "log.txt").read_text()
    assert "sandbox: Landlock and namespaces, without bubblewrap, seccomp, no network" in log
    said = log.partition("sandbox: ")[2].partition("\n")[0]
    assert "cgroup limits" in said, "there are some, or there is a reason why not"
    assert json.loads((directory / "provenance.json").read_text())["sandbox"] == said
    assert len(read_metrics(directory)) == 2
    (workspace,) = (run.parent / "workspaces").iterdir()
    assert (workspace / "tree/data.txt").read_text() == "1\n"
    samples = read_lines(directory / "samples/step_000001.jsonl")
    assert {sample["workspace"]["content"] for sample in samples} == {
        json.loads((workspace / "nmoe-workspace.json").read_text())["content"]
    }
    bundle = json.loads(next(directory.glob("replay/step_000001-*/bundle.json")).read_text())
    assert bundle["sandbox"]["settings"]["level"] == "landlock"
    assert bundle["trajectory"]["workspace"]["sandbox"] == bundle["sandbox"]["in_force"]


def test_a_workspace_that_can_not_be_had_is_never_a_reward(run: Path) -> None:
    with pytest.raises(InfrastructureError) as error:
        start(run, "--environment.workspace.bootstrap=requirements")
    directory = run.parent / "runs/x"
    assert str(error.value) == (
        "step 1: every sample was lost to the infrastructure, none to the policy: 4 workspace_failed; the reasons are in "
        f"{directory}/failures.jsonl"
    )
    failures = read_lines(directory / "failures.jsonl")
    assert [failure["failure"] for failure in failures] == ["workspace_failed"] * 4
    for failure in failures:
        assert (
            "pip install --quiet --target .packages -r requirements.txt ended with 1: "
            in failure["workspace"]["failed"]
        )
        assert "requirements.txt" in failure["workspace"]["failed"]
        assert failure["verdict"] is None
    assert not (directory / "metrics.jsonl").exists()
    assert len(list(directory.glob("replay/step_000001-workspace_failed-*"))) == 1


def test_files_that_do_not_fit_are_refused_by_name(run: Path) -> None:
    """Only a tool would open the sandbox; the random policy here calls none, so the run goes on."""
    (run.parent / "files/large").write_bytes(bytes(9 << 20))
    assert len(read_metrics(start(run))) == 2


def test_nothing_starts_where_the_sandbox_can_not_be_had(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(run.parent))
    with pytest.raises(SandboxSetupError, match=r"needs bwrap, which is not installed"):
        start(run, "--sandbox.level=bubblewrap")
    assert not (run.parent / "runs").exists()


def test_failures_are_recorded_once_a_step_by_name(run: Path) -> None:
    """The random policy here is cut at the limit, nearly always: the metrics count each failure, and one record a step shows it."""
    directory = start(run)
    rows, failures = read_metrics(directory), read_lines(directory / "failures.jsonl")
    counted = {
        (row["step"], name.removeprefix("failures/"))
        for row in rows
        for name, count in row.items()
        if name.startswith("failures/") and count > 0 and name != "failures/ok"
    }
    assert {(1, "truncated"), (2, "truncated")} <= counted
    assert [sum(count for name, count in row.items() if name.startswith("failures/")) for row in rows] == [4, 4]
    assert sorted((failure["step"], failure["failure"]) for failure in failures) == sorted(counted)
    assert failures[0]["token_ids"]


def test_problems_that_do_not_fit_are_left_out_and_counted(run: Path) -> None:
    """Two of three rows of digits fit a context that the third alone would fill."""
    digits = ["12", "345", "6" * 700]
    (run.parent / "records.jsonl").write_text(
        "".join(json.dumps({"problem": f"Reverse: {one}", "answer": one[::-1]}) + "\n" for one in digits)
    )
    pool = [
        f"--environment.task_pool.{key}"
        for key in ("type=jsonl", "task_type=reverse", f"path={run.parent}/records.jsonl")
    ]
    directory = start(run, *pool)
    assert "1 of 3 problems are left out" in (directory / "log.txt").read_text()
    assert sum(row["problems_left_out"] for row in read_metrics(directory)) >= 1
