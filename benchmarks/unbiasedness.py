"""Measures the bias of policy gradients against the exact gradient, on problems where both are known.

    python benchmarks/unbiasedness.py            a few seconds; tables, and one JSON object as the last line

Policies are tables of logits, so that every expectation is a finite sum. The losses, corrections, advantages and log-probabilities
are those of the library, and draws and kept sets come from the engine's sampler; only the policies and rewards are made up.

1. A bandit whose samples come from a stale policy: the estimate from draws against the exact on-policy gradient, in standard
   errors, and each method's exact bias and noise.
2. The same under top-p, against the gradient of the policy renormalised on the kept set that the sampler recorded.
3. Sequences of four tokens: what a correction per token leaves, because it does not weigh the tokens before and after it.
4. Advantages over groups: the expected gradient against that of E[r].
5. The divergence from a reference as a loss, on the bandit of 1: with importance weights and without.
6. Rewards of steps and of turns, where the policy chooses how many there are: the expected gradient over groups of three against
   that of the expected sum of the rewards.

Bias is `|E g - g*| / |g*|`, with g* the gradient that is meant.
"""

# Shapes: P prompts (states), V arms (tokens), N draws, L tokens of a sequence.

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmoe.config.tables.algorithm import StepBaseline
from nmoe.engine.native.sampler import SamplingColumns, sample
from nmoe.learner.objectives import Objective, Outputs, Scored, cispo, clip, dppo, gspo, reference_divergence
from nmoe.learner.objectives.divergence import KLEstimator
from nmoe.model.logprobs import head_logprobs
from nmoe.rl.advantages import DrGrpo, Grpo, MaxRL, Rloo, process_supervision
from nmoe.rl.correction import Correction, correction_weights

EVERYTHING = math.inf
UNCLIPPED = clip(1.0, EVERYTHING)


@dataclass(frozen=True)
class Method:
    """How samples of a stale policy are used. With a correction the ratio is to the learner before the update, which is the learner
    itself at the first update; without one it is to the sampler."""

    objective: Objective
    correction: Correction | None = None
    cap: float = 2.0


METHODS = {
    "ratio in the loss, unclipped": Method(UNCLIPPED),
    "correction without a cap": Method(UNCLIPPED, "tis", EVERYTHING),
    "no correction": Method(UNCLIPPED, "none"),
    "tis, cap 2": Method(UNCLIPPED, "tis"),
    "mask, 0.5 to 2": Method(UNCLIPPED, "mask"),
    "sequence_mask, 0.99 to 1.01": Method(UNCLIPPED, "sequence_mask"),
    "clip 0.2": Method(clip(0.2, 0.2)),
    "clip 0.2 to 0.28": Method(clip(0.2, 0.28)),
    "gspo 0.2": Method(gspo(0.2, 0.2)),
    "cispo 1": Method(cispo(1.0)),
    "dppo 0.2": Method(dppo(0.2, 0.2, drift_coef=0.0)),
}


BASELINES: dict[str, StepBaseline] = {
    "less the others' sum": "leave_one_out",
    "no baseline": "none",
    "normalised steps": "normalised",
}


def logprobs_of(logits_NV: Tensor, tokens_N: Tensor, kept_NM: Tensor | None = None) -> Outputs:
    return Outputs(*head_logprobs(logits_NV, torch.eye(logits_NV.shape[-1]).to(logits_NV), tokens_N, kept_NM=kept_NM))


def gradients(
    method: Method,
    logits_NV: Tensor,
    tokens_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    sequence_N: Tensor,
    kept_NM: Tensor | None = None,
) -> Tensor:
    """Each token's own gradient of what is to be maximised with respect to its row of logits, `[N, V]`, under weights of 1."""
    rows_NV = logits_NV.clone().requires_grad_()
    outputs = logprobs_of(rows_NV, tokens_N, kept_NM)
    old_N = None
    if method.correction is not None:
        old_N = outputs.logprobs_N.detach()
        weights = correction_weights(method.correction, old_N, behaviour_N, sequence_N, method.cap)
        advantages_N = weights.weigh(advantages_N)
    scored = Scored(
        weights_N=torch.ones_like(behaviour_N),
        advantages_N=advantages_N,
        behaviour_logprobs_N=behaviour_N,
        old_logprobs_N=old_N,
        sequence_N=sequence_N,
    )
    loss, _ = method.objective(outputs, scored)
    (-loss).backward()
    assert rows_NV.grad is not None
    return rows_NV.grad


