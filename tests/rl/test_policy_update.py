"""The optimizer steps of a step: every loss with every estimator on a tiny model, its mini-batches, masks and corrections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from policy_cases import answer, branched, experience_of, group, random_groups, settings
from tiny_models import tiny_model
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives.base import need
from nmoe.learner.passes import PassResult
from nmoe.model.head import Head
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import optimizer_settings
from nmoe.rl import update as updates
from nmoe.rl.critic import Critic
from nmoe.rl.reference import Reference
from nmoe.rl.update import PolicyUpdate
from nmoe.trajectory import Group

Tiny = Callable[..., Transformer]

__all__ = ["tiny_model"]

GROUPS = random_groups(4, 3)
CRITICS: dict[str, dict[str, Any]] = {"own": {"learning_rate": 1e-2}, "shared": {"shared": True, "coef": 0.5}}


class Watched(Learner):
    """Keeps every batch that it is trained on, what came of it, and the gradient of every step."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.batches: list[Batch] = []
        self.results: list[PassResult] = []
        self.gradients: list[Tensor] = []

    def forward_backward(self, batch: Batch, *rest: Any) -> Any:
        future = super().forward_backward(batch, *rest)
        self.batches.append(batch)
        self.results.append(future.result())
        return future

    def optim_step(self) -> Any:
        grads = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        self.gradients.append(torch.cat([grad.flatten() for grad in grads]))
        return super().optim_step()


class Run:
    """A learner, its reference and its critic, all of one seed, and what they make of some groups."""

    def __init__(self, tiny_model: Tiny, config: RLConfig) -> None:
        model, critic = tiny_model(), config.critic
        head = Head(32, 1, "value") if critic is not None and critic.shared else None
        per_microbatch = config.batch.tokens_per_microbatch
        self.config = config
        self.learner = Watched(model, optimizer_settings(config), 10, per_microbatch, head=head)
        before = tiny_model(seed=1) if config.algorithm.kl_coef else None
        every = config.algorithm.reference_every_steps
        self.reference = None if before is None else Reference(self.learner, before, every)
        self.critic = None
        if critic is not None:
            own = None
            if not critic.shared:
                value, settings_ = Head(32, 1, "value"), optimizer_settings(config)
                settings_ = settings_.model_copy(update={"learning_rate": critic.learning_rate})
                own = Learner(tiny_model(seed=2), settings_, 10, per_microbatch, head=value, head_only=True)
            self.critic = Critic(critic, self.learner, own)
        self.policy = PolicyUpdate(
            self.learner,
            config.algorithm,
            config.sampling,
            sizes=config.batch,
            seed=config.run.seed,
            reference=self.reference,
            critic=self.critic,
        )

    def update(self, step: int, groups: list[Group]) -> dict[str, float]:
        self.tokens: dict[str, Tensor] = {}
        return self.policy.update(step, experience_of(self.policy, groups, self.config), self.tokens)

    def __call__(self, groups: list[Group], steps: int = 1) -> dict[str, float]:
        for step in range(1, steps + 1):
            metrics = self.update(step, groups)
        return metrics


@pytest.fixture
def run(tiny_model: Tiny) -> Callable[..., Run]:
    return lambda **sections: Run(tiny_model, settings(**sections))


def combinations() -> Iterator[dict[str, Any]]:
    for loss, advantage in product(
        ("clip", "dual_clip", "gspo", "cispo", "dppo"), ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp")
    ):
        reduction = "sequence" if loss == "gspo" else "token"
        yield {"algorithm": {"loss": loss, "advantage": advantage, "aggregation": reduction, "entropy_coef": 0.01}}
    yield {"algorithm": {"advantage": "grpo", "multi_reward": "gdpo", "overlong_buffer": 4}}
    for loss, critic in product(("clip", "dual_clip", "gspo", "cispo", "dppo"), CRITICS.values()):
        reduction = "sequence" if loss == "gspo" else "constant"
        yield {"algorithm": {"advantage": "gae", "loss": loss, "aggregation": reduction}, "critic": critic}
    for correction in ("tis", "mask", "sequence_mask"):
        window = None if correction == "tis" else (0.04, 25.0)
        yield {"algorithm": {"correction": correction, "correction_window": window, "mask_truncated": True}}
    for kl_in in ("loss", "reward"):
        yield {"algorithm": {"kl_coef": 0.1, "kl_in": kl_in, "loss": "cispo"}}


