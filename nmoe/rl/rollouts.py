"""Samples the rollouts of one policy-gradient step: draws problems, has groups of completions sampled and graded, and replaces
groups without signal, a bounded number of times (dynamic sampling, DAPO, arXiv:2503.14476, section 3.2).

Where samples are compared within groups, a group with equal rewards carries no signal. A group whose solve rate lies outside
`batch.solve_rate` is dropped too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nmoe.config.commands import RLConfig
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.pools.pool import Drawn, stable_hash
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.text import OpenTask
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.learner.learner import Learner
from nmoe.recipes.setup import model_identity
from nmoe.rl.experience import Experience
from nmoe.rl.group_rewards import GroupRewards, RewardedGroup, judged
from nmoe.rollout.collector import Collector, GradingError
from nmoe.rollout.recorder import FailureRecords, ReplayRecorder
from nmoe.rollout.tickets import Reason, Terms, Ticket, Tickets
from nmoe.runs.directory import RunDirectory
from nmoe.runs.state import JsonPart
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Sampling, TrainerState

# The lowest share of a source's problems that is drawn, however well it is solved.
LEAST = 0.1
# The weight of the past in the average of a source's rate, per step.
DECAY = 0.7


@dataclass
class Rollouts:
    """The rollouts of one step: all groups sampled, and for each the reason why it is not trained on (None if it is); the groups
    kept to train on with the positions of their tickets, counts of groups dropped by reason, and the time taken. `sampling_s` are
    the seconds in which its tokens were sampled, if these are not the seconds that it waited for them; `beside` has the metrics of
    sampling beside the trainer, and `alert` is a warning."""

    groups: list[Group] = field(default_factory=list)
    why: list[Reason | None] = field(default_factory=list)
    kept: list[RewardedGroup] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    dropped: Counter[Reason] = field(default_factory=Counter)
    rollout_s: float = 0.0
    sampling_s: float | None = None
    grade_s: float = 0.0
    refills: int = 0
    left_out: int = 0
    focus: Mapping[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    alert: str | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def kept_samples(self) -> list[Trajectory]:
        """The judged samples (see `judged`) of the groups to train on."""
        return judged(self.kept)

    def why_nothing(self) -> str:
        """Returns the reason, for the user, why a step had nothing to train on."""
        if self.kept:
            return "every sample of the groups was cut at the token limit, and those are masked"
        if self.dropped["outside_solve_rate"]:
            return f"every one of {len(self.groups)} groups had rewards all alike or lies outside batch.solve_rate"
        return f"every one of {len(self.groups)} groups had rewards all alike"

    def times(self) -> dict[str, float]:
        """Returns as metrics the seconds of sampling, the seconds of grading meanwhile (summed over trajectories, so that they may
        exceed the seconds of sampling), and the number of tokens sampled per second."""
        tokens = sum(trajectory.sampled_tokens for trajectory in self.trajectories)
        return {
            "time_rollout_s": self.rollout_s,
            "time_grade_s": self.grade_s,
            "tokens_per_second": tokens / (self.sampling_s or self.rollout_s),
        }

    def metrics(self) -> dict[str, float]:
        """Returns as metrics the counts of groups sampled and dropped, of refills, and of problems left out, and `Focus.metrics` if
        problems are drawn by it."""
        return {
            "groups": len(self.groups),
            "groups_zero_variance": self.dropped["zero_variance"],
            "groups_outside_solve_rate": self.dropped["outside_solve_rate"],
            "groups_surplus": self.dropped["surplus"],
            "refills": self.refills,
            "problems_left_out": self.left_out,
            **self.focus,
            **self.beside,
        }


class RolloutSampler:
    """Draws problems from the environment's pool, and has completions sampled, graded and rewarded in groups. `tickets` is the
    account of these."""

    def __init__(
        self,
        config: RLConfig,
        directory: RunDirectory,
        tokenizer: Tokenizer,
        environment: Environment,
        tools: ToolRuntime,
        engine: Engine,
        learner: Learner,
    ) -> None:
        """Builds the collector of groups, their rewards and the records of failures from the configuration. `engine` generates with
        the weights of the learner's policy."""
        self._engine, self._environment, self._run, self._batch = engine, environment, config.run, config.batch
        self._mask_truncated = config.algorithm.mask_truncated
        self.tickets = Tickets()
        self._sampling = Sampling(**config.sampling.model_dump())
        self._collector = Collector(
            engine,
            environment,
            learner.model.config.context_tokens,
            tools.sandboxes,
            model=model_identity(config, learner.lora).model_dump(exclude_none=True),
            workspaces=tools.workspaces,
        )
        self._rewards = GroupRewards(config.algorithm, environment.prompts.token_limit(config.sampling.max_new_tokens))
        # Equal rewards carry signal where samples are not compared within groups, and where there is a teacher.
        self._keep_equal = not config.algorithm.in_groups or config.distillation is not None
        weigh = unsolved if self._batch.favour_unsolved else learnable if self._batch.favour_learnable else None
        self.focus = None if weigh is None else Focus(config.run.seed, weigh)
        replays = ReplayRecorder(
            directory.replays,
            environment,
            tokenizer,
            seed=config.run.seed,
            sample_rate=config.monitor.replay_sample_rate,
            per_failure=config.monitor.replays_per_failure,
            sandbox=tools.record(),
        )
        self._failures = FailureRecords(directory, tokenizer, replays)

    def sample(self, step: int) -> Rollouts:
        """Samples the groups for one step. Dropped groups are replaced by groups of fresh prompts, in at most `max_refills` rounds,
        after which fewer groups may be kept than the step asks for.

        Raises GradingError, after saving its sample, and InfrastructureError if every sample was lost.
        """
        # A cached prefix of an evaluation, or of a step that published nothing, would be missing in a resumed run.
        self._engine.forget_prefixes()
        batch, pool, rollouts = self._batch, self._environment.pool, Rollouts()
        passed_over = pool.passed_over
        for refill in range(batch.max_refills + 1):
            missing = batch.prompts_per_step - len(rollouts.kept)
            if missing == 0:
                break
            terms = self._terms(step)
            wanted = math.ceil(missing * batch.oversampling)
            tickets = [Ticket(*drawn, terms) for drawn in self._draw(wanted, self.tickets.unanswered)]
            try:
                collected = self._collector.sample(tickets)
            except GradingError as error:
                self._failures.write(step, [error.trajectory])
                raise
            self.tickets.sampled(collected.sampled_tokens)
            rollouts.groups += collected.groups
            for ticket, group in zip(tickets, collected.groups, strict=True):
                reason: Reason | None = None
                if self.tickets.answer(ticket.position, sum(one.sampled_tokens for one in group.trajectories)):
                    rewarded, reason = self._judged(group)
                    if reason is None and len(rollouts.kept) == batch.prompts_per_step:
                        reason = "surplus"
                    if reason is None:
                        rollouts.kept.append(rewarded)
                        rollouts.positions.append(ticket.position)
                    else:
                        rollouts.dropped[reason] += 1
                        self.tickets.end(ticket.position, reason)
                rollouts.why.append(reason)
            rollouts.rollout_s += collected.rollout_s
            rollouts.grade_s += collected.grade_s
            rollouts.refills = refill
        rollouts.left_out = pool.passed_over - passed_over
        self._observe(rollouts)
        return self._recorded(step, rollouts)

    def _terms(self, step: int) -> Terms:
        """Returns the terms of groups that are issued during a step."""
        key, state = (self._run.seed, "train"), TrainerState(step - 1, self._run.steps)
        return self._collector.terms(self._batch.group_size, self._sampling, key, state, give_start=True)

    def _draw(self, wanted: int, left: Sequence[int]) -> list[Drawn]:
        """Returns the next problems of the pool, and issues their tickets. Groups that a checkpoint `left` outstanding come
        first."""
        pool = self._environment.pool
        again = [Drawn(position, pool.order.at(position)) for position in left]
        count = max(wanted - len(again), 0)
        drawn = pool.draw(count) if self.focus is None else pool.draw(count, self.focus.admits)
        for position, _ in drawn:
            self.tickets.issue(position)
        return again + drawn

    def _judged(self, group: Group) -> tuple[RewardedGroup, Reason | None]:
        """Returns a group with its rewards, and the reason not to train on it; None if there is none."""
        rewarded = self._rewards.of(group)
        if not rewarded.samples or not (rewarded.differs or self._keep_equal):
            return rewarded, "zero_variance"
        return rewarded, "outside_solve_rate" if self._outside_bounds(group) else None

    def _observe(self, rollouts: Rollouts) -> None:
        """Updates the shares by which problems of each source are drawn."""
        if self.focus is not None:
            self.focus.observe(rollouts.groups)
            rollouts.focus = self.focus.metrics()

    def _recorded(self, step: int, rollouts: Rollouts) -> Rollouts:
        """Records the failures of a step. Raises InfrastructureError if every sample was lost."""
        self._failures.write(step, rollouts.trajectories)
        self._failures.refuse_total_loss(step, rollouts.trajectories)
        return rollouts

    def settle(self, rollouts: Rollouts, experience: Experience | None) -> dict[str, float]:
        """Ends the tickets of the groups that were kept, after the update on their `experience` (None if every sample was masked).
        Returns the account as metrics. Raises RuntimeError if a token that was sampled is neither in the experience nor void."""
        return self._ended(rollouts, trained_tokens(rollouts, experience))

    def _ended(self, rollouts: Rollouts, trained: Sequence[int]) -> dict[str, float]:
        for position, one, tokens in zip(rollouts.positions, rollouts.kept, trained, strict=True):
            left_out = [t for t in one.group.trajectories if not t.trainable or (self._mask_truncated and t.truncated)]
            if len(left_out) == len(one.group.trajectories):
                self.tickets.end(position, "masked")
            else:
                self.tickets.train(position, tokens, sum(t.sampled_tokens for t in left_out))
        self.tickets.check()
        return self.tickets.metrics()

    def go_on(self, step: int) -> None:
        """Begins to sample after this step, if that is not left to the next one."""

    def parts(self) -> dict[str, JsonPart]:
        """Returns the position in the pool and the curriculum, the account, and the rates of sources, for a checkpoint."""
        environment, tickets = self._environment, self.tickets
        parts = {
            "environment": JsonPart(environment.state, environment.load_state),
            "tickets": JsonPart(tickets.state, tickets.load_state),
        }
        if self.focus is not None:
            rates = self.focus.rates
            parts["focus"] = JsonPart(lambda: rates, rates.update)
        return parts

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keeps the connections of rewards open between steps, where the engine's event loop lives on."""
        with self._collector.open():
            yield

    def _outside_bounds(self, group: Group) -> bool:
        """Returns whether the group's solve rate lies outside `batch.solve_rate`."""
        lowest, highest = self._batch.solve_rate
        if (lowest, highest) == (0, 1):
            return False
        rate = solve_rate(group)
        return rate is not None and not lowest <= rate <= highest


