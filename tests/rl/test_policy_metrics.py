"""Metrics of a policy step, and the samples of a spike."""

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
from nmoe.learner.optimizer import StepResult
from nmoe.learner.passes import PassResult
from nmoe.learner.routing import RoutingStatistics
from nmoe.monitor.update import spikes_in
from nmoe.rl.experience import policy_batch
from nmoe.rl.metrics import rollout_metrics
from nmoe.rl.spikes import spike_record
from nmoe.rl.update import update_metrics
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Failure, Grade, Problem, Sample, Sampling, ToolCall, ToolEvent, Turn, Verdict

# The grader's other extras, averaged without further ado.
REST = {"has_boxed": 0.0, "parse_method": 0.0, "boxed_in_final": 0.0, "reasoning_ok": 1.0}


def response(source: str, reward: float, correct: float, tokens: int, failure: Failure = "ok") -> Trajectory:
    truncated = float(failure == "truncated")
    extras = {"correctness": correct, "has_answer": 1 - truncated, "truncated_response": truncated} | REST
    extras["format_ok"] = float(failure == "ok")
    sample = Sample([1] * tokens, [-1.0] * tokens, [0] * tokens, "stop")
    problem = Problem(f"{source}/0", "reverse", "Reverse: 12", "21", source)
    return Trajectory(problem, 0, (5,), (Turn((), sample),), Grade(reward, {}, failure, extras, "21"), Sampling(8))


def test_rollout_metrics() -> None:
    metrics = rollout_metrics(
        [
            response("b", 0.0, 0.0, 8, "truncated"),
            response("a", 1.0, 1.0, 3),
            response("a", 0.5, 0.0, 2, "parse_error"),
            response("b", 0.0, 0.0, 2, "grader_error"),  # no verdict on the policy: in no mean but that of lengths
            response("a", 0.9, 0.0, 5),  # above the mean of 0.6 though wrong
        ]
    )
    assert metrics == {
        "reward_mean": pytest.approx(0.6),
        "reward_std": pytest.approx(math.sqrt((0.36 + 0.16 + 0.01 + 0.09) / 4)),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "reward_p90": pytest.approx(0.97),  # at 2.7 of [0, 0.5, 0.9, 1]
        "correctness": 0.25,
        "correctness/a": pytest.approx(1 / 3),
        "correctness/b": 0.0,
        "format_ok/a": pytest.approx(2 / 3),
        "format_ok/b": 0.0,
        "has_answer": 0.75,
        "truncated": 0.25,
        "format_ok": 0.5,
        "rewarded_but_wrong": 0.25,
        "high_reward_but_wrong": 0.25,
        "response_length_mean": 4.0,
        "grader_error_rate": 0.2,
        "turns_mean": 1.0,
        "tool_calls_mean": 0.0,
        "failures/grader_error": 1.0,
        "failures/ok": 2.0,
        "failures/parse_error": 1.0,
        "failures/truncated": 1.0,
        **REST,
    }


def test_a_small_reward_for_the_format_is_no_high_one() -> None:
    """Most samples of a base are wrong, and those in the right format earn 0.1, which is above the mean."""
    samples = [response("a", reward, 0.0, 3) for reward in (0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.6, 0.5)]
    samples.append(response("a", 1.1, 1.0, 3))
    weighed = [replace(t, grade=replace(t.grade, weights={"correctness": 1.0, "format": 0.1})) for t in samples]
    metrics = rollout_metrics(weighed)
    assert metrics["reward_mean"] == pytest.approx(0.26)
    assert metrics["rewarded_but_wrong"] == 0.2
    assert metrics["high_reward_but_wrong"] == 0.1, "0.6 of 1; 0.5 is not more than half"
    shaped = rollout_metrics([t for t in weighed if t.grade.score not in (0.6, 0.5, 1.1)])
    assert (shaped["rewarded_but_wrong"], shaped["high_reward_but_wrong"]) == (pytest.approx(4 / 7), 0.0)


def test_the_layers_that_settled_it() -> None:
    layers = ["exact", "exact", "symbolic", None]
    trajectories = [response("a", 1.0, 1.0, 3) for _ in layers]
    for trajectory, layer in zip(trajectories, layers, strict=True):
        verdict = None if layer is None else Verdict.of(True, layer, "right")
        object.__setattr__(trajectory, "grade", replace(trajectory.grade, verdict=verdict))
    metrics = rollout_metrics(trajectories)
    assert metrics["settled/exact"] == pytest.approx(2 / 3)
    assert metrics["settled/symbolic"] == pytest.approx(1 / 3)


def test_calls_are_counted_by_their_own_failures() -> None:
    def event(failure: Failure) -> ToolEvent:
        return ToolEvent(ToolCall("add", "{}", "0/0"), failure, "", "", 0.0, 0.0)

    used = replace(response("a", 1.0, 1.0, 3), tool_events=(event("ok"), event("timeout"), event("parse_error")))
    used = replace(used, turns=used.turns * 2)
    metrics = rollout_metrics([used, response("a", 0.0, 0.0, 3)])
    assert (metrics["turns_mean"], metrics["tool_calls_mean"], metrics["response_length_mean"]) == (1.5, 1.5, 4.5)
    assert {name: value for name, value in metrics.items() if "failures/" in name} == {
        "failures/ok": 2.0,  # a failed call does not end a trajectory
        "tool_failures/parse_error": 1.0,
        "tool_failures/timeout": 1.0,
    }


