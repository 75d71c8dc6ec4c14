"""docs/guides/library.md and the tasks of one's own in docs/guides/environments.md: every block of code runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.loader import load_environment
from nmoe.envs.environment import Environment
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

GUIDES = Path(__file__).parents[2] / "docs/guides"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_guide_to_the_library_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "library_guide"}
    parts = blocks((GUIDES / "library.md").read_text(), "python")
    assert len(parts) == 9
    for part in parts:
        exec(compile(part, "library.md", "exec"), names)
    assert "did you mean 'learning_rate'" in capsys.readouterr().out
    assert len(names["answers"]) == 4, "samples of a loaded model"
    assert set(map(len, names["lengths"])) == {4}, "one request for each group"
    assert [run.name for run in sorted((tmp_path / "runs").iterdir())][:2] == ["Boxes", "Greater"]


def test_a_task_of_ones_own_is_named_in_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (GUIDES / "environments.md").read_text().partition("## Tasks of your own")[2]
    Path("my_tasks.py").write_text(blocks(page, "python")[0])
    Path("shout.toml").write_text(blocks(page, "toml")[0])
    environment = Environment.from_settings(
        load_environment(Path("shout.toml")), Tokenizer.train((), SMALLEST_VOCABULARY)
    )
    questions = {problem.question for problem in environment.pool.take(2)}
    assert questions == {f"Write {word} in capital letters." for word in ("expert", "router")}