def trained_tokens(rollouts: Rollouts, experience: Experience | None) -> list[int]:
    """Returns the number of tokens that a step trained on, of each group that was kept."""
    groups = len(rollouts.kept)
    return [0] * groups if experience is None else experience.tokens_by_group(groups)


def solve_rate(group: Group) -> float | None:
    """Returns the mean correctness of the group's judged samples; None if there are none, or if the problem has no right answer."""
    rates = _outcomes(group)
    return sum(rates) / len(rates) if rates else None


def _outcomes(group: Group) -> list[float]:
    """Returns the correctness of each judged sample; empty for a problem without a right answer."""
    if isinstance(TASKS[group.problem.task_type], OpenTask):
        return []
    return [trajectory.grade.extras["correctness"] for trajectory in group.trainable]


def unsolved(rate: float) -> float:
    """Weighs a source for `Focus` by its share of failures, `1 - rate`."""
    return 1 - rate


def learnable(rate: float) -> float:
    """Weighs a source for `Focus` by the variance of a right answer, `rate * (1 - rate)`: 0 for a source that is never or always
    solved, whose groups carry no signal."""
    return rate * (1 - rate)


class Focus:
    """Draws problems more often from sources that can teach more, because groups whose samples all succeed or all fail mostly have
    equal rewards.

    A problem of source s is drawn with probability max(0.1, w(r_s) / max_s' w(r_s')), where r_s is an exponential average of the
    share of its samples that were right, and w is `unsolved` or `learnable`. This is prioritisation by learning potential, as in
    Schaul et al. 2016 (arXiv:1511.05952), over sources. `rates` holds r by source and belongs in a checkpoint; whether a problem is
    drawn is a pure function of rates, seed and position.
    """

    def __init__(self, seed: int, weigh: Callable[[float], float] = unsolved) -> None:
        self._seed, self._weigh = seed, weigh
        self.rates: dict[str, float] = {}

    def observe(self, groups: Sequence[Group]) -> None:
        """Updates the sources' rates by the outcomes of a step's groups, also of those not trained on."""
        outcomes: dict[str, list[float]] = {}
        for group in groups:
            outcomes.setdefault(group.problem.source, []).extend(_outcomes(group))
        for source, values in outcomes.items():
            if values:
                now = sum(values) / len(values)
                self.rates[source] = DECAY * self.rates.get(source, now) + (1 - DECAY) * now

    def share(self, source: str) -> float:
        """Returns the probability that a problem of this source is drawn when the pool comes to it; 1 for a source without a rate
        yet, and for every source if all weights are 0."""
        weights = {name: self._weigh(rate) for name, rate in self.rates.items()}
        most = max(weights.values(), default=0.0)
        if source not in weights or most == 0:
            return 1.0
        return max(LEAST, weights[source] / most)

    def admits(self, drawn: Drawn) -> bool:
        """Returns whether this problem is drawn; otherwise the pool passes it over."""
        coin = stable_hash("focus", self._seed, drawn.position) / 2**64
        return coin < self.share(drawn.problem.source)

    def metrics(self) -> dict[str, float]:
        """Returns the metric `focus/NAME` for each source with a rate: the probability that the next step draws a problem of it
        when the pool comes to one."""
        return {f"focus/{source}": self.share(source) for source in sorted(self.rates)}