@pytest.mark.parametrize("sections", list(combinations()), ids=str)
def test_the_gradient_does_not_depend_on_how_a_batch_is_split(
    run: Callable[..., Run], sections: dict[str, Any]
) -> None:
    whole, split = run(**sections), run(**sections, batch={"tokens_per_microbatch": 12})
    one, other = whole(GROUPS), split(GROUPS)
    (expected,), (found,) = whole.learner.gradients, split.learner.gradients
    assert expected.abs().max() > 1e-4, "there is something to compare"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert one.keys() == other.keys()
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
    if whole.critic is not None and whole.critic.own is not None:
        for mine, theirs in zip(whole.critic.own.model.parameters(), split.critic.own.model.parameters(), strict=True):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-4)


def test_several_updates_are_dealt_whole_groups_and_compare_with_the_learner_before_them(
    run: Callable[..., Run],
) -> None:
    several = run(batch={"updates_per_step": 2, "passes_per_step": 2}, algorithm={"aggregation": "token"})
    metrics = several(GROUPS)
    batches = several.learner.batches
    assert len(batches) == 4
    for first, second in (batches[:2], batches[2:]):
        assert len(first.lengths) == len(second.lengths) == 6
        assert sorted(first.lengths + second.lengths) == sorted(several_lengths())
        for batch in (first, second):
            prompts = {tuple(part[:2].tolist()) for part in batch.inputs_T.split(list(batch.lengths))}
            assert len(prompts) == 2, "of two groups whole"
            assert float(batch.weights_T.sum()) == pytest.approx(1), "its denominators count it alone"
    # The ratio of the first update is to the learner itself, and is 1; later it moved.
    ratios = [result.tokens["log_ratio"].abs().max() for result in several.learner.results]
    assert ratios[0] == 0
    assert min(ratios[1:]) > 1e-4
    assert metrics["tokens_in_batch"] == 2 * sum(t.sampled_tokens for g in GROUPS for t in g.trajectories)
    # What separates sampler and learner was taken before all of them.
    (before,) = (run(algorithm={"aggregation": "token"})(GROUPS),)
    assert metrics["mismatch_abs_mean"] == pytest.approx(before["mismatch_abs_mean"], rel=1e-5)
    # Sums over all parameters, in another order: fp32 rounds them by some 1e-6 of their size.
    assert metrics["grad_norm"] == pytest.approx(max(float(g.norm()) for g in several.learner.gradients), rel=1e-5)


def several_lengths() -> list[int]:
    return [len(t.prompt_ids) + len(t.token_ids) - 1 for g in GROUPS for t in g.trajectories]


def test_passes_differ_in_order_and_repeat_with_the_seed(run: Callable[..., Run]) -> None:
    keys = {"batch": {"updates_per_step": 4, "passes_per_step": 3}}
    first, again, other = run(**keys), run(**keys), run(**keys, run={"steps": 10, "seed": 1})
    for one in (first, again, other):
        one(GROUPS)
    orders = [[batch.inputs_T[:2].tolist() for batch in one.learner.batches] for one in (first, again, other)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:4] != orders[0][4:8]


