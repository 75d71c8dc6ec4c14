"""Reads the training data of self-play's roles from the lines that a round has written, and takes the optimizer steps.

The verifier learns by cross-entropy from accepted verifications that carry a proof's score (rejection fine-tuning). The
generator learns by policy gradient, with the other proofs of a problem as the baseline. docs/guides/selfplay.md explains why.

The examples are split over a round's optimizer steps in an order that depends only on seed and round, so that a resumed run
takes the same ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from nmoe.config.commands import SelfplayConfig
from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.envs.pools.pool import stable_hash
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.rl.advantages import Advantages
from nmoe.rl.experience import policy_batch
from nmoe.rl.group_rewards import GroupRewards, RewardedGroup, judged
from nmoe.rl.update import PolicyUpdate
from nmoe.selfplay.streams import GENERATOR, VERIFIER, Streams
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn


def evidence(lines: Iterator[Mapping[str, Any]], round_: int) -> list[Trajectory]:
    """Returns a round's verifications that give the accepted score of a proof, for a score below 1 only the confirmed ones. Of
    each proof these are the most repeated ones, each once (`most_repeated`).
    """
    found: list[Trajectory] = []
    for line in lines:
        if line["round"] == round_:
            chosen = most_repeated([one for one in line["analyses"] if one["evidence"]])
            found += [_trajectory(line["id"], line["prompt_ids"], one, one["reward"]) for one in chosen]
    return found


def most_repeated(completions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the completions whose text is repeated most often among these, each text once; all of them if all differ. A model
    slips in many ways, and does it right in few.
    """
    counts = Counter(tuple(one["token_ids"]) for one in completions)
    most = max(counts.values(), default=0)
    first = {tuple(one["token_ids"]): one for one in reversed(completions)}
    return [first[ids] for ids, count in counts.items() if count == most]


def groups(lines: Iterator[Mapping[str, Any]], round_: int, config: SelfplayConfig) -> list[RewardedGroup]:
    """Returns a round's proofs with known rewards, grouped by problem; leaves out problems whose proofs all have equal rewards."""
    of: dict[str, list[Trajectory]] = {}
    for line in lines:
        if line["round"] == round_:
            of.setdefault(line["group"], []).append(
                _trajectory(line["group"], line["prompt_ids"], line, line["reward"])
            )
    together = [Group(trajectories[0].problem, trajectories) for trajectories in of.values()]
    rewards = GroupRewards(generator_algorithm(config), config.sampling.max_new_tokens)
    return [rewarded for rewarded in map(rewards.of, together) if rewarded.differs]


def _trajectory(name: str, prompt_ids: Sequence[int], line: Mapping[str, Any], reward: float) -> Trajectory:
    return Trajectory(
        Problem(name, "", "", "", ""),
        0,
        tuple(prompt_ids),
        _turns(line),
        Grade(reward, {}, "ok", {"correctness": line.get("score") or 0.0}, None),
        Sampling(len(line["token_ids"])),
    )


def _turns(line: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Splits a line's tokens into turns: each turn's sampled tokens, with the tool results before them as given tokens."""
    turns: list[Turn] = []
    given: tuple[int, ...] = ()
    for sampled, group in groupby(range(len(line["token_ids"])), line["mask"].__getitem__):
        indices = list(group)
        tokens, logprobs, versions = (
            line[key][indices[0] : indices[-1] + 1] for key in ("token_ids", "logprobs", "versions")
        )
        if sampled:
            turns.append(Turn(given, Sample(tokens, logprobs, versions, "stop")))
        given = () if sampled else tuple(tokens)
    return tuple(turns)


def dealt(count: int, epochs: int, hands: int, *key: object) -> list[list[int]]:
    """Splits `count` indices, each repeated `epochs` times, into `hands` lists whose lengths differ by at most one. Each epoch is
    shuffled anew; `key` seeds the shuffles.
    """
    indices: list[int] = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(stable_hash("deal", *key, epoch)).shuffle(order)
        indices += order
    edges = [len(indices) * hand // hands for hand in range(hands + 1)]
    return [indices[first:end] for first, end in pairwise(edges)]


def generator_algorithm(config: SelfplayConfig) -> AlgorithmSection:
    """Returns the generator's policy-gradient settings: [algorithm], with defaults for keys that self-play does not have."""
    return AlgorithmSection(**config.algorithm.model_dump())


@dataclass
class RoundTraining:
    """The training data of one round, divided over its optimizer steps."""

    evidence: list[Trajectory]
    groups: list[RewardedGroup]
    verifications: list[list[int]]
    problems: list[list[int]]

    @classmethod
    def of(cls, config: SelfplayConfig, streams: Streams, round_: int, updates: int) -> RoundTraining:
        accepted, rewarded = evidence(streams.read(VERIFIER), round_), groups(streams.read(GENERATOR), round_, config)
        seed, epochs = config.run.seed, config.selfplay.verifier_epochs
        return cls(
            accepted,
            rewarded,
            dealt(len(accepted), epochs, updates, seed, "verifier", round_),
            dealt(len(rewarded), 1, config.selfplay.generator_steps, seed, "generator", round_),
        )

    def verifier_update(self, learner: Learner, update: int) -> dict[str, float]:
        """Takes one optimizer step of the verifier, by cross-entropy on this update's share of the evidence, and returns its
        metrics; none without evidence.
        """
        trajectories = [self.evidence[index] for index in self.verifications[update]]
        if not trajectories:
            return {}
        batch = policy_batch(trajectories, None, "sequence", 1)
        result = learner.forward_backward(batch, cross_entropy).result()
        step = learner.optim_step().result()
        values = {"loss": result.loss, "tokens_in_batch": float(batch.scored_T.sum())}
        values |= step.metrics() | result.routing_metrics()
        return {f"verifier_{name}": value for name, value in values.items()}

    def generator_update(
        self, policy: PolicyUpdate, advantages: Advantages, step: int, update: int
    ) -> dict[str, float]:
        """Takes one policy-gradient step of the generator on this update's share of the problems, and returns its metrics. Without
        problems, as after the generator's last step of the round, takes none and returns none.
        """
        chosen = [self.groups[index] for index in self.problems[update]] if update < len(self.problems) else []
        return policy.update(step, advantages(policy.batch(judged(chosen)), chosen)) if chosen else {}
