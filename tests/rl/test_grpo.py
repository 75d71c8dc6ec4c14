"""The GRPO recipe on a few steps of a tiny model: what is trained on, what is dropped, skipped or masked, and what stops it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.eval.evaluate import Evaluation
from nmoe.eval.probes import HeldOutProblems
from nmoe.learner.batch import Batch
from nmoe.rl import update
from nmoe.rl.experience import Experience
from nmoe.rl.metrics import divergence
from nmoe.rl.replay_bundle import ReplayDifferenceError, replay_command
from nmoe.rollout.collector import GradingError
from nmoe.rollout.episode import request_seed
from nmoe.rollout.tickets import Tickets
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.trajectory import Trajectory
from nmoe.types import Problem, Sample, Verdict

Reinforce = Callable[..., Path]

SMALL = ("--run.steps=3", "--batch.prompts_per_step=6", "--batch.group_size=4")
CURRICULUM = """
[environment.curriculum]
window_steps = 3
[[environment.curriculum.stages]]
name = "format"
weights = { format = 1.0 }
gate = { metric = "format_ok", at_least = 0.1 }
[[environment.curriculum.stages]]
name = "correctness"
weights = { correctness = 1.0 }
"""


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[Trajectory]]:
    """The trajectories of every training batch, in order."""
    seen: list[list[Trajectory]] = []
    policy_batch = update.policy_batch

    def record(trajectories: Sequence[Trajectory], *rest: Any) -> Batch:
        seen.append(list(trajectories))
        return policy_batch(trajectories, *rest)

    monkeypatch.setattr(update, "policy_batch", record)
    return seen


def _state(run: Path) -> dict[str, Any]:
    """What the run's checkpoint holds beside model and optimizer."""
    state: dict[str, Any] = json.loads((resolve_checkpoint(run) / "state.json").read_text())
    return state


def test_groups_all_alike_are_dropped_counted_and_replaced_once(
    reinforce: Reinforce, batches: list[list[Trajectory]]
) -> None:
    run = reinforce(*SMALL, "--batch.max_refills=1")
    rows = read_metrics(run)
    for row, trajectories in zip(rows, batches, strict=True):
        kept = Counter(t.problem.id for t in trajectories)
        assert set(kept.values()) == {4}
        for problem_id in kept:
            assert {t.grade.score for t in trajectories if t.problem.id == problem_id} == {0.0, 1.0}
        assert row["groups"] - row["groups_zero_variance"] == len(kept) <= 6
        assert row["tokens_in_batch"] == sum(t.sampled_tokens for t in trajectories)
        assert row["refills"] == (row["groups"] > 6)
        assert len(kept) == 6 or row["refills"] == 1, "a step short of groups has used its refill"
    assert sum(row["refills"] for row in rows) > 0
    state, groups = _state(run), int(sum(row["groups"] for row in rows))
    assert state["environment"]["pool"]["taken"] == groups
    trained = sum(len(trajectories) for trajectories in batches) // 4
    tokens = rows[-1]["tokens_trained"], rows[-1]["tokens_void"]
    assert state["tickets"] == {
        "next": groups,
        "outstanding": [],
        "trained": trained,
        "void": {"zero_variance": groups - trained},
        "trained_tokens": tokens[0],
        "void_tokens": tokens[1],
    }


def test_a_token_that_is_not_in_the_batch_stops_the_run(reinforce: Reinforce, monkeypatch: pytest.MonkeyPatch) -> None:
    by_group = Experience.tokens_by_group
    monkeypatch.setattr(
        Experience, "tokens_by_group", lambda self, n: [by_group(self, n)[0] - 1, *by_group(self, n)[1:]]
    )
    with pytest.raises(RuntimeError, match=r"position \d+: \d+ tokens trained and 0 masked, of \d+ that were sampled"):
        reinforce(*SMALL)