def test_a_cut_sample_counts_in_its_baseline_and_is_not_trained_on(run: Callable[..., Run]) -> None:
    groups = [group(answer(1.0), answer(0.0, [3, 4, 9], cut=True)), group(answer(1.0), answer(0.0), prompt_of(8))]
    masked = run(algorithm={"mask_truncated": True, "aggregation": "sequence"})
    masked(groups)
    (batch,) = masked.learner.batches
    assert batch.lengths == (3, 3, 3, 3)
    assert batch.advantages_T is not None
    assert batch.advantages_T[batch.scored_T].tolist() == pytest.approx(
        [0.5] * 2 + [1 / 3] * 2 + [-2 / 3] * 2 + [1 / 3] * 2
    )
    assert batch.weights_T[batch.scored_T].tolist() == pytest.approx([1 / 8] * 8)


def test_a_sample_that_ran_out_between_its_turns_is_not_trained_on_either(run: Callable[..., Run]) -> None:
    called = answer(0.0, [3, 4, 9])
    called = replace(called, grade=replace(called.grade, failure="truncated"))
    masked = run(algorithm={"mask_truncated": True})
    masked([group(answer(1.0, [7, 2, 5]), called, answer(0.0, [8]))])
    (batch,) = masked.learner.batches
    assert batch.lengths == (4, 2)


BRANCHED = [
    group(branched(1.0, [7, 2], [3, 4, 2]), answer(0.0, [3, 4, 9]), branched(0.0, [8], [9, 2])),
    group(branched(0.0, [4, 4], [1], [6, 2]), answer(1.0, prompt=(5, 9))),
]


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_the_gradient_of_branches_does_not_depend_on_how_a_batch_is_split(run: Callable[..., Run], loss: str) -> None:
    keys = {"algorithm": {"aggregation": "sequence", "loss": loss}}
    whole, split = run(**keys), run(**keys, batch={"tokens_per_microbatch": 5})
    whole(BRANCHED)
    split(BRANCHED)
    (expected,), (found,) = whole.learner.gradients, split.learner.gradients
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_branches_are_dealt_and_cut_with_their_sample(run: Callable[..., Run]) -> None:
    cut = branched(0.0, [8], [9, 2])
    groups = [
        BRANCHED[0],
        group(*BRANCHED[1].trajectories, replace(cut, grade=replace(cut.grade, failure="truncated"))),
    ]
    dealt = run(algorithm={"aggregation": "sequence", "mask_truncated": True}, batch={"updates_per_step": 2})
    dealt(groups)
    first, second = sorted(dealt.learner.batches, key=lambda batch: batch.samples or ())
    assert (first.samples, second.samples) == ((0, 0, 1, 2, 2), (3, 3, 3, 4))
    for batch, samples in ((first, 3), (second, 2)):
        owner_T = torch.repeat_interleave(batch.sample_ids(), torch.tensor(batch.lengths))
        weights = [float(batch.weights_T[owner_T == sample].sum()) for sample in sorted(set(batch.samples or ()))]
        assert weights == pytest.approx([1 / samples] * samples)


def prompt_of(token: int) -> Any:
    return answer(1.0, prompt=(5, token))


