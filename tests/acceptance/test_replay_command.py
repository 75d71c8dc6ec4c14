"""`nmoe replay` on the bundles of a run: the same again, log-probabilities included, or the first difference and exit code 1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Result

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.model.checkpoint import read_config
from nmoe.rl.launch import train
from nmoe.runs.resolve import resolve_checkpoint

Nmoe = Callable[..., Result]


@pytest.fixture(scope="module")
def run(workshop: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, every trajectory kept."""
    overrides = [
        f"--run.directory={tmp_path_factory.mktemp('runs')}",
        *("--run.steps=3", "--batch.prompts_per_step=4", "--batch.group_size=4", "--checkpoint.every_steps=1"),
        *(
            "--checkpoint.keep=3",
            "--monitor.replay_sample_rate=1",
            "--sampling.temperature=0.8",
            "--sampling.top_p=0.9",
        ),
    ]
    return train(load_run(workshop / "rl.toml", RLConfig, overrides))


def of_step(run: Path, step: int) -> list[Path]:
    return sorted(run.glob(f"replay/step_{step:06d}-*"))


# documented: nmoe replay BUNDLE --checkpoint CHECKPOINT
def test_every_bundle_of_a_run_replays(nmoe: Nmoe, run: Path, base: Path) -> None:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in (1, 2, 3):
        bundles = of_step(run, step)
        assert len(bundles) == 4 * metrics[step - 1]["groups"] >= 16
        checkpoint = base if step == 1 else run / f"checkpoints/step_{step - 1:06d}"
        for bundle in bundles[:4]:
            result = nmoe("replay", bundle, "--checkpoint", checkpoint)
            assert (result.code, result.err) == (0, ""), result
            lines = result.out.splitlines()
            assert lines[0].startswith(f"{bundle}: step {step}, problem reverse/")
            assert [line.split()[0] for line in lines[1:-1]] == [
                *("record", "environment", "prompt", "text", "turns", "tools", "grade", "logprobs", "digests")
            ]
            assert " tokens, apart by " in lines[8]
            assert lines[-1] == "all the same"
    reasons = {bundle.name.split("-")[1] for bundle in run.glob("replay/step_*")}
    assert reasons >= {"sampled", "parse_error"}


def test_the_longer_context_of_a_run_is_that_of_its_replay(
    nmoe: Nmoe, workshop: Path, base: Path, tmp_path: Path
) -> None:
    """YaRN turns every position's keys otherwise, so the checkpoint's own tables give other log-probabilities."""
    longer = 8 * read_config(resolve_checkpoint(base))[1].context_tokens
    overrides = [f"--run.directory={tmp_path}", "--run.steps=1", f"--model.context_tokens={longer}"]
    overrides += ["--monitor.replay_sample_rate=1", "--batch.prompts_per_step=2", "--batch.group_size=2"]
    bundle = of_step(train(load_run(workshop / "rl.toml", RLConfig, overrides)), 1)[0]
    same = nmoe("replay", bundle, "--checkpoint", base)
    assert (same.code, same.err) == (0, "")
    content = json.loads((bundle / "bundle.json").read_text())
    assert content["trajectory"]["model"].pop("context_tokens") == longer
    (bundle / "bundle.json").write_text(json.dumps(content))
    assert "first difference: logprobs" in nmoe("replay", bundle, "--checkpoint", base).err


def test_a_difference_is_named_and_ends_with_1(command: Nmoe, nmoe: Nmoe, run: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "replay" / "mine"
    shutil.copytree(of_step(run, 2)[0], bundle)
    without = nmoe("replay", bundle)
    assert without.code == 2
    assert "there is no tokenizer/ beside it" in without.err
    plain = command("replay", bundle, "--tokenizer", run)
    assert (plain.code, plain.err) == (0, "")
    assert "logprobs     not rescored: no --checkpoint" in plain.out
    content = json.loads((bundle / "bundle.json").read_text())
    content["trajectory"]["logprobs"][1] -= 0.001
    (bundle / "bundle.json").write_text(json.dumps(content))
    checkpoint = run / "checkpoints/step_000001"
    found = nmoe("replay", bundle, "--checkpoint", checkpoint)
    assert found.code == 1
    before, now = content["trajectory"]["logprobs"][1], content["trajectory"]["logprobs"][1] + 0.001
    assert found.err.startswith(f"error: {bundle}: first difference: logprobs: token 1: {before:.6f} in the bundle, ")
    assert float(found.err.split(" in the bundle, ")[1].split()[0]) == pytest.approx(now, abs=1e-4)
    assert found.err.endswith("further apart than 0.0001 (1 such tokens) (and digests)\n")
    assert "all the same" not in found.out


def test_other_weights_are_refused(nmoe: Nmoe, run: Path, base: Path) -> None:
    later = nmoe("replay", of_step(run, 2)[0], "--checkpoint", run / "checkpoints/step_000002")
    assert later.code == 2
    assert (
        "holds the weights of version 2, and these tokens were sampled with version 1; name the checkpoint of step 1"
        in later.err
    )
    first = nmoe("replay", of_step(run, 1)[0], "--checkpoint", run / "checkpoints/step_000001")
    assert first.code == 2
    assert "not the weights that the run started from, which these tokens were sampled with" in first.err
    assert nmoe("replay", run).err.startswith(f"error: {run}: no replay bundle (no bundle.json in it)")
