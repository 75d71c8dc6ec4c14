"""What `[monitor] samples = "all"` records of a step, against the run's own lines and against formulas by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from nmoe.runs.ledger import Ledger, read_lines, read_metrics

Reinforce = Callable[..., Path]
SMALL = ("--run.steps=2", "--batch.prompts_per_step=4", "--batch.group_size=4", "--monitor.samples=all")


def columns(run: Path, step: int) -> tuple[dict[str, Any], float]:
    with safe_open(run / f"samples/step_{step:06d}.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.offset_keys()}, float(file.metadata()["gradient_sum"])


def by_sample(column: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
    return np.split(column, np.cumsum(tokens)[:-1])


def test_columns_are_those_that_the_update_had(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL)
    for row in read_metrics(run):
        records = read_lines(run / f"samples/step_{row['step']:06d}.jsonl")
        found, gradient_sum = columns(run, row["step"])
        assert len(records) == 4 * row["groups"] == len(found["tokens"])
        trained = [one for one in records if one["left_out"] is None]
        assert {one["left_out"] for one in records} <= {None, "zero_variance"}
        assert found["tokens"].tolist() == [sum(one["mask"]) if one["left_out"] is None else 0 for one in records]
        assert found["tokens"].sum() == row["tokens_in_batch"] == len(found["weight"])
        behaviour = np.concatenate([one["logprobs"] for one in trained])
        assert np.abs(found["logprob"] - behaviour).max() == pytest.approx(row["mismatch_abs_max"], abs=1e-7)
        assert found["entropy"].mean() == pytest.approx(row["entropy_mean"], rel=1e-6)
        for one, advantage in zip(records, by_sample(found["advantage"], found["tokens"]), strict=True):
            rewards = [other["reward"] for other in records if other["group"] == one["group"]]
            assert advantage.tolist() == pytest.approx([one["reward"] - np.mean(rewards)] * len(advantage))
        # One update on fresh samples: the ratio is 1 but for rounding, so that the gradient is - weight x advantage.
        assert found["gradient"] == pytest.approx(-found["weight"] * found["advantage"], rel=1e-4, abs=1e-9)
        assert gradient_sum == pytest.approx(float(np.abs(found["gradient"]).sum(dtype=np.float64)))
        experts, load = found["experts"], np.array([row["expert_load/0"], row["expert_load/1"]])
        assert (experts.dtype, experts.shape[1:]) == (np.uint8, (2, 2))
        assert (np.diff(np.sort(experts)) > 0).all()
        assert experts.max() < load.shape[1]


def test_a_share_of_groups_and_a_limit_on_the_size(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--monitor.samples_share=1e-9", "--monitor.samples_mb=1")
    records = read_lines(run / "samples/step_000001.jsonl")
    assert [(one["group"], one["index"]) for one in records] == [(0, index) for index in range(4)]
    assert [one for one in read_lines(run / "alerts.jsonl") if "samples_mb" in one["message"]] == []


def test_a_full_folder_leaves_the_first_group(reinforce: Reinforce, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Ledger.samples
    monkeypatch.setattr(Ledger, "samples", lambda *arguments: 100 * written(*arguments))
    run = reinforce(*SMALL, "--monitor.samples_mb=1")
    first, second = (read_lines(run / f"samples/step_00000{step}.jsonl") for step in (1, 2))
    assert len({one["group"] for one in first}) >= 4
    assert {one["group"] for one in second} == {0}
    (alert,) = [one for one in read_lines(run / "alerts.jsonl") if "samples_mb" in one["message"]]
    assert alert["step"] == 1


def test_several_updates_record_the_policy_before_the_first(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--batch.updates_per_step=2")
    found, _ = columns(run, 1)
    records = read_lines(run / "samples/step_000001.jsonl")
    behaviour = np.concatenate([one["logprobs"] for one in records if one["left_out"] is None])
    assert "entropy" not in found
    assert np.abs(found["logprob"] - behaviour).max() < 1e-4


def test_the_first_group_alone_is_recorded_without_columns(reinforce: Reinforce) -> None:
    run = reinforce("--run.steps=1", "--batch.prompts_per_step=4", "--batch.group_size=4")
    assert [file.name for file in sorted((run / "samples").iterdir())] == ["step_000001.jsonl"]
    assert len(read_lines(run / "samples/step_000001.jsonl")) == 4
    assert "group" not in json.loads((run / "samples/step_000001.jsonl").read_text().splitlines()[0])
