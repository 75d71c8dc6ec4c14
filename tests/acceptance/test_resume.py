"""Runs that are killed, interrupted or out of disk: resumed, they end as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import NMOE
from forked import Forked, Result
from safetensors.torch import load_file, save_file
from tiny_models import DENSE

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.records import read_records
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.runs.checkpoint import checkpoint_step, latest_checkpoint, verify_checkpoint
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.text.tokenizer import Tokenizer

DOCS = Path(__file__).parents[2] / "docs/reference/metrics.md"

# Everything that a checkpoint has to carry: curriculum, reference, refills, evaluations, and moments of the optimizer.
REINFORCEMENT = [
    *("--run.steps=9", "--batch.prompts_per_step=5", "--batch.group_size=4", "--algorithm.kl_coef=0.05"),
    *("--eval.0.every_steps=2", "--eval.0.problems=10", "--checkpoint.every_steps=2", "--checkpoint.keep=2"),
]
CURRICULUM = """
[environment.curriculum]
window_steps = 3
[[environment.curriculum.stages]]
name = "format"
weights = { format = 1.0 }
gate = { metric = "format_ok", at_least = 0.5 }
[[environment.curriculum.stages]]
name = "correctness"
weights = { format = 0.2, correctness = 1.0 }
"""
PRETRAINING = ["--run.steps=30", "--data.tokens_per_step=256", "--eval.0.every_steps=5", "--checkpoint.every_steps=3"]

Start = Callable[..., Forked]


def starter(tmp_path: Path, *verb: str) -> Start:
    """Starts a training verb in a process of its own, to write the run `tmp_path/NAME`."""

    def start(name: str, *overrides: str) -> Forked:
        return Forked(tmp_path, *verb, f"--run.directory={tmp_path}", f"--run.name={name}", *overrides)

    return start


def timings() -> set[str]:
    """The names that docs/reference/metrics.md allows to differ: its group Time."""
    names = re.split(r"\| \*\*Time\*\* .*", DOCS.read_text())[1].split("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)`", names, re.MULTILINE))


def records(run: Path) -> dict[str, Any]:
    """Everything a run left that is not a time: metrics, samples, evaluations, alerts and its last checkpoint."""
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    files = [
        *run.glob("samples/*"),
        *run.glob("eval/*"),
        *run.glob("replay/*/*"),
        *checkpoint.iterdir(),
        *run.glob("alerts.jsonl"),
    ]
    ignored = timings()
    links = {
        link: os.readlink(run / "checkpoints" / link)
        for link in ("latest", "best")
        if (run / "checkpoints" / link).exists()
    }
    return {
        **links,
        **{f"step {row['step']}": {k: v for k, v in row.items() if k not in ignored} for row in read_metrics(run)},
        **{str(file.relative_to(run)): file.read_bytes() for file in files},
    }


def wait_for_step(process: Forked, run: Path, step: int) -> None:
    """Returns as soon as the run has recorded a step."""
    while len(read_lines(run / "metrics.jsonl")) < step:
        assert process.poll() is None, process.ended()
        time.sleep(0.005)


def break_and_resume(start: Start, tmp_path: Path) -> list[dict[str, Any]]:
    """Runs once to the end; then once more, killed, resumed, interrupted and resumed. Both have to leave the same records.
    Returns the steps of the whole run."""
    rng = random.Random(20)
    whole = start("whole").ended()
    assert (whole.code, whole.err) == (0, "")
    expected = records(tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole")
    steps = len(rows)
    run = tmp_path / "broken"

    killed = start("broken")
    kill_at = rng.randint(1, steps // 2)
    wait_for_step(killed, run, kill_at)
    time.sleep(rng.random() * 0.05)
    killed.send_signal(signal.SIGKILL)
    assert killed.ended().code == -signal.SIGKILL
    reached = latest_checkpoint(run / "checkpoints")

    interrupted = start("broken", "--run.resume=true")
    interrupt_at = rng.randint(steps // 2 + 1, steps * 3 // 4)
    wait_for_step(interrupted, run, interrupt_at)
    interrupted.send_signal(signal.SIGINT)
    ended = interrupted.ended()
    assert (ended.code, ended.err) == (130, "")
    saved = latest_checkpoint(run / "checkpoints")
    assert saved is not None
    # The step under way when the signal came is the last one recorded, and the one saved.
    assert interrupt_at <= checkpoint_step(saved) == read_metrics(run)[-1]["step"] < steps
    assert f"interrupted: saved step {checkpoint_step(saved)}; go on with --run.resume=true" in ended.out

    resumed = start("broken", "--run.resume=true").ended()
    assert (resumed.code, resumed.err) == (0, "")
    assert f"resumed from step {checkpoint_step(saved)}" in resumed.out
    found = records(run)
    assert found.keys() == expected.keys()
    for name, record in expected.items():
        assert found[name] == record, name
    provenance = json.loads((run / "provenance.json").read_text())
    assert [entry["from_step"] for entry in provenance["resumed"]] == [
        *([checkpoint_step(reached)] if reached else []),
        checkpoint_step(saved),
    ]
    return rows


def test_reinforcement_learning(workshop: Path, base: Path, tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text((workshop / "rl.toml").read_text() + CURRICULUM)
    (tmp_path / "reverse.toml").write_text((workshop / "reverse.toml").read_text())
    rows = break_and_resume(starter(tmp_path, "rl", "train", f"{tmp_path}/rl.toml", *REINFORCEMENT), tmp_path)
    # What was compared had something to lose.
    assert {row["curriculum_stage"] for row in rows} == {0, 1}
    assert sum(row["refills"] for row in rows) > 0
    assert rows[0]["reference_kl"] == 0 < rows[-1]["reference_kl"]
    assert {path.name for path in (tmp_path / "broken" / "eval").iterdir()} == {
        f"step_{step:06d}.json" for step in (0, 2, 4, 6, 8, 9)
    }
    assert len(list((tmp_path / "broken" / "samples").iterdir())) == len(rows)


def test_an_adapter(workshop: Path, base: Path, tmp_path: Path, nmoe: Callable[..., Result]) -> None:
    lora = '[lora]\nrank = 4\nalpha = 8\ntargets = ["q_proj", "o_proj", "experts.down_proj"]\n'
    (tmp_path / "rl.toml").write_text((workshop / "rl.toml").read_text() + lora)
    (tmp_path / "reverse.toml").write_text((workshop / "reverse.toml").read_text())
    rate = "--optimizer.learning_rate=1e-2"
    rows = break_and_resume(starter(tmp_path, "rl", "train", f"{tmp_path}/rl.toml", *REINFORCEMENT, rate), tmp_path)
    assert rows[0]["reference_kl"] == 0 < rows[-1]["reference_kl"]
    saved = latest_checkpoint(tmp_path / "broken" / "checkpoints")
    assert saved is not None
    assert (saved / "adapter_model.safetensors").exists()
    assert not (saved / "model.safetensors").exists()

    # Another base under the same name: the run is not continued beside it, and stays as it was.
    other = tmp_path / "other"
    shutil.copytree(latest_checkpoint(base / "checkpoints") or base, other)
    moved = ["rl", "train", f"{tmp_path}/rl.toml", f"--run.directory={tmp_path}", "--run.name=moved", *REINFORCEMENT]
    moved += [rate, f"--model.path={other}"]
    first = nmoe(*moved, "--checkpoint.every_steps=1", "--run.steps=2")
    assert (first.code, first.err) == (0, "")
    weights = load_file(other / "model.safetensors")
    weights["norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors")
    again = nmoe(*moved, "--run.resume=true")
    assert again.code == 2
    assert again.err.startswith("error: ")
    assert again.err.count("\n") == 1
    assert f"{other} now holds another configuration or other weights" in again.err


def test_pretraining(workshop: Path, tmp_path: Path) -> None:
    rows = break_and_resume(starter(tmp_path, "pretrain", f"{workshop}/base.toml", *PRETRAINING), tmp_path)
    assert [row["step"] for row in rows if "held_out_loss" in row] == list(range(5, 31, 5))


def interrupted(at: int) -> None:
    """Interrupts the engine at this one of its steps, as by the signal that arrives there."""
    step, steps = LLMEngine.step, itertools.count(1)

    def counted(engine: LLMEngine) -> Any:
        if next(steps) == at:
            raise KeyboardInterrupt
        return step(engine)

    LLMEngine.step = counted  # type: ignore[method-assign]


def interrupt(at: int, *arguments: str | Path, cwd: Path) -> Result:
    return Forked(cwd, *arguments, before=partial(interrupted, at)).ended()


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
    assert (done.code, done.out) == (130, "on the eval split, which training never meets\n")
    said = f"after {count} of 400 problems; evals keeps the finished ones, and the same command goes on\n"
    assert done.err.startswith("error: interrupted at ")
    assert done.err.endswith(said)
    assert not (tmp_path / "kept.json").exists()
    again = interrupt(10**9, *asked, cwd=tmp_path)
    assert (again.code, again.err) == (0, "")
    assert file.read_bytes().splitlines()[: len(lines)] == lines
    assert len(json.loads((tmp_path / "kept.json").read_text())["answers"]) == 400


def test_pairs_of_the_problems_that_are_done_are_written(base: Path, workshop: Path, tmp_path: Path) -> None:
    asked = ("data", "pairs", base, workshop / "reverse.toml", "pairs.jsonl", "--problems=500", "--samples=4")
    done = interrupt(60, *asked, cwd=tmp_path)
    pairs = list(read_records(DatasetSettings(path=str(tmp_path / "pairs.jsonl"))))
    assert done.code == 130
    assert done.err.count("\n") == 1
    assert done.err.startswith("error: interrupted after ")
    assert done.out.startswith(f"pairs.jsonl: {len(pairs)} pairs from ")


def test_nothing_done_is_one_line_and_no_file(untrained: Path, tmp_path: Path) -> None:
    asked = ("data", "pairs", untrained, "reverse.toml", "pairs.jsonl", "--problems=500")
    done = interrupt(1, *asked, cwd=tmp_path)
    assert (done.code, done.out) == (130, "")
    assert done.err == "error: interrupted after 0 of 500 problems\n"
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
    return ["pretrain", f"{workshop}/base.toml", f"--run.directory={directory}", *overrides]


def test_a_full_disk(workshop: Path, base: Path, tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    checkpoint = latest_checkpoint(base / "checkpoints")
    assert checkpoint is not None
    room = int(1.6 * sum(file.stat().st_size for file in checkpoint.iterdir()))  # for one checkpoint and a half
    mount = f"mount -t tmpfs -o size={room} tmpfs '{disk}'"
    if subprocess.run([*PRIVATE_MOUNTS, mount], capture_output=True, check=False).returncode:
        pytest.skip("no user may mount a tmpfs here")
    command = shlex.join([*NMOE, *run_of(workshop, disk)])
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
    bounded = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    done = Forked(tmp_path, *run_of(workshop, tmp_path), before=bounded).ended()
    assert done.code == 2, done
    assert done.err.startswith(f"error: {tmp_path}/base/checkpoints/step_000001: cannot be written: ")
    assert done.err.count("\n") == 1
    assert list((tmp_path / "base" / "checkpoints").iterdir()) == []
