"""spikes.jsonl: what counts as a spike, and which prompts and samples its record names."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import answer, branched, group, random_groups
from tiny_models import tiny_model

import nmoe
from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.learner import Learner
from nmoe.monitor.update import spikes_in
from nmoe.rl.experience import policy_batch
from nmoe.rl.spikes import spike_record
from nmoe.trajectory import Group, Trajectory

__all__ = ["tiny_model"]


def test_what_is_beyond_its_limit() -> None:
    calm = {"grad_norm": 50.0, "log_ratio_raw_max": 5.0, "ratio_max": 10.0, "ppo_kl": -0.1}
    assert spikes_in(calm, kl_above=0.1) == []
    assert spikes_in({**calm, "grad_norm": 50.1, "ppo_kl": -0.11}, kl_above=0.1) == ["grad_norm", "ppo_kl"]
    assert spikes_in({**calm, "ratio_max": 11.0}, kl_above=0.1) == ["ratio_max"]
    assert spikes_in({**calm, "log_ratio_raw_max": 5.1}, kl_above=0.2) == ["log_ratio_raw_max"]
    assert spikes_in({**calm, "update_log_ratio_min": -5.1}, kl_above=0.1) == ["update_log_ratio_min"], "in one update"
    assert spikes_in({**calm, "update_kl": 0.11, "update_ratio_max": 11.0}, 0.1) == ["update_ratio_max", "update_kl"]
    assert spikes_in({"skipped": 1.0}, kl_above=0.1) == []


def named(groups: list[Group]) -> list[Group]:
    """The groups with a problem of its own each, and the samples numbered."""
    found = []
    for place, one in enumerate(groups):
        problem = replace(one.problem, id=f"p/{place}", question=f"Sort: {place}")
        samples = (replace(t, problem=problem, index=index) for index, t in enumerate(one.trajectories))
        found.append(Group(problem, tuple(samples)))
    return found


def moved(learner: Learner, sample: Trajectory) -> list[float]:
    """The log ratios of one sample's tokens, computed with the sample by itself."""
    batch = policy_batch([sample], None, "token", 0)
    assert batch.behaviour_logprobs_T is not None
    return (learner.logprobs(batch).result() - batch.behaviour_logprobs_T[batch.scored_T]).tolist()


def test_the_worst_samples_are_those_that_the_update_moved_most(tiny_model: Any) -> None:
    learner = Learner(tiny_model(), OptimizerSection(), 10, 4096)
    cases = [*random_groups(3, 3), group(branched(1.0, [3, 4], [9, 9, 9]), answer(0.0, [8], [-40.0]))]
    groups = named(cases)
    samples = [sample for one in groups for sample in one.trajectories]
    metrics = {"grad_norm": 60.0, "ppo_kl": 0.01, "ratio_max": 1.2, "reward_mean": 0.5, "log_ratio_min": -0.3}
    record = spike_record(7, ["grad_norm"], metrics, samples, learner, lambda ids: " ".join(map(str, ids)))
    expected = {
        (sample.problem.id, sample.index): (moved(learner, sample), sample)
        for one in groups
        for sample in one.trajectories
    }
    order = sorted(expected, key=lambda key: -max(map(abs, expected[key][0])))
    assert [(one["problem"], one["index"]) for one in record["worst"]] == order[:4]
    assert record["worst"][0]["problem"] == "p/3", "its one token had a log-probability of -40 when it was sampled"
    for one in record["worst"]:
        ratios, sample = expected[one["problem"], one["index"]]
        assert one["tokens"] == len(ratios)
        ratios = [min(ratio, 20.0) for ratio in ratios]
        assert one["log_ratio_max"] == pytest.approx(max(ratios), abs=1e-4)
        assert one["log_ratio_min"] == pytest.approx(min(ratios), abs=1e-4)
        assert one["log_ratio_abs_mean"] == pytest.approx(sum(map(abs, ratios)) / len(ratios), abs=1e-4)
        assert (one["reward"], one["text"]) == (sample.grade.score, " ".join(map(str, sample.token_ids)))
    digest = hashlib.sha256(b"Sort: 2").hexdigest()[:16]
    assert record["prompts"]["p/2"] == digest
    assert {one["prompt"] for one in record["worst"] if one["problem"] == "p/2"} <= {digest}
    assert {name: record[name] for name in ("step", "spikes", "grad_norm", "ratio_max", "log_ratio_min")} == {
        "step": 7, "spikes": ["grad_norm"], "grad_norm": 60.0, "ratio_max": 1.2, "log_ratio_min": -0.3
    }  # fmt: skip
    assert "reward_mean" not in record


def test_weights_that_are_no_numbers_can_be_recorded(tiny_model: Any) -> None:
    learner = Learner(tiny_model(), OptimizerSection(), 10, 4096)
    with torch.no_grad():
        next(learner.model.parameters()).fill_(math.nan)
    record = spike_record(1, ["grad_norm"], {}, named(random_groups(1, 2))[0].trajectories, learner, str)
    assert json.dumps(record, allow_nan=False)
    assert record["worst"][0]["log_ratio_max"] == 20.0


@pytest.mark.parametrize("updates", [{"updates_per_step": 2, "passes_per_step": 2}, {}])
def test_a_run_with_a_far_too_high_learning_rate_records_its_spikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: dict[str, int]
) -> None:
    monkeypatch.chdir(tmp_path)

    def vowels(completions: list[str], **columns: Any) -> list[float]:
        return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]

    config: dict[str, Any] = {
        "run": {"steps": 4, "threads": 1},
        "sampling.max_new_tokens": 12,
        "batch": {"prompts_per_step": 2, "group_size": 8, **updates},
        "optimizer": {"learning_rate": 0.3, "warmup_steps": 0},
    }
    model = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64}
    run = nmoe.train_rl(model, [{"prompt": "Sing."}, {"prompt": "Hum."}], [vowels], config=config)
    spikes = [json.loads(line) for line in (run.path / "spikes.jsonl").read_text().splitlines()]
    rows = {row["step"]: row for row in run.metrics}
    assert spikes[0]["spikes"]
    for spike in spikes:
        row = rows[spike["step"]]
        assert spike["spikes"] == spikes_in(row, 0.1)
        assert (spike["ppo_kl"], spike["log_ratio_raw_max"]) == (row["ppo_kl"], row["log_ratio_raw_max"])
        assert 1 <= len(spike["worst"]) <= 4
        digests = {hashlib.sha256(prompt.encode()).hexdigest()[:16] for prompt in ("Sing.", "Hum.")}
        assert set(spike["prompts"].values()) <= digests
    assert {spike["step"] for spike in spikes} == {step for step, row in rows.items() if spikes_in(row, 0.1)}
