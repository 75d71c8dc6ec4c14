"""What `nmoe explain` refuses to execute, and what it does not compare because it would differ in a right record, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from untrained_run import untrained_run

from nmoe.errors import UserError
from nmoe.rl.explain import Explainer, Finding
from nmoe.runs.ledger import read_lines
from nmoe.types import ToolCall, ToolEvent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose advantages are normalised over the batch, of which the first group alone is recorded."""
    share = ("--monitor.samples_share=1e-9", "--algorithm.advantage=reinforce_pp")
    return untrained_run(tmp_path_factory.mktemp("tiny"), *share)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run", symlinks=True)


def found(run: Path, step: int = 2) -> dict[str, Finding]:
    """The findings of the first token that was trained on."""
    records = read_lines(run / f"samples/step_{step:06d}.jsonl")
    line = next(line for line, one in enumerate(records) if one["left_out"] is None)
    return {one.name: one for one in Explainer(run).explain(step, line, records[line]["mask"].index(1))}


def change_records(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = run / "samples/step_000002.jsonl"
    records = read_lines(file)
    for one in records:
        change(one)
    file.write_text("".join(json.dumps(one) + "\n" for one in records))


def rewrite(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_advantages_over_a_batch_that_is_recorded_in_part_are_not_compared(run: Path) -> None:
    by_name = found(run)
    assert [one for one in by_name.values() if one.recorded is not None] == []
    for name in ("advantage", "weight in the loss", "share of gradient"):
        assert "does not hold the whole batch" in by_name[name].why_not
    assert {name for name, one in by_name.items() if not one.why_not} == {
        "reward", "mask", "log-probability", "learner's", "entropy", "route",
    }  # fmt: skip


def test_rounding_without_exact_numerics_is_no_difference(run: Path) -> None:
    rewrite(run / "provenance.json", '"numerics": "exact"', '"numerics": "fast"')

    def moved(by: float) -> Callable[[dict[str, Any]], None]:
        return lambda record: record.update(logprobs=[one + by for one in record["logprobs"]])

    change_records(run, moved(-4e-4))
    by_name = found(run)
    assert by_name["log-probability"].recorded is None
    assert not by_name["log-probability"].why_not
    assert "numerics were fast, whose bits depend on the batch" in by_name["route"].why_not
    change_records(run, moved(-1e-2))
    assert str(found(run)["log-probability"].recorded).endswith("sampled")
    # In half precision rounding can turn a route, and move a token as far as a fault does.
    rewrite(run / "config.toml", 'precision = "float32"', 'precision = "bfloat16"')
    rewrite(run / "config.toml", 'numerics = "exact"', 'numerics = "fast"')
    change_records(run, lambda record: record.update(versions=[0 for _ in record["versions"]]))
    shutil.move(run / "samples/step_000002.jsonl", run / "samples/step_000001.jsonl")
    assert "numerics were fast" in found(run, 1)["log-probability"].why_not


@pytest.mark.parametrize("steps", ["true", "false"])
def test_advantages_by_a_verifier_s_step_rewards_are_not_derived(run: Path, steps: str) -> None:
    verifier = f'[{{ name = "v", type = "verifier", path = "verifier", weight = 0.0, steps = {steps} }}]'
    rewrite(run / "config.toml", "rewards = []", f"rewards = {verifier}")
    by_name = found(run)
    assert [one for one in by_name.values() if one.recorded is not None] == []
    for name in ("advantage", "share of gradient"):
        assert ("a verifier's step rewards" in by_name[name].why_not) == (steps == "true")
        assert by_name[name].derived == "none"
    assert {name for name, one in by_name.items() if not one.why_not} >= {"reward", "log-probability", "route"}


def test_the_reward_of_a_sample_that_called_a_tool_is_left_to_a_replay(run: Path) -> None:
    call = ToolCall("python", '{"code": "print(2 + 2)"}', "0/0")
    event = ToolEvent(call, "ok", "4\n", "", started_s=0.1, wall_s=0.1).record()
    change_records(run, lambda record: record.update(tool_events=[event], reward=record["reward"] + 1))
    by_name = found(run)
    assert by_name["reward"].why_not == "its grader reads files or calls of tools; nmoe replay runs them"
    assert {name for name, one in by_name.items() if not one.why_not} == {
        "mask", "log-probability", "learner's", "entropy", "route",
    }  # fmt: skip


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a module of the working directory writes when it is imported."""
    imported = tmp_path / "imported"
    (tmp_path / "foreign.py").write_text(f"open({str(imported)!r}, 'w').close()\ndef part(*_): raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    return imported


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('advantage = "reinforce_pp"', 'advantage = "foreign:part"', "advantage foreign:part from .*foreign.py"),
        ('loss = "clip"', 'loss = "foreign:part"', "loss foreign:part from .*foreign.py"),
        ('kind = "native"', 'kind = "foreign:part"', "engine foreign:part from .*foreign.py"),
    ],
)
def test_code_that_a_run_names_is_not_imported(run: Path, code: Path, old: str, new: str, said: str) -> None:
    rewrite(run / "config.toml", old, new)
    with pytest.raises(UserError, match=f"{said}.*--allow-user-code") as error:
        Explainer(run)
    assert (error.value.exit_code, code.exists()) == (2, False)


def test_code_of_the_environment_is_not_imported(run: Path, code: Path) -> None:
    text = (run / "config.toml").read_text()
    reward = '[{ name = "own", type = "function", call = "foreign:part", weight = 1.0 }]'
    rewrite(run / "config.toml", "rewards = []", f"rewards = {reward}")
    by_name = found(run)
    assert "--allow-user-code runs it" in by_name["reward"].why_not
    assert by_name["log-probability"].recorded is None
    (run / "config.toml").write_text(text)
    change_records(run, lambda record: record.update(task_type="foreign:part"))
    assert "--allow-user-code runs it" in found(run)["reward"].why_not
    assert not code.exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("provenance.json", '"numerics": "exact"', '"numerics": "fast"', "its numerics were fast"),
        ("config.toml", 'kind = "native"', 'kind = "vllm"', 'engine.kind = "vllm" sampled'),
    ],
)
def test_steps_that_may_come_to_other_weights_are_not_trained_again(
    run: Path, file: str, old: str, new: str, said: str
) -> None:
    shutil.rmtree(run / "checkpoints/step_000001")
    rewrite(run / file, old, new)
    with pytest.raises(UserError, match=said):
        Explainer(run, replay=True).explain(2, 0, 0)
