"""What a step's updates changed, against log-probabilities computed for every token, and that measuring changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from policy_cases import LIMIT, answer, experience_of, group, random_groups, settings
from tiny_models import tiny_model

from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.rl.experience import policy_batch
from nmoe.rl.policy import own_loss
from nmoe.rl.update import LEAST_TOKENS, MOST_TOKENS, SHARE, PolicyUpdate, effect, measured
from nmoe.trajectory import Group

__all__ = ["tiny_model"]

# 320 samples: a thirty-second of their positions is some ten of them.
GROUPS = random_groups(40, 8)


def updated(learner: Learner, groups: list[Group], **sections: Any) -> tuple[dict[str, float], Batch, torch.Tensor]:
    """The metrics of one step's update, its batch, and the learner's log-probabilities before it."""
    config = settings(**sections)
    update = PolicyUpdate(learner, config.algorithm, config.sampling, sizes=config.batch, seed=3)
    experience = experience_of(update, groups, config)
    assert experience is not None
    before_N = learner.logprobs(experience.batch).result()
    return update.update(7, experience), experience.batch, before_N


@pytest.mark.parametrize("batch", [{}, {"updates_per_step": 2, "passes_per_step": 2}])
@pytest.mark.parametrize("adapter", [False, True])
def test_the_figures_are_those_of_the_measured_tokens(tiny_model: Any, batch: dict[str, int], adapter: bool) -> None:
    model = tiny_model()
    lora = None
    if adapter:
        lora = Lora(model, LoraSettings(4, 8.0), choose(model, ["q_proj", "o_proj"]), "base", "f").initialize(0)
    learner = Learner(model, OptimizerSection(learning_rate=0.02, warmup_steps=0), 10, 4096, lora=lora)
    metrics, trained, before_N = updated(learner, GROUPS, batch=batch)
    moved_T = trained.column(learner.logprobs(trained).result() - before_N)
    part = measured(replace(trained, old_logprobs_T=moved_T), 3, 7)
    moved = part.old_logprobs_T[part.scored_T].double()  # type: ignore[index]
    assert metrics["update_tokens"] == len(moved)
    assert metrics["update_log_ratio_max"] == pytest.approx(float(moved.max()), abs=1e-5)
    assert metrics["update_log_ratio_min"] == pytest.approx(float(moved.min()), abs=1e-5)
    assert metrics["update_ratio_max"] == pytest.approx(math.exp(float(moved.max())), rel=1e-4)
    assert metrics["update_kl"] == pytest.approx(float((moved.exp() - 1 - moved).mean()), rel=1e-3)
    # PPO's clip: upwards where the advantage is positive, downwards where it is negative.
    up = part.advantages_T[part.scored_T] > 0  # type: ignore[index]
    clipped = torch.where(up, moved.exp() > 1.1, moved.exp() < 0.9)
    assert metrics["update_clip_ratio"] == pytest.approx(float(clipped.double().mean()))
    assert metrics["update_kl"] > 1e-5


def test_measuring_changes_nothing(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for measures in (True, False):
        if not measures:
            monkeypatch.setattr("nmoe.rl.update.effect", lambda *_: {})
        learner = Learner(tiny_model(), OptimizerSection(learning_rate=0.02), 10, 4096)
        draws = torch.get_rng_state()
        rows = [updated(learner, GROUPS[:3])[0] for _ in range(3)]
        assert torch.equal(draws, torch.get_rng_state())
        kept = [{name: value for name, value in row.items() if not name.startswith("update_")} for row in rows]
        found.append((kept, [parameter.clone() for parameter in learner.model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def column(groups: list[Group]) -> Batch:
    return policy_batch([sample for one in groups for sample in one.trainable], None, "token", LIMIT)


def test_whole_sequences_up_to_the_limits_in_an_order_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = column(GROUPS)
    rows = batch.shared_rows()
    assert rows is not None
    part = measured(batch, 0, 1)
    whole = {tuple(ids.tolist()) for ids in batch.targets_T.split(batch.lengths)}
    assert {tuple(ids.tolist()) for ids in part.targets_T.split(part.lengths)} <= whole
    assert 0.5 * SHARE * len(rows[0]) < part.tokens <= SHARE * len(rows[0])
    assert torch.equal(measured(batch, 0, 1).inputs_T, part.inputs_T)
    assert not torch.equal(measured(batch, 0, 2).inputs_T, part.inputs_T)
    monkeypatch.setattr("nmoe.rl.update.MOST_TOKENS", 20)
    assert 10 < int(measured(batch, 0, 1).scored_T.sum()) <= 20


def long_answers(prompt: int, tokens: int, count: int) -> list[Group]:
    """Groups of two answers each, to prompts that differ from group to group."""
    return [
        group(*(answer(reward, [place] * tokens, prompt=(place,) * prompt) for reward in (0.0, 1.0)))
        for place in range(count // 2)
    ]


@pytest.mark.parametrize(
    ("prompt", "tokens", "count", "trained"),
    [
        # Eight of 4,002 predicting positions, of which each two share three: 4 * 8,001 rows. The first 1,001 positions are a 32nd,
        # and those from 2 on predict trained tokens.
        (3, 4000, 8, 999),
        # The 32nd of 200,004 rows is 6,250: the limit of trained tokens cuts.
        (3, 50_000, 4, MOST_TOKENS),
        # The 32nd of 2 * 1,200 rows ends in the prompt.
        (1001, 100, 4, LEAST_TOKENS),
        (1001, 10, 4, 10),
        (3, 2, 2, 2),
    ],
)
def test_of_one_long_sequence_the_beginning_is_measured(prompt: int, tokens: int, count: int, trained: int) -> None:
    batch = column(long_answers(prompt, tokens, count))
    part = measured(batch, 0, 0)
    assert (len(part.scored_positions), len(part.lengths)) == (trained, 1)
    assert part.lengths == (prompt - 1 + trained,), "nothing behind the last token that is measured"
    rows = batch.shared_rows()
    limit = SHARE * (batch.tokens if rows is None else len(rows[0]))
    assert part.tokens <= max(limit + 1, prompt - 1 + LEAST_TOKENS)


@pytest.mark.parametrize("loss", ["gspo", "cispo", "dppo"])
def test_every_loss_says_what_it_would_clip(tiny_model: Any, loss: str) -> None:
    learner = Learner(tiny_model(), OptimizerSection(), 10, 4096)
    batch = column(GROUPS)
    before_N = learner.logprobs(batch).result()
    noise = torch.Generator().manual_seed(0)
    up_T = torch.rand(batch.tokens, generator=noise) - 0.5
    batch = replace(batch, behaviour_logprobs_T=batch.column(before_N), advantages_T=up_T)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += 0.2 * parameter.std() * torch.randn(parameter.shape, generator=noise)
    aggregation = {"aggregation": "sequence"} if loss == "gspo" else {}
    bound = 0.001 if loss == "dppo" else 0.05
    bounds = {"clip_high": bound, **({} if loss == "cispo" else {"clip_low": bound})}
    algorithm = settings(algorithm={"loss": loss, **aggregation, **bounds}).algorithm
    found = effect(learner, batch, before_N, own_loss(algorithm), 0, 1)["update_clip_ratio"]
    after_T = batch.column(learner.logprobs(batch).result())
    part = measured(replace(batch, old_logprobs_T=after_T), 0, 1)
    assert part.behaviour_logprobs_T is not None
    assert part.old_logprobs_T is not None
    assert part.advantages_T is not None
    expected = []
    columns = (part.old_logprobs_T, part.behaviour_logprobs_T, part.advantages_T, part.scored_T)
    for after, before, advantages, scored in zip(*(one.split(part.lengths) for one in columns), strict=True):
        moved, up = (after - before)[scored].double(), advantages[scored] > 0
        if loss == "dppo":
            by = (after.exp() - before.exp())[scored]
            expected.append(torch.where(up, by > bound, by < -bound))
        else:
            ratio = (moved.mean().expand_as(moved) if loss == "gspo" else moved).exp()
            above = ratio > 1 + bound
            expected.append(above if loss == "cispo" else torch.where(up, above, ratio < 1 - bound))
    assert found == pytest.approx(float(torch.cat(expected).double().mean()))
    assert 0 < found < 1


def test_a_loss_of_the_users_own_does_not_say_what_it_clips(tiny_model: Any) -> None:
    learner = Learner(tiny_model(), OptimizerSection(), 10, 4096)
    batch = column(GROUPS[:2])
    found = effect(learner, batch, learner.logprobs(batch).result(), None, 0, 1)
    assert "update_clip_ratio" not in found
    assert found["update_kl"] < 1e-9, "nothing was updated"
    assert own_loss(settings(algorithm={"loss": "clip"}).algorithm) is not None
