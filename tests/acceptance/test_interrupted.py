"""Ctrl-C while problems are sampled, and a disk that is full."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import NMOE
from tiny_models import DENSE

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.records import read_records
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.runs.checkpoint import latest_checkpoint, verify_checkpoint
from nmoe.runs.ledger import read_metrics
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


PRIVATE_MOUNTS = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c"]


def run_of(workshop: Path, directory: Path) -> list[str]:
    """A run of three steps that keeps a checkpoint of each."""
    overrides = [
        "--run.steps=3",
        "--optimizer.warmup_steps=2",
        "--checkpoint.every_steps=1",
        "--checkpoint.keep=3",
        "--eval=[]",
    ]
    return [*NMOE, "pretrain", f"{workshop}/base.toml", f"--run.directory={directory}", *overrides]


def test_a_full_disk(workshop: Path, base: Path, tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    checkpoint = latest_checkpoint(base / "checkpoints")
    assert checkpoint is not None
    room = int(1.6 * sum(file.stat().st_size for file in checkpoint.iterdir()))  # for one checkpoint and a half
    mount = f"mount -t tmpfs -o size={room} tmpfs '{disk}'"
    if subprocess.run([*PRIVATE_MOUNTS, mount], capture_output=True, check=False).returncode:
        pytest.skip("no user may mount a tmpfs here")
    command = shlex.join(run_of(workshop, disk))
    script = f"""
{mount} || exit 9
{command}
echo "code $?"
cp -r '{disk}' '{kept}'
mount -o remount,size=100m '{disk}' || exit 9
{command} --run.resume=true
echo "code $?"
cp -r '{disk}/base' '{kept}/resumed'
"""
    done = subprocess.run([*PRIVATE_MOUNTS, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 2", "code 0"]
    assert done.stderr.startswith(f"error: {disk}/base/checkpoints/step_000002: not written, since a checkpoint takes ")
    assert "are free on its disk. The run ends here; its newest checkpoint, step_000001, is whole." in done.stderr
    assert "--run.resume=true" in done.stderr
    assert done.stderr.count("\n") == 1
    left = kept / "base" / "checkpoints"
    assert sorted(path.name for path in left.iterdir()) == ["latest", "step_000001"]
    verify_checkpoint(left / "step_000001")
    assert "resumed from step 1" in done.stdout
    resumed = kept / "resumed"
    assert [row["step"] for row in read_metrics(resumed)] == [1, 2, 3]
    for step in (1, 2, 3):
        verify_checkpoint(resumed / "checkpoints" / f"step_{step:06d}")


def test_a_file_that_may_not_grow(workshop: Path, base: Path, tmp_path: Path) -> None:
    """A limit on the size of files, such as a batch system sets, stops the writers that are not Python too."""
    limit = 100_000

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(run_of(workshop, tmp_path), preexec_fn=bounded, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert done.stderr.startswith(f"error: {tmp_path}/base/checkpoints/step_000001: cannot be written: ")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "base" / "checkpoints").iterdir()) == []