def test_a_group_that_a_checkpoint_left_outstanding_is_sampled_first(
    reinforce: Reinforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = ("--run.name=left", "--optimizer.min_lr_ratio=1", "--batch.max_refills=0")
    state = Tickets.state
    with monkeypatch.context() as patch:
        patch.setattr(Tickets, "state", lambda self: state(self) | {"outstanding": [4]})
        reinforce(*SMALL, *left, "--run.steps=1")
    run = reinforce(*SMALL, *left, "--run.steps=2", "--run.resume=true")
    seeds = [read_lines(run / f"samples/step_{step:06d}.jsonl")[0]["seed"] for step in (1, 2)]
    assert seeds == [request_seed(0, "train", position) for position in (0, 4)]
    assert _state(run)["environment"]["pool"]["taken"] == 11
    assert (_state(run)["tickets"]["next"], _state(run)["tickets"]["outstanding"]) == (11, [])


def test_without_refills_a_step_makes_do_with_fewer_groups(
    reinforce: Reinforce, batches: list[list[Trajectory]]
) -> None:
    run = reinforce(*SMALL, "--batch.max_refills=0")
    rows = read_metrics(run)
    assert {(row["groups"], row["refills"]) for row in rows} == {(6, 0)}
    assert sum(row["groups_zero_variance"] for row in rows) > 0
    assert [6 - row["groups_zero_variance"] for row in rows] == [len(batch) / 4 for batch in batches]
    assert _state(run)["environment"]["pool"]["taken"] == 18


def test_a_sample_depends_on_its_position_in_the_pool_not_on_how_it_was_reached(
    reinforce: Reinforce, batches: list[list[Trajectory]]
) -> None:
    """Sampled at once, or as a refill of a small step: the same weights give the same tokens."""
    step = ("--run.steps=1", "--batch.group_size=4")
    reinforce(*step, "--run.name=at_once", "--batch.prompts_per_step=12", "--batch.max_refills=0")
    refilled = reinforce(*step, "--run.name=refilled", "--batch.prompts_per_step=2", "--batch.max_refills=5")
    assert read_metrics(refilled)[0]["refills"] > 0
    at_once, few = ({(t.problem.id, t.index): t.token_ids for t in batch} for batch in batches)
    assert len(few) == 8
    assert few.items() <= at_once.items()


def test_a_step_whose_groups_are_all_alike_is_skipped(base: Path, reinforce: Reinforce) -> None:
    # No answer fits in two tokens: everything is truncated and earns nothing.
    run = reinforce(*SMALL, "--run.steps=2", "--batch.max_refills=2", "--sampling.max_new_tokens=2", text=CURRICULUM)
    rows = read_metrics(run)
    for row in rows:
        assert (row["skipped"], row["groups"], row["groups_zero_variance"], row["refills"]) == (1, 18, 18, 2)
        assert (row["truncated"], row["failures/truncated"], row["response_length_mean"]) == (1, 72, 2)
        assert not {"loss", "grad_norm", "ppo_kl", "mismatch_abs_max", "route_flips"} & row.keys()
    message = "every one of 18 groups had rewards all alike: no optimizer step was taken"
    assert read_lines(run / "alerts.jsonl") == [{"step": 1, "message": message}], "of several in a row the first"
    checkpoint = resolve_checkpoint(run)
    before, after = ((path / "model.safetensors").read_bytes() for path in (resolve_checkpoint(base), checkpoint))
    assert before == after
    assert json.loads((checkpoint / "optimizer.json").read_text())["steps"] == 0
    state = _state(run)
    assert state["learner"]["version"] == 0
    assert state["environment"]["pool"]["taken"] == 36
    assert state["environment"]["curriculum"]["window"] == [0.0, 0.0]


def test_a_stage_opens_where_its_rate_holds(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--run.steps=5", text=CURRICULUM)
    rows = read_metrics(run)
    assert min(row["format_ok"] for row in rows) > 0.1
    assert [row["curriculum_stage"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["weight/format"] for row in rows] == [1, 1, 1, 0, 0]
    assert [row["weight/correctness"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["reward_mean"] == row["format_ok"] for row in rows[:3]] == [True] * 3
    assert [row["reward_mean"] == row["correctness"] for row in rows[3:]] == [True] * 2


def test_the_reference_is_the_policy_before_training(reinforce: Reinforce) -> None:
    rows = read_metrics(reinforce(*SMALL, "--algorithm.kl_coef=0.1", "--optimizer.learning_rate=1e-2"))
    first, *later = [row["reference_kl"] for row in rows]
    assert first == 0
    assert min(later) > 1e-4


def test_no_reference_without_a_coefficient(reinforce: Reinforce) -> None:
    (row,) = read_metrics(reinforce(*SMALL, "--run.steps=1"))
    assert "reference_kl" not in row


class FailingEngine(NativeEngine):
    """Loses the first sample of every prompt after a token, as an engine that is shut down does."""

    async def samples(self, request: Request) -> AsyncIterator[tuple[int, Sample]]:
        async for index, sample in super().samples(request):
            if index == 0 and request.samples > 1:
                assert sample.routes is not None
                routes = sample.routes[: len(request.prompt_ids)]
                lost = Sample(sample.token_ids[:1], sample.logprobs[:1], sample.versions[:1], "abort", routes=routes)
                yield index, lost
            else:
                yield index, sample


class LosingEngine(FailingEngine):
    """Cuts the second sample of every prompt beside, as at the token limit."""

    async def samples(self, request: Request) -> AsyncIterator[tuple[int, Sample]]:
        async for index, sample in super().samples(request):
            if index == 1:
                sample.finish_reason = "length"
            yield index, sample


def test_every_token_that_the_engine_samples_is_trained_on_or_void(
    reinforce: Reinforce, batches: list[list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropped groups, samples that were lost, and truncated ones that are masked."""
    monkeypatch.setattr("nmoe.engine.rank_sampling.NativeEngine", LosingEngine)
    rows = read_metrics(reinforce(*SMALL, "--algorithm.mask_truncated=true", "--batch.oversampling=3"))
    sampled = trained = 0
    for row, trajectories in zip(rows, batches, strict=True):
        assert sum(t.truncated for t in trajectories) == len(trajectories) / 3, "index 1 of 1, 2 and 3"
        sampled += round(row["response_length_mean"] * row["groups"] * 4)
        trained += sum(t.sampled_tokens for t in trajectories if not t.truncated)
        found = [row[f"tokens_{name}"] for name in ("sampled", "trained", "void")]
        assert found == [sampled, trained, sampled - trained]
        assert 0 < trained < sampled
    assert sum(row["groups_surplus"] for row in rows) > 0


def test_aborted_samples_are_masked_and_recorded(
    reinforce: Reinforce, batches: list[list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe.engine.rank_sampling.NativeEngine", FailingEngine)
    run = reinforce(*SMALL)
    lost = read_lines(run / "failures.jsonl")
    rows = read_metrics(run)
    for row, trajectories in zip(rows, batches, strict=True):
        assert row["failures/engine_error"] == row["groups"]
        assert {t.index for t in trajectories} <= {1, 2, 3}
        # Two alike of three judged would differ from a reward of 0 for the lost one, and must not.
        for problem_id in {t.problem.id for t in trajectories}:
            assert {t.grade.score for t in trajectories if t.problem.id == problem_id} == {0.0, 1.0}
        assert row["tokens_in_batch"] == sum(t.sampled_tokens for t in trajectories)
        of_step = [record for record in lost if (record["step"], record["failure"]) == (row["step"], "engine_error")]
        assert len(of_step) == row["groups"]
        assert {(r["failure"], r["index"], len(r["token_ids"])) for r in of_step} == {("engine_error", 0, 1)}


def test_a_grader_that_raises_stops_the_run_with_its_sample(
    reinforce: Reinforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded: list[str] = []

    async def verify(problem: Problem, attempt: Attempt) -> Verdict:
        graded.append(problem.id)
        if len(graded) == 40:
            raise ZeroDivisionError("a defect")
        return Verdict.of(attempt.answer == problem.gold, "exact", "")

    monkeypatch.setattr(TASKS["reverse"], "verify", verify)
    with pytest.raises(GradingError):
        reinforce(*SMALL)
    run = tmp_path / "rl"
    record = read_lines(run / "failures.jsonl")[-1]
    assert (record["failure"], record["problem"]) == ("grader_error", graded[39])
    assert record["step"] == len(read_metrics(run)) + 1
    assert len(record["token_ids"]) > 5
    assert list((run / "checkpoints").iterdir()) == []
    # The bundle shows the defect again, until it is mended.
    (bundle,) = run.glob(f"replay/step_{record['step']:06d}-grader_error-*")
    graded[:] = [""] * 39
    with pytest.raises(
        ReplayDifferenceError, match="first difference: grade: the grader raises ZeroDivisionError: a def"
    ):
        list(replay_command(bundle, None, None))


def test_the_best_checkpoint_is_marked_also_where_a_kill_came_before_its_mark(reinforce: Reinforce) -> None:
    evaluated = (*SMALL, "--eval.0.every_steps=3", "--eval.0.problems=10")
    best = reinforce(*evaluated) / "checkpoints" / "best"
    assert best.readlink() == Path("step_000003")
    best.unlink()
    reinforce(*evaluated, "--run.resume=true")
    assert best.readlink() == Path("step_000003")


def test_the_best_step_is_kept_where_no_checkpoint_was_due(
    reinforce: Reinforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter((0.2, 0.9, 0.4, 0.5))  # before the first step, and after each

    def falling(*_: Any, **__: Any) -> list[Evaluation]:
        return [Evaluation("greedy_pass@1", "reverse", 10, next(values), 0.0, 1.0)]

    monkeypatch.setattr(HeldOutProblems, "evaluate", falling)
    run = reinforce(*SMALL, "--eval.0.every_steps=1", "--checkpoint.every_steps=3", "--checkpoint.keep=1")
    assert (run / "checkpoints" / "best").readlink() == Path("step_000001")
    assert {path.name for path in (run / "checkpoints").glob("step_*")} == {"step_000001", "step_000003"}


# Any load is too uneven, and none recovers.
COLLAPSING = (
    "--monitor.experts.violation=1e-9",
    "--monitor.experts.warmup_steps=0",
    "--monitor.experts.balance_steps=0",
)


def test_collapsing_experts_are_told_of(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--run.steps=2", *COLLAPSING, "--monitor.experts.steps=1")
    (alert,) = (one for one in read_lines(run / "alerts.jsonl") if one["rule"] == "experts")
    assert alert["step"] == 1
    assert "experts collapse in layer 0" in alert["message"]


def test_a_mixture_of_tasks_records_how_far_apart_they_route(reinforce: Reinforce, tmp_path: Path) -> None:
    source = 'type = "generated"\ntask_type = "reverse"\ndifficulty = [3, 3]\nweight = 1.0\n'
    sources = "".join(f'[[task_pool.sources]]\nname = "{name}"\n{source}' for name in ("one", "other"))
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(f'env_id = "mixture"\n[task_pool]\ntype = "mixture"\n{sources}')
    run = reinforce(*SMALL, "--run.steps=4", f"--environment.path={mixture}", "--eval.0.every_steps=3")
    rows = read_metrics(run)
    assert 0 < rows[0]["expert_load_divergence/0"] < math.log(2)
    # The shares that the metric is made of, of the first step, the last, and the one that an evaluation follows.
    routing = read_lines(run / "routing.jsonl")
    assert [record["step"] for record in routing] == [1, 3, 4]
    for record in routing:
        row = rows[record["step"] - 1]
        shares_SYE = np.array([record["shares"][name] for name in ("one", "other")])
        assert shares_SYE.sum(-1) == pytest.approx(np.ones(shares_SYE.shape[:2]))
        assert divergence(shares_SYE)[0] == pytest.approx(row["expert_load_divergence/0"])


def _biases(run: Path) -> list[float]:
    weights = load_file(resolve_checkpoint(run) / "model.safetensors")
    return [value for name, tensor in sorted(weights.items()) if "router.bias" in name for value in tensor.tolist()]


def test_reinforcement_learning_leaves_the_router_s_bias_alone_unless_told(base: Path, reinforce: Reinforce) -> None:
    before = _biases(base)
    assert any(before), "the base balanced its experts by bias"
    assert _biases(reinforce(*SMALL)) == before
    moved = _biases(reinforce(*SMALL, "--run.name=moved", "--model.router_bias_rate=0.01"))
    assert moved != before
    rows = read_metrics(reinforce(*SMALL, "--run.name=by_loss", "--model.router_aux_loss_coef=0.1"))
    assert all(row["router_aux_loss"] > 0 for row in rows)


def test_a_run_ends_when_its_validation_problems_are_solved_and_a_resumed_one_ends_there_too(
    reinforce: Reinforce,
) -> None:
    early = ("--run.steps=8", "--eval.0.every_steps=2", "--eval.0.split=validation", "--eval.0.temperature=1")
    enough = (*SMALL, *early, "--eval.0.problems=20", "--eval.0.enough=0.01")
    run = reinforce(*enough)
    assert len(read_metrics(run)) == 2
    assert resolve_checkpoint(run).name == "step_000002"
    mode = json.loads((run / "eval/step_000002.json").read_text())["results"][0]["mode"]
    assert mode == "sampling_pass@1"
    assert len(read_metrics(reinforce(*enough, "--run.resume=true"))) == 2


def test_favouring_what_is_unsolved_is_part_of_a_checkpoint(reinforce: Reinforce) -> None:
    focused = (*SMALL, "--batch.favour_unsolved=true")
    run = reinforce(*focused)
    assert [row["focus/reverse"] for row in read_metrics(run)] == [1.0] * 3
    rates = _state(run)["focus"]
    assert rates.keys() == {"reverse"}
    constant = "--optimizer.min_lr_ratio=1"
    whole = _state(reinforce(*focused, constant, "--run.name=whole"))
    reinforce(*focused, constant, "--run.name=cut", "--run.steps=2")
    resumed = _state(reinforce(*focused, constant, "--run.name=cut", "--run.resume=true"))
    assert resumed["focus"] == whole["focus"], "an average over all steps, not over those since the resumption"


def test_a_box_is_expected_where_the_message_of_the_format_asks_for_one(reinforce: Reinforce) -> None:
    """The base answers in Harmony, whose message has no box, though the one for chat models does."""
    chat = '--environment.system_by_format.chat="Answer in the form \\\\boxed{answer}."'
    quiet = ("--monitor.format.below=0", "--monitor.format.drop=1", "--run.steps=6")
    run = reinforce(*SMALL[1:], *quiet, chat)
    alerts = read_lines(run / "alerts.jsonl") if (run / "alerts.jsonl").exists() else []
    assert [alert["message"] for alert in alerts if alert["rule"] == "format"] == []
