"""The numbers of a step, worked out by hand from four responses and three tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nmoe.learner.optimizer import StepResult
from nmoe.learner.passes import PassResult
from nmoe.learner.routing import RoutingStatistics
from nmoe.rl.metrics import rollout_metrics
from nmoe.rl.update import update_metrics
from nmoe.trajectory import Trajectory
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
