"""`nmoe preflight`: its lines and exit codes, and that training commands refuse the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe import cli

CONFIG = """
[run]
steps = 100
directory = "{directory}"
[model]
tokenizer = "bytes"
shape = {{hidden_size = 32, layers = 2, heads = 2, kv_heads = 1, head_dim = 16, intermediate_size = 64, context_tokens = 64}}
[environment]
env_id = "sort"
format = "boxed"
task_pool = {{type = "generated", task_type = "sort"}}
[sampling]
max_new_tokens = 16
"""

Nmoe = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def nmoe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Nmoe:
    """Runs `nmoe` with arguments in this process; returns its exit code, its output and what it said to stderr."""
    (tmp_path / "mine.toml").write_text(CONFIG.format(directory=tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def nmoe(*arguments: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["nmoe", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        said = capsys.readouterr()
        return exit_.value.code, said.out, said.err

    return nmoe


def test_a_configuration_that_can_run(nmoe: Nmoe, tmp_path: Path) -> None:
    # documented: nmoe preflight CONFIG
    code, out, err = nmoe("preflight", "mine.toml", "--optimizer.warmup_steps", "10")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first == "nmoe rl train, run mine"
    assert lines[:3] == [
        "ok    data                 none is read",
        "ok    hub                  nothing is read from it",
        "ok    learning rate        100% of its peak 1e-06 by step 20",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_schedule_that_comes_too_late(nmoe: Nmoe, tmp_path: Path) -> None:
    code, out, _ = nmoe("preflight", "mine.toml", "--optimizer.warmup_steps=90")
    assert code == 2
    assert [line for line in out.splitlines() if not line.startswith(("ok", "warn"))][1].startswith(
        "fail  learning rate        22% of its peak"
    )
    code, out, err = nmoe("rl", "train", "mine.toml", "--optimizer.warmup_steps=90")
    assert (code, out) == (2, "")
    assert err.startswith("error: learning rate: 22% of its peak 1e-06 by step 20, and 30% are wanted")
    assert not (tmp_path / "runs").exists()


def test_the_command_of_a_configuration(nmoe: Nmoe, tmp_path: Path) -> None:
    pairs = '[run]\nsteps = 10\n[model]\npath = "base"\n[records]\npath = "pairs.jsonl"\n'
    (tmp_path / "pairs.toml").write_text(pairs)
    assert nmoe("preflight", "pairs.toml")[1].startswith("nmoe sft, run pairs\n")
    assert nmoe("preflight", "pairs.toml", "--command", "reward")[1].startswith("nmoe reward, run pairs\n")
    assert nmoe("preflight", "pairs.toml", "--preference.beta=0.2")[1].startswith("nmoe dpo, run pairs\n")
    code, _, err = nmoe("preflight", "pairs.toml", "--command=train")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: --command=train: no training command; one of pretrain, sft, dpo")