def test_nothing_is_done_where_every_sample_was_cut_and_those_are_masked(run: Callable[..., Run]) -> None:
    masked = run(algorithm={"mask_truncated": True})
    before = [parameter.clone() for parameter in masked.learner.model.parameters()]
    assert masked([group(answer(1.0, cut=True), answer(0.0, cut=True))]) == {}
    assert masked.learner.batches == []
    for now, then in zip(masked.learner.model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_corrections_weigh_the_advantages(run: Callable[..., Run]) -> None:
    plain, capped = run(algorithm={"advantage": "rloo"}), run(algorithm={"advantage": "rloo", "correction": "tis"})
    plain(GROUPS)
    metrics = capped(GROUPS)
    (before,), (after,) = plain.learner.batches, capped.learner.batches
    assert before.advantages_T is not None
    assert after.old_logprobs_T is None, "the update's own pass has them"
    behaviour_T = need(after.behaviour_logprobs_T, "behaviour_logprobs")
    rho_N = (capped.tokens["logprob"] - behaviour_T[after.scored_T]).exp()
    expected_N = before.advantages_T[before.scored_T] * rho_N.clamp(max=2)
    torch.testing.assert_close(capped.tokens["advantage"], expected_N)
    # At ratio 1 the derivative of a token's loss is minus its weighed advantage, times its weight.
    torch.testing.assert_close(capped.tokens["gradient"], -expected_N * after.weights_T[after.scored_T])
    clipped = float((rho_N > 2).double().mean())
    assert 0 < clipped == metrics["correction_clipped"] < 1
    rho_N = rho_N.double()
    assert metrics["correction_ess"] == pytest.approx(
        float(rho_N.sum() ** 2 / (len(rho_N) * (rho_N**2).sum())), rel=1e-5
    )
    assert metrics["advantage_std"] == pytest.approx(
        float(before.advantages_T[starts(before)].std(correction=0)), rel=1e-5
    )
    assert metrics["ppo_kl"] == 0, "the ratio that is clipped is the learner's to itself"
    assert metrics["mismatch_abs_mean"] == pytest.approx(float(rho_N.log().abs().mean()), rel=1e-5)


@pytest.mark.parametrize("correction", ["tis", "sequence_mask"])
def test_an_update_s_effect_is_measured_with_the_advantages_that_it_multiplied(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, correction: str
) -> None:
    seen: list[Batch] = []
    effect = updates.effect
    monkeypatch.setattr(
        updates, "effect", lambda learner, batch, *rest: seen.append(batch) or effect(learner, batch, *rest)
    )
    window = (0.04, 25.0) if correction == "sequence_mask" else None
    made = run(algorithm={"advantage": "rloo", "correction": correction, "correction_window": window})
    made(GROUPS)
    (trained,), (measured,) = made.learner.batches, seen
    weighed_N = need(measured.advantages_T, "advantages")[measured.scored_T]
    assert torch.equal(weighed_N, made.tokens["advantage"])
    assert not torch.equal(weighed_N, need(trained.advantages_T, "advantages")[trained.scored_T])


def test_beside_a_teacher_a_corrected_batch_has_the_learner_s_log_probabilities(run: Callable[..., Run]) -> None:
    made = run(algorithm={"correction": "tis"})
    samples = [sample for one in GROUPS for sample in one.trajectories]
    assert made.policy.batch(samples).old_logprobs_T is None
    config = made.config
    batch = PolicyUpdate(made.learner, config.algorithm, config.sampling, taught=True).batch(samples)
    assert torch.equal(
        need(batch.old_logprobs_T, "old_logprobs")[batch.scored_T], made.learner.logprobs(batch).result()
    )


def starts(batch: Batch) -> Tensor:
    lengths = torch.tensor(batch.lengths)
    return lengths.cumsum(0) - lengths


def test_a_renewed_reference_is_the_policy_of_then(run: Callable[..., Run]) -> None:
    one = run(algorithm={"kl_coef": 0.1, "reference_every_steps": 2})
    assert one.reference is not None
    assert one(GROUPS)["reference_kl"] > 0
    one.reference.renew(1)
    assert one.update(2, GROUPS)["reference_kl"] > 0
    one.reference.renew(2)
    assert one.update(3, GROUPS)["reference_kl"] == 0


def test_tails_to_the_reference_are_those_of_the_batchs_tokens(run: Callable[..., Run]) -> None:
    one = run(algorithm={"kl_coef": 0.1})
    batch = one.policy.batch([sample for each in GROUPS for sample in each.trajectories])
    apart = (
        one.learner.logprobs(batch).result() - need(batch.reference_logprobs_T, "reference")[batch.scored_T]
    ).sort()
    metrics = one(GROUPS)
    assert metrics["reference_log_ratio_max"] == pytest.approx(float(apart.values[-1]), abs=1e-6)
    assert metrics["reference_log_ratio_min"] == pytest.approx(float(apart.values[0]), abs=1e-6)
    sizes = apart.values.abs().sort().values
    assert metrics["reference_log_ratio_abs_p99"] == pytest.approx(
        float(sizes[round(0.99 * (len(sizes) - 1))]), abs=1e-6
    )
    assert metrics["reference_log_ratio_max"] > 1e-3 > -1e-3 > metrics["reference_log_ratio_min"]


def test_the_divergence_as_a_reward_leaves_the_loss_alone(run: Callable[..., Run]) -> None:
    metrics = run(algorithm={"kl_coef": 0.1, "kl_in": "reward"})(GROUPS)
    in_loss = run(algorithm={"kl_coef": 0.1, "kl_estimator": "k1"})(GROUPS)
    assert metrics["advantage_std"] != in_loss["advantage_std"]
    assert metrics["loss"] != pytest.approx(in_loss["loss"], abs=1e-6)
    assert metrics["reference_kl"] != in_loss["reference_kl"], "of the policy that sampled"


@pytest.mark.parametrize("critic", CRITICS.values(), ids=CRITICS)
def test_a_critic_learns_the_returns(run: Callable[..., Run], critic: dict[str, Any]) -> None:
    right = [group(answer(1.0, [7, 3]), answer(0.0, [8, 4]))]
    keys = {
        "algorithm": {"advantage": "gae"},
        "critic": critic | {"trace_decay": 1.0},
        "optimizer": {"learning_rate": 3e-3},
    }
    one = run(**keys)
    first = one(right)
    # A new head says 0 everywhere: the returns are the rewards, and nothing of them is explained.
    assert (first["value_mean"], first["return_mean"], first["explained_variance"]) == (0, 0.5, 0)
    assert first["value_loss"] == 0.25
    assert first["advantage_mean"] == 0.5
    assert ("critic_grad_norm" in first) == ("shared" not in critic)
    for step in range(2, 60):
        last = one.update(step, right)
    # The value before the first token cannot know which answer follows; that before the second knows: 3/4 of the variance at 3/4.
    assert last["explained_variance"] > 0.3
    assert last["value_loss"] < 0.1


def test_the_policy_waits_for_its_critic(run: Callable[..., Run]) -> None:
    one = run(algorithm={"advantage": "gae"}, critic={"warmup_steps": 2})
    before = [parameter.clone() for parameter in one.learner.model.parameters()]
    metrics = one(GROUPS, 2)
    assert one.learner.batches == []
    assert "grad_norm" not in metrics
    assert metrics["critic_grad_norm"] > 0
    assert all(torch.equal(now, then) for now, then in zip(one.learner.model.parameters(), before, strict=True))
    assert one.update(3, GROUPS)["grad_norm"] > 0


def test_a_shared_head_learns_at_its_own_rate(tiny_model: Tiny) -> None:
    head = Head(32, 1, "value")
    config = settings(algorithm={"advantage": "gae"}, critic={"shared": True, "learning_rate": 0.25})
    learner = Learner(tiny_model(), optimizer_settings(config), 10, 1000, head=head, head_learning_rate=0.25)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    assert config.critic is not None
    critic = Critic(config.critic, learner, None)
    policy = PolicyUpdate(learner, config.algorithm, config.sampling, critic=critic)
    policy.update(1, experience_of(policy, GROUPS, config))
    # Adam's first step is as long as the learning rate.
    assert float(head.bias.detach().abs()) == pytest.approx(0.25, rel=1e-3)
    assert (
        max(float((a.detach() - b).abs().max()) for a, b in zip(learner.model.parameters(), before, strict=True)) < 2e-3
    )


@pytest.mark.parametrize("key", ["entropy_coef", "kl_coef"])
def test_bonus_and_penalty_are_in_the_gradient_by_their_weight(run: Callable[..., Run], key: str) -> None:
    gradients = []
    for weight in (1e-9, 0.1, 0.2):
        one = run(algorithm={key: weight})
        one(GROUPS)
        gradients += one.learner.gradients
    none, once, twice = gradients
    assert float((once - none).abs().max()) > 1e-3
    torch.testing.assert_close(twice - none, 2 * (once - none), rtol=1e-3, atol=1e-5)