@dataclass(frozen=True)
class Bandit:
    """Logits of learner and sampler and the arms' rewards, `[P, V]` each; all prompts are equally likely."""

    learner_PV: Tensor
    sampler_PV: Tensor
    rewards_PV: Tensor
    top_p: float = 1.0

    @staticmethod
    def make(prompts: int = 3, arms: int = 6, staleness: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Bandit:
        generator = torch.Generator().manual_seed(seed)
        learner, noise, rewards = torch.randn(3, prompts, arms, generator=generator, dtype=torch.float64).unbind()
        return Bandit(learner, learner + staleness * noise, rewards, top_p)

    def draw(self, prompts_N: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By the engine's sampler: tokens, their log-probabilities under what was sampled from, and the kept ids in their arms'
        places, -1 elsewhere."""
        count = len(prompts_N)
        ones = torch.ones(count, dtype=torch.float64)
        columns = SamplingColumns(ones, self.top_p * ones, torch.zeros(count, dtype=torch.int64), False, self.top_p < 1)
        tokens_N, logprobs_N, kept_NV = sample(self.sampler_PV[prompts_N], columns, uniforms_N)
        arms_V = torch.arange(self.sampler_PV.shape[1])
        return (
            tokens_N,
            logprobs_N,
            torch.where(kept_NV, arms_V, -1) if kept_NV is not None else arms_V.expand(count, -1),
        )

    def kept(self) -> Tensor:
        """Which arms the sampler can draw, `[P, V]`."""
        prompts_P = torch.arange(len(self.sampler_PV))
        _, _, kept_PV = self.draw(prompts_P, torch.full((len(prompts_P),), 0.5, dtype=torch.float64))
        return kept_PV >= 0

    def policy(self, logits_PV: Tensor, kept: bool = True) -> Tensor:
        return (logits_PV.masked_fill(~self.kept(), -math.inf) if kept else logits_PV).softmax(-1)

    def exact_gradient(self, kept: bool = True) -> Tensor:
        """Gradient of the expected reward of the learner's policy, renormalised on the kept set unless told otherwise, `[P, V]`."""
        logits_PV = self.learner_PV.clone().requires_grad_()
        (self.policy(logits_PV, kept) * self.rewards_PV).sum(-1).mean().backward()
        assert logits_PV.grad is not None
        return logits_PV.grad

    def _advantages(self) -> Tensor:
        """Reward less the expected one, `[P, V]`: a baseline that knows no sample takes noise out and no bias in."""
        baseline_P = (self.policy(self.learner_PV) * self.rewards_PV).sum(-1, keepdim=True)
        return self.rewards_PV - baseline_P

    def expected(self, method: Method, record_kept: bool = True) -> tuple[Tensor, float]:
        """The method's expected gradient over the sampler's draws, `[P, V]`, and its standard deviation for one draw over the
        length of the gradient that is meant. `record_kept = False` scores over all arms, as a learner without the record does."""
        prompts_N, arms_N = self.kept().nonzero().unbind(-1)
        kept_NM = torch.where(self.kept(), torch.arange(self.kept().shape[1]), -1)[prompts_N]
        sampler_N = self.policy(self.sampler_PV)[prompts_N, arms_N]
        each_NV = gradients(
            method,
            self.learner_PV[prompts_N],
            arms_N,
            sampler_N.log(),
            self._advantages()[prompts_N, arms_N],
            torch.arange(len(arms_N)),
            kept_NM if record_kept else None,
        )
        chance_N = sampler_N / len(self.sampler_PV)
        mean_PV = torch.zeros_like(self.learner_PV).index_add(0, prompts_N, each_NV * chance_N.unsqueeze(-1))
        variance = (chance_N * each_NV.square().sum(-1)).sum() - mean_PV.square().sum()
        return mean_PV, float(variance.sqrt() / self.exact_gradient().norm())

    def estimated(self, method: Method, draws: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Mean and standard error, `[P, V]` each, of the method's gradient over draws of the sampler."""
        generator = torch.Generator().manual_seed(seed)
        prompts_N = torch.randint(len(self.sampler_PV), (draws,), generator=generator)
        uniforms_N = torch.rand(draws, generator=generator, dtype=torch.float64)
        tokens_N, behaviour_N, kept_NM = self.draw(prompts_N, uniforms_N)
        each_NV = gradients(
            method,
            self.learner_PV[prompts_N],
            tokens_N,
            behaviour_N,
            self._advantages()[prompts_N, tokens_N],
            torch.arange(draws),
            kept_NM,
        )
        mean_PV = torch.zeros_like(self.learner_PV).index_add(0, prompts_N, each_NV) / draws
        squares_PV = torch.zeros_like(self.learner_PV).index_add(0, prompts_N, each_NV.square()) / draws
        return mean_PV, ((squares_PV - mean_PV.square()) / draws).sqrt()


def bias(gradient: Tensor, meant: Tensor) -> float:
    return float((gradient - meant).norm() / meant.norm())


def worst_error(estimate: tuple[Tensor, Tensor], meant_PV: Tensor) -> float:
    """The largest distance of a coordinate, in its standard errors; coordinates that cannot move are left out."""
    mean_PV, error_PV = estimate
    moving_PV = error_PV > 1e-12
    return float(((mean_PV - meant_PV).abs() / error_PV)[moving_PV].max())


def sequence_bias(staleness: float, arms: int = 3, tokens: int = 4, seed: int = 0) -> dict[str, float]:
    """Exact bias of every method on sequences, whose reward is random and comes at the end."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for length in range(tokens) for prefix in itertools.product(range(arms), repeat=length)]
    state_of = {prefix: state for state, prefix in enumerate(prefixes)}
    learner_PV = torch.randn(len(prefixes), arms, generator=generator, dtype=torch.float64)
    sampler_PV = learner_PV + staleness * torch.randn(learner_PV.shape, generator=generator, dtype=torch.float64)
    sequences = list(itertools.product(range(arms), repeat=tokens))
    rewards_B = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
    states_N = torch.tensor([state_of[s[:t]] for s in sequences for t in range(tokens)])
    tokens_N = torch.tensor(sequences).flatten()

    def chances(logits_PV: Tensor) -> Tensor:
        return logits_PV.log_softmax(-1)[states_N, tokens_N].view(-1, tokens).sum(-1).exp()

    logits_PV = learner_PV.clone().requires_grad_()
    (chances(logits_PV) * rewards_B).sum().backward()
    meant_PV = logits_PV.grad
    assert meant_PV is not None
    advantages_B = rewards_B - (chances(learner_PV) * rewards_B).sum()
    sequence_N = torch.arange(len(sequences)).repeat_interleave(tokens)
    biases = {}
    for name, method in METHODS.items():
        each_NV = gradients(
            method,
            learner_PV[states_N],
            tokens_N,
            sampler_PV.log_softmax(-1)[states_N, tokens_N],
            advantages_B[sequence_N],
            sequence_N,
        )
        chance_N1 = chances(sampler_PV)[sequence_N].unsqueeze(-1)
        biases[name] = bias(torch.zeros_like(learner_PV).index_add(0, states_N, each_NV * chance_N1), meant_PV)
    return biases


def advantage_gradients(
    group: int = 4, prompts: int = 3, arms: int = 4, seed: int = 2
) -> dict[str, tuple[float, float]]:
    """For each estimator over groups of on-policy samples with rewards 0 and 1: how long the expected gradient is beside that of
    E[r], and the cosine between the two. Each prompt has one right arm, at chances far apart."""
    generator = torch.Generator().manual_seed(seed)
    logits_PV = torch.randn(prompts, arms, generator=generator, dtype=torch.float64)
    logits_PV[:, 0] = torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64)[:prompts]
    groups = torch.tensor(list(itertools.product(range(arms), repeat=group)))
    draws = groups.flatten()
    rewards = (draws == 0).double()
    ids = torch.arange(len(groups)).repeat_interleave(group)
    estimators: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "rloo": Rloo().of_samples,
        "dr_grpo": DrGrpo().of_samples,
        "grpo": Grpo().of_samples,
        "maxrl": MaxRL().of_samples,
    }
    exact, found = [], {name: [] for name in estimators}
    for logits_V in logits_PV:
        policy_V = logits_V.softmax(-1)
        exact.append(policy_V[0] * (torch.eye(arms)[0] - policy_V))
        chance = policy_V[groups].prod(-1).repeat_interleave(group) / group
        for name, estimate in estimators.items():
            behaviour = policy_V[draws].log()
            each = gradients(
                Method(UNCLIPPED), logits_V.expand(len(draws), -1), draws, behaviour, estimate(rewards, ids), ids
            )
            found[name].append((each * chance.unsqueeze(-1)).sum(0))
    meant = torch.cat(exact)
    results = {}
    for name, parts in found.items():
        mean = torch.cat(parts)
        results[name] = (float(mean.norm() / meant.norm()), float(torch.cosine_similarity(mean, meant, dim=0)))
    return results


def divergence_bias(staleness: float, seed: int = 0) -> dict[str, float]:
    """Exact bias of each estimator's gradient on the bandit, against that of KL(pi || ref), the reference at distance 1 in logits;
    of k3 without weights also against that of KL(ref || pi), which it has at tokens of the policy itself."""
    bandit = Bandit.make(staleness=staleness, seed=seed)
    noise_PV = torch.randn(bandit.learner_PV.shape, generator=torch.Generator().manual_seed(seed + 1)).double()
    reference_PV = (bandit.learner_PV + noise_PV).log_softmax(-1)
    prompts, arms = reference_PV.shape
    arms_N, chance_PV = torch.arange(arms).repeat(prompts), bandit.sampler_PV.softmax(-1)
    logits_PV = bandit.learner_PV.clone().requires_grad_()
    now_PV = logits_PV.log_softmax(-1)
    forward = (now_PV.exp() * (now_PV - reference_PV)).sum()
    backward = (reference_PV.exp() * (reference_PV - now_PV)).sum()
    (meant_PV,) = torch.autograd.grad(forward, logits_PV, retain_graph=True)
    (reverse_PV,) = torch.autograd.grad(backward, logits_PV)

    def expected(estimator: KLEstimator, weighted: bool) -> Tensor:
        rows_PV = bandit.learner_PV.clone().requires_grad_()
        outputs = logprobs_of(rows_PV.repeat_interleave(arms, 0), arms_N)
        scored = Scored(
            chance_PV.flatten(),
            behaviour_logprobs_N=chance_PV.log().flatten(),
            reference_logprobs_N=reference_PV.flatten(),
        )
        loss, _ = reference_divergence(1.0, estimator, weighted)(outputs, scored)
        (gradient_PV,) = torch.autograd.grad(loss, rows_PV)
        return gradient_PV

    estimators: tuple[KLEstimator, ...] = ("k1", "k2", "k3")
    biases = {f"{name}, weighted": bias(expected(name, True), meant_PV) for name in estimators}
    biases |= {f"{name}, not weighted": bias(expected(name, False), meant_PV) for name in estimators}
    return biases | {"k3, not weighted, against KL(ref || pi)": bias(expected("k3", False), reverse_PV)}


def step_gradients(turns: bool, most: int, group: int = 3, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Bias and noise of one group for each baseline of step rewards, and for `rloo` of the sum at every token.

    Before each of up to `most` steps the policy chooses to stop, or one of two kinds of step, which earn 1 and 0.4; what it prefers
    depends on the steps so far. With `turns` the environment answers each step with a token that is not scored, and keeps back
    the reward of half of them, by a coin that the policy does not see.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds, paths = (1.0, 0.4), [path for count in range(most + 1) for path in itertools.product((0, 1), repeat=count)]
    state_of = {path: state for state, path in enumerate(paths)}
    logits_PV = torch.randn(len(paths), 3, generator=generator, dtype=torch.float64)
    # A sample: its path, what each step earned, and the chance of the coins. After the last step it has to stop.
    samples = [
        (path, [kinds[kind] * coin for kind, coin in zip(path, coins, strict=True)], 0.5 ** len(path) if turns else 1.0)
        for path in paths
        for coins in (itertools.product((0, 1), repeat=len(path)) if turns else [(1,) * len(path)])
    ]

    def chance(path: tuple[int, ...], policy_PV: Tensor) -> Tensor:
        choices = [(state_of[path[:place]], 1 + kind) for place, kind in enumerate(path)]
        if len(path) < most:
            choices.append((state_of[path], 0))
        return torch.stack([policy_PV[state, choice] for state, choice in choices]).prod()

    parameters_PV = logits_PV.clone().requires_grad_()
    chances = torch.stack([coins * chance(path, parameters_PV.softmax(-1)) for path, _, coins in samples])
    totals = torch.tensor([sum(earned) for _, earned, _ in samples], dtype=torch.float64)
    (meant_PV,) = torch.autograd.grad((chances * totals).sum(), parameters_PV)
    chances = chances.detach()
    # Columns of each sample: a position for every choice and, with turns, one for every answer.
    states, scored, rewards, choices = [], [], [], []
    for path, earned, _ in samples:
        place: tuple[list[int], list[bool], list[float], list[int]] = ([], [], [], [])
        for number, (kind, reward) in enumerate(zip(path, earned, strict=True)):
            for column, value in zip(place, (state_of[path[:number]], True, reward, 1 + kind), strict=True):
                column.append(value)
            if turns:
                for column, value in zip(place, (0, False, math.nan, 0), strict=True):
                    column.append(value)
        if len(path) < most:
            for column, value in zip(place, (state_of[path], True, math.nan, 0), strict=True):
                column.append(value)
        for columns, column in zip((states, scored, rewards, choices), place, strict=True):
            columns.append(torch.tensor(column))
    groups = list(itertools.product(range(len(samples)), repeat=group))
    members = [sample for one in groups for sample in one]
    ids_B = torch.arange(len(groups)).repeat_interleave(group)
    lengths = [len(states[sample]) for sample in members]
    scored_T, rewards_T = (torch.cat([column[sample] for sample in members]) for column in (scored, rewards))
    states_T, choices_T = (torch.cat([column[sample] for sample in members]) for column in (states, choices))
    of_T = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(lengths))
    found = {
        f"returns to go, {name}": process_supervision(rewards_T, ids_B, scored_T, lengths, baseline).double()
        for name, baseline in BASELINES.items()
    }
    found["sum at every token, rloo"] = Rloo().of_samples(totals[members], ids_B)[of_T]
    score_TV = torch.eye(3, dtype=torch.float64)[choices_T] - logits_PV.softmax(-1)[states_T]
    chance_G = chances[torch.tensor(groups)].prod(-1)
    results = {}
    for name, advantages_T in found.items():
        each_TV = score_TV * (advantages_T * scored_T).unsqueeze(-1) / group
        each_GPV = torch.zeros(len(groups), len(paths), 3, dtype=torch.float64)
        each_GPV.index_put_((ids_B[of_T], states_T), each_TV, accumulate=True)
        mean_PV = (each_GPV * chance_G.view(-1, 1, 1)).sum(0)
        variance = (each_GPV.square().sum((1, 2)) * chance_G).sum() - mean_PV.square().sum()
        results[name] = (bias(mean_PV, meant_PV), float(variance.sqrt() / meant_PV.norm()))
    return results


def rounded(value: Any) -> Any:
    """The report with six decimals: what differs beyond them is the order of sums."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [rounded(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value


def main() -> None:
    draws, stalenesses = 400_000, (0.05, 0.25, 1.0)
    report: dict[str, object] = {"draws": draws}
    bandit = Bandit.make()
    meant = bandit.exact_gradient()
    print(
        f"1. Bandit, sampler at distance 1.0 in logits; {draws:,} draws; bias | noise of one draw | worst error of the estimate"
    )
    rows = {}
    for name, method in METHODS.items():
        mean, noise = bandit.expected(method)
        error = worst_error(bandit.estimated(method, draws), meant)
        rows[name] = {"bias": bias(mean, meant), "noise": noise, "standard_errors": error}
        print(f"   {name:32} {bias(mean, meant):8.4f} {noise:8.2f} {error:8.1f}")
    report["bandit"] = rows
    print("   exact bias at other distances:       " + "".join(f"{staleness:10g}" for staleness in stalenesses))
    distances = {staleness: Bandit.make(staleness=staleness) for staleness in stalenesses}
    by_distance = {}
    for name, method in METHODS.items():
        biases = [bias(b.expected(method)[0], b.exact_gradient()) for b in distances.values()]
        by_distance[name] = dict(zip(map(str, stalenesses), biases, strict=True))
        print(f"   {name:36}" + "".join(f"{value:10.4f}" for value in biases))
    report["bandit_by_distance"] = by_distance

    cut = Bandit.make(top_p=0.8)
    kept, whole = cut.exact_gradient(), cut.exact_gradient(kept=False)
    print(
        "2. top-p 0.8 at the sampler; bias against the policy renormalised on the kept set | against the whole policy"
    )
    for label, record in (("kept set recorded", True), ("no record", False)):
        mean, _ = cut.expected(METHODS["ratio in the loss, unclipped"], record)
        report[label.replace(" ", "_")] = {"renormalised": bias(mean, kept), "whole": bias(mean, whole)}
        print(f"   {label:32} {bias(mean, kept):8.4f} {bias(mean, whole):8.4f}")
    error = worst_error(cut.estimated(METHODS["ratio in the loss, unclipped"], draws), kept)
    report["top_p_standard_errors"] = error
    print(f"   worst error of the estimate, kept set recorded: {error:.1f} standard errors")

    print("3. Sequences of four tokens; bias" + "".join(f"{staleness:10g}" for staleness in stalenesses))
    columns = [sequence_bias(staleness) for staleness in stalenesses]
    for name in METHODS:
        print(f"   {name:32}" + "".join(f"{column[name]:10.4f}" for column in columns))
    report["sequences"] = dict(zip(map(str, stalenesses), columns, strict=True))

    print("4. Groups of 4 on-policy samples; length of the expected gradient beside that of E[r] | cosine")
    report["advantages"] = advantages = advantage_gradients()
    for name, (length, cosine) in advantages.items():
        print(f"   {name:32} {length:8.4f} {cosine:8.4f}")

    stalenesses = (0.0, *stalenesses)
    print("5. Divergence as a loss; bias         " + "".join(f"{staleness:10g}" for staleness in stalenesses))
    divergences = [divergence_bias(staleness) for staleness in stalenesses]
    for name in divergences[0]:
        print(f"   {name:38}" + "".join(f"{column[name]:10.4f}" for column in divergences))
    report["divergence"] = dict(zip(map(str, stalenesses), divergences, strict=True))

    print("6. Rewards of steps, groups of 3; bias | noise of one group; the same of turns")
    report["steps"], report["turns"] = steps, turns = step_gradients(False, 3), step_gradients(True, 2)
    for name in steps:
        print(f"   {name:38}" + "".join(f"{value:10.4f}" for value in (*steps[name], *turns[name])))
    print(json.dumps(rounded(report)))


if __name__ == "__main__":
    main()
