"""Ctrl-C while problems are sampled: one line, and what is done by then is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import DENSE

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.records import read_records
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer

# The engine is interrupted at a step of its choice, as by the signal that arrives there.
INTERRUPTED = """
from nmoe.cli import main
from nmoe.engine.native.llm_engine import LLMEngine
step, steps = LLMEngine.step, [0]
def interrupted(engine):
    steps[0] += 1
    if steps[0] == {at}:
        raise KeyboardInterrupt
    return step(engine)
LLMEngine.step = interrupted
main()
"""


def interrupt(at: int, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "-c", INTERRUPTED.format(at=at), *map(str, arguments)]
    return subprocess.run(script, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """A checkpoint of random weights."""
    tokenizer = Tokenizer.train(["a"], 300)
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size})
    (tmp_path / "untrained").mkdir()
    save_model(Transformer(config).initialize(0), tmp_path / "untrained")
    tokenizer.save(tmp_path / "untrained")
    (tmp_path / "reverse.toml").write_text(
        'env_id = "reverse"\ntask_pool = { type = "generated", task_type = "reverse", difficulty = [4, 4] }\n'
    )
    return tmp_path / "untrained"


def test_an_evaluation_keeps_what_is_done_and_goes_on(untrained: Path, tmp_path: Path) -> None:
    asked = ("eval", untrained, "reverse.toml", "--problems=400", "--temperature=1", "--out=kept.json")
    done = interrupt(40, *asked, cwd=tmp_path)
    (file,) = (tmp_path / "evals").iterdir()
    lines = file.read_bytes().splitlines()
    count = len(lines) - 1
    assert 0 < count < 400
    assert (done.returncode, done.stdout) == (130, "on the eval split, which training never meets\n")
    said = f"after {count} of 400 problems; evals keeps what is done, and the same command goes on\n"
    assert done.stderr.startswith("error: interrupted at ")
    assert done.stderr.endswith(said)
    assert not (tmp_path / "kept.json").exists()
    again = interrupt(10**9, *asked, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert file.read_bytes().splitlines()[: len(lines)] == lines
    assert len(json.loads((tmp_path / "kept.json").read_text())["answers"]) == 400


def test_pairs_of_the_problems_that_are_done_are_written(base: Path, workshop: Path, tmp_path: Path) -> None:
    asked = ("data", "pairs", base, workshop / "reverse.toml", "pairs.jsonl", "--problems=500", "--samples=4")
    done = interrupt(60, *asked, cwd=tmp_path)
    pairs = list(read_records(DatasetSettings(path=str(tmp_path / "pairs.jsonl"))))
    assert done.returncode == 130
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: interrupted after ")
    assert done.stdout.startswith(f"pairs.jsonl: {len(pairs)} pairs from ")


def test_nothing_done_is_one_line_and_no_file(untrained: Path, tmp_path: Path) -> None:
    asked = ("data", "pairs", untrained, "reverse.toml", "pairs.jsonl", "--problems=500")
    done = interrupt(1, *asked, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted after 0 of 500 problems\n"
    assert not (tmp_path / "pairs.jsonl").exists()