def test_a_step_whose_every_sample_was_lost_is_no_step() -> None:
    with pytest.raises(RuntimeError, match=r"lost to the infrastructure: .'grader_error': 2."):
        rollout_metrics([response("b", 0.0, 0.0, 2, "grader_error") for _ in range(2)])


LOG_RATIO_N = torch.tensor([0.1, -0.3, 25.0])
PASS = PassResult(
    loss=-0.5,
    auxiliary_loss=0.125,
    tokens={
        "log_ratio": LOG_RATIO_N,
        "clipped": torch.tensor([0.0, 1.0, 1.0]),
        "entropy": torch.tensor([0.7, 0.2, 0.3]),
        "reference_kl": torch.tensor([0.5, 0.0, 0.25]),
    },
    routing=None,
)
STEP = StepResult(grad_norm=2.5, learning_rate=1e-3)


def test_the_mismatch_of_each_engine_is_over_its_own_tokens() -> None:
    found = update_metrics(PASS, STEP, torch.ones(3), None, torch.tensor([2, 0, 2]))
    assert {name: value for name, value in found.items() if "engine" in name} == {
        "mismatch_abs_mean/engine_0": pytest.approx(0.3),
        "mismatch_abs_mean/engine_2": pytest.approx((0.1 + 25) / 2),
    }
    measured = update_metrics(PASS, STEP, torch.ones(3), torch.tensor([0.5, -1.0, 0.0]), torch.tensor([2, 0, 2]))
    assert measured["mismatch_abs_mean/engine_2"] == 0.25, "before several updates, not in them"


def test_update_metrics() -> None:
    metrics = update_metrics(PASS, STEP, torch.tensor([1.0, -1.0, 0.5, -0.5]))
    k3 = [math.exp(c) - 1 - c for c in (0.1, -0.3, 20.0)]  # the log ratio is clamped to 20
    assert metrics == {
        "loss": -0.5,
        "grad_norm": 2.5,
        "learning_rate": 1e-3,
        "ppo_kl": pytest.approx(-24.8 / 3),
        "ppo_clip_ratio": pytest.approx(2 / 3),
        "log_ratio_raw_max": 25.0,
        "log_ratio_max": 20.0,
        "log_ratio_min": pytest.approx(-0.3),
        "ratio_max": pytest.approx(math.exp(20)),
        "log_ratio_abs_p99": 25.0,
        "tokens_in_batch": 3.0,
        "entropy_mean": pytest.approx(0.4),
        "entropy_p10": pytest.approx(0.2),
        "entropy_p90": pytest.approx(0.7),
        "mismatch_abs_mean": pytest.approx(25.4 / 3),
        "mismatch_abs_max": 25.0,
        "mismatch_kl": pytest.approx(sum(k3) / 3),
        "advantage_mean": 0.0,
        "advantage_std": pytest.approx(math.sqrt(2.5 / 4)),
        "advantage_min": -1.0,
        "advantage_max": 1.0,
        "reference_kl": 0.25,
    }


def test_percentiles_are_taken_from_the_sorted_tokens() -> None:
    tokens = {
        "log_ratio": -torch.arange(200.0).flip(0),
        "clipped": torch.zeros(11),
        "entropy": torch.arange(11.0).flip(0),
    }
    metrics = update_metrics(PassResult(0.0, 0.0, tokens, None), STEP, torch.zeros(1))
    assert (metrics["entropy_p10"], metrics["entropy_p90"]) == (1.0, 9.0)
    assert metrics["log_ratio_abs_p99"] == 197.0  # 0.99 x 199 is 197.01
    assert "reference_kl" not in metrics


def test_routing_metrics_by_layer() -> None:
    routing = RoutingStatistics(
        load_YE=torch.tensor([[3, 1], [4, 0]]),
        entropy_sum_Y=torch.tensor([2.0, 1.0], dtype=torch.float64),
        tokens=4,
        picks=8,
        flips=1,
        largest_flip_gap=1e-6,
    )
    metrics = update_metrics(PassResult(0.0, 0.125, PASS.tokens, routing), STEP, torch.zeros(1))
    assert {name: value for name, value in metrics.items() if "/" in name or "rout" in name} == {
        "route_picks": 8.0,
        "route_flips": 1.0,
        "route_flip_gap_max": 1e-6,
        "router_aux_loss": 0.125,
        "expert_load_max_violation/0": 0.5,  # 3 over a mean of 2
        "expert_load_max_violation/1": 1.0,
        "router_entropy/0": 0.5,
        "router_entropy/1": 0.25,
        "dead_experts/0": 0.0,
        "dead_experts/1": 1.0,
        "expert_load/0": [0.75, 0.25],
        "expert_load/1": [1.0, 0.0],
    }


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
    for name in (*calm, "update_kl", "update_log_ratio_max", "update_log_ratio_min", "update_ratio_max"):
        assert spikes_in({**calm, name: math.nan}, kl_above=0.1) == [name], "a comparison with NaN is false"


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
    metrics = {"grad_norm": 60.0, "update_kl": math.nan, "update_log_ratio_max": math.inf}
    record = spike_record(1, [*metrics], metrics, named(random_groups(1, 2))[0].trajectories, learner, str)
    assert json.dumps(record, allow_nan=False)
    assert (record["spikes"], record["grad_norm"], "update_kl" in record) == ([*metrics], 60.0, False)
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
