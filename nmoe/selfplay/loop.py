"""Self-play: solves problems without answers, verifies the solutions, and checks the verifications. Confirmed judgements become
training data and, with `train`, trains verifier and generator in rounds. `nmoe selfplay CONFIG --problem_source=...`

DeepSeekMath-V2 (arXiv:2511.22570), sections 2.1 to 2.3. A round has a number of steps that each play a batch of problems. With
training it also has a number of steps that each take one optimizer step of the verifier; the first of them take one of the
generator too. The run can be killed at any step; it continues from the last checkpoint and leaves the same files.

The meta-verifier keeps the verifier's weights from the start of the run, because the model that confirms labels must not learn
from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nmoe.config.commands import SelfplayConfig
from nmoe.config.environment import EnvironmentSettings, reseeded
from nmoe.config.modes import mode_of
from nmoe.config.tables.pools import SelfplayPool
from nmoe.config.tables.rewards import Rubric
from nmoe.engine.api import Engine
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.rank_sampling import sampling_engine
from nmoe.engine.remote.served import ServedFleet, served_engine
from nmoe.envs.environment import Environment
from nmoe.envs.pools.selfplay import OpenProblems
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.eval.probes import HeldOutProblems
from nmoe.learner.learner import Learner
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import everywhere
from nmoe.parallel.ranks import Ranks
from nmoe.recipes.run_loop import HeldOut, Recipe, Run, Step, open_run
from nmoe.recipes.setup import (
    build_model,
    load_tokenizer,
    model_identity,
    optimizer_settings,
    run_path,
    settle,
    with_offers,
)
from nmoe.rl.advantages import Advantages
from nmoe.rl.update import PolicyUpdate
from nmoe.rollout.collector import Collector
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.runs.provenance import recorded_steps
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.state import Files, JsonPart, Part, Subdirectory
from nmoe.selfplay.play import Judges, SelfPlay
from nmoe.selfplay.stream_records import metrics, record
from nmoe.selfplay.streams import Streams
from nmoe.selfplay.training import RoundTraining, generator_algorithm
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Problem, Sampling

GENERATOR, VERIFIER = "generator", "verifier"


class Moment(NamedTuple):
    """The position of a step in the run: `Moment(round=2, trains=False, part=3)` samples the fourth batch of the second round.

    If `trains` is true, the step takes optimizer step `part` of the round instead; both are counted from 0.
    """

    round: int
    trains: bool
    part: int


@dataclass(frozen=True)
class Schedule:
    """Divides a run into rounds of `problems` problems each, with `batches` steps that play and `updates` steps that train. Steps
    and rounds count from 1, the parts of a round from 0.
    """

    rounds: int
    problems: int
    batches: int
    updates: int

    @classmethod
    def of(cls, config: SelfplayConfig, environment: Environment) -> Schedule:
        section, size = config.selfplay, environment.pool.size
        assert size is not None, "open problems are a list of records"
        problems = min(section.max_problems, size - environment.overlong)
        updates = config.run.steps // section.rounds if section.train else 0
        return cls(section.rounds, problems, math.ceil(problems / config.batch.prompts_per_step), updates)

    @property
    def round_steps(self) -> int:
        return self.batches + self.updates

    @property
    def steps(self) -> int:
        return self.rounds * self.round_steps

    def at(self, step: int) -> Moment:
        round_, index = divmod(step - 1, self.round_steps)
        trains = index >= self.batches
        return Moment(round_ + 1, trains, index - self.batches if trains else index)


def selfplay_environment(config: SelfplayConfig) -> EnvironmentSettings:
    """Returns the settings of the environment that all three roles share: the run's own or, by default, Harmony without tools over
    the problems that [selfplay] names. A completion's reward is the score that its task gives.
    """
    section, own = config.selfplay, config.environment
    if own is None:
        assert section.problem_source is not None, "the configuration asks for a source where there is no environment"
        default = SelfplayPool(type="selfplay", source=section.problem_source)
        own = EnvironmentSettings(env_id="selfplay", version="1", format="harmony", task_pool=default, rubric=Rubric())
    named = {"source": section.problem_source, "problem_field": section.problem_field}
    pool = own.task_pool.model_copy(update={key: value for key, value in named.items() if value is not None})
    return reseeded(own.model_copy(update={"task_pool": pool}), config.run.seed)


def selfplay(config: SelfplayConfig) -> Path:
    """Runs self-play as configured to its end and returns the run directory. Raises KeyboardInterrupt, after saving a checkpoint,
    if a signal asks the run to stop.
    """
    config, threads = settle(config)
    _refuse_other_rounds(config)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(selfplay_environment(config), tokenizer)
    config = with_offers(config, environment)
    held_out = None
    if config.eval:
        held_out = Environment.from_settings(config.eval[0].environment, tokenizer)
    with ExitStack() as stack:
        judge = None
        if urls := config.selfplay.meta_verifier_urls:
            if (path := _judges_config(config).model.path) is None:
                raise UserError(
                    "selfplay.meta_verifier_urls: a new model is on no server; name model.path or selfplay.verifier"
                )
            named = "selfplay.meta_verifier_urls: "
            judge = stack.enter_context(served_engine(urls, resolve_checkpoint(Path(path)), print, named))
        roles = Roles.of(config, tokenizer, judge)
        for loaded in [environment, held_out] if held_out is not None else [environment]:
            loaded.leave_out_overlong(roles.context_tokens, config.sampling.max_new_tokens)
        schedule = Schedule.of(config, environment)
        tools = stack.enter_context(ToolRuntime(environment, config.sandbox))
        problems = None
        if held_out is not None:
            problems = HeldOutProblems(
                held_out,
                stack.enter_context(ToolRuntime(held_out, config.sandbox)),
                problems=config.eval[0].problems,
                mode=mode_of(),
                max_new_tokens=config.sampling.max_new_tokens,
                seed=config.run.seed,
            )
        run = stack.enter_context(open_run(config, threads, schedule.steps, tools.provenance()))
        run.follow(Selfplay(config, run, tokenizer, environment, tools, problems, roles, schedule))
    return run.directory.path


def _refuse_other_rounds(config: SelfplayConfig) -> None:
    """Raises UserError if a run is resumed with another number of optimizer steps, because its steps would then belong to other
    rounds.
    """
    began = recorded_steps(run_path(config)) if config.run.resume and config.selfplay.train else None
    if began not in (None, config.run.steps):
        raise UserError(
            f"run.steps = {config.run.steps}: the run began with {began}, which are dealt out over its rounds; put them back, or "
            "start another run with --run.name=NAME"
        )


@dataclass(frozen=True)
class Roles:
    """The models of generator, verifier and meta-verifier; a single model if all start from one checkpoint and nothing is
    trained. The meta-verifier can be on servers.
    """

    generator: Transformer
    verifier: Transformer
    meta_verifier: Transformer | ServedFleet
    learners: Mapping[str, Learner]

    @classmethod
    def of(cls, config: SelfplayConfig, tokenizer: Tokenizer, judge: ServedFleet | None) -> Roles:
        """Loads the models and, for training, makes the learners. Raises UserError as `build_model` does."""
        section, seed, judges = config.selfplay, config.run.seed, _judges_config(config)
        if section.train:
            steps = section.rounds * section.generator_steps
            learners = {
                GENERATOR: everywhere(role_learner, config, tokenizer, steps),
                VERIFIER: everywhere(role_learner, judges, tokenizer, config.run.steps),
            }
            meta_verifier = judge or build_model(judges.model, tokenizer, seed, balance=False)
            return cls(learners[GENERATOR].model, learners[VERIFIER].model, meta_verifier, learners)
        generator = build_model(config.model, tokenizer, seed, balance=False)
        verifier = generator if section.verifier is None else build_model(judges.model, tokenizer, seed, balance=False)
        return cls(generator, verifier, judge or verifier, {})

    @property
    def models(self) -> list[Transformer]:
        """The distinct models of the roles that this process has."""
        models = self.generator, self.verifier, self.meta_verifier
        return list({id(one): one for one in models if isinstance(one, Transformer)}.values())

    @property
    def context_tokens(self) -> int:
        """The shortest context length of the models, in tokens."""
        served = [] if isinstance(self.meta_verifier, Transformer) else self.meta_verifier.served()
        return min([*(model.config.context_tokens for model in self.models), *(one.context_tokens for one in served)])


def role_learner(config: SelfplayConfig, tokenizer: Tokenizer, steps: int) -> Learner:
    """Returns the learner of one role: it starts from the model in the configuration and takes `steps` optimizer steps."""
    ranks = Ranks(config.parallel)
    model = build_model(config.model, tokenizer, config.run.seed, balance=False, ranks=ranks)
    return Learner(
        model,
        optimizer_settings(config),
        steps,
        config.batch.tokens_per_microbatch,
        config.sampling.temperature,
        ranks=ranks,
    )


class Selfplay(Recipe):
    """The training recipe of self-play: models, engines and learners of the roles, the files of training data, and the position in
    the pool.
    """

    def __init__(
        self,
        config: SelfplayConfig,
        run: Run,
        tokenizer: Tokenizer,
        environment: Environment,
        tools: ToolRuntime,
        held_out: HeldOutProblems | None,
        roles: Roles,
        schedule: Schedule,
    ) -> None:
        section, batch = config.selfplay, config.batch
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.environment, self.held_out = environment, held_out
        assert isinstance(environment.pool.order, OpenProblems), "the environment's pool is self-play's"
        self.problems, self.schedule = environment.pool.order, schedule
        self.roles = roles
        self.learners = roles.learners
        sizes = config.engine.max_sequences, config.engine.cache_mb
        self.engines: dict[int, Engine] = {
            id(learner.model): sampling_engine(learner, *sizes, config.engine.expert_parallel)
            for learner in self.learners.values()
        }
        for model in roles.models:
            self.engines.setdefault(id(model), NativeEngine(model, *sizes))
        own = model_identity(config, None).model_dump(exclude_none=True)
        judge = model_identity(_judges_config(config), None).model_dump(exclude_none=True)
        context = roles.context_tokens

        def collector(model: Transformer | ServedFleet, identity: Mapping[str, str | int]) -> Collector:
            engine = self.engines[id(model)] if isinstance(model, Transformer) else model
            workspaces = tools.workspaces
            return Collector(engine, environment, context, tools.sandboxes, identity, workspaces)

        self.play = SelfPlay(
            environment,
            collector(roles.generator, own),
            collector(roles.verifier, judge),
            collector(roles.meta_verifier, judge),
            batch.group_size,
            Sampling(**config.sampling.model_dump()),
            Judges(
                section.verifications,
                section.meta_verifications,
                section.confirmations,
                section.more_verifications,
            ),
            context,
        )
        if section.train:
            algorithm = generator_algorithm(config)
            self.advantages = Advantages(algorithm, config.sampling.max_new_tokens)
            self.policy = PolicyUpdate(self.learners[GENERATOR], algorithm, config.sampling)
        self.training: tuple[int, RoundTraining] | None = None
        self.order: tuple[int, list[Problem]] | None = None
        self.replays = ReplayRecorder(
            run.directory.replays,
            environment,
            tokenizer,
            seed=config.run.seed,
            sample_rate=config.monitor.replay_sample_rate,
            per_failure=0,
            sandbox=tools.record(),
        )
        self.streams = Streams(run.directory.path)
        self.evaluate_every, self.evaluate_first = schedule.round_steps if self.learners else 0, held_out is not None

    def watched(self) -> Learner | None:
        return self.learners.get(GENERATOR)

    def step(self, step: int) -> Step:
        """Plays a batch of problems, or takes optimizer steps on the round's data, as the schedule says."""
        began = time.perf_counter()
        moment = self.schedule.at(step)
        values, shown = self._train(step, moment) if moment.trains else self._play(step, moment)
        if step == self.schedule.steps:
            self.run.note(f"outcomes: {_shown(self.streams.counts.get('outcomes', {}))}")
        return Step({"round": moment.round, **values, "time_step_s": time.perf_counter() - began}, shown)

    def notes(self) -> list[str]:
        """Returns lines for the log about the run's size and the problems left out."""
        section, schedule, batch = self.config.selfplay, self.schedule, self.config.batch
        pool = self.environment.settings.task_pool
        assert isinstance(pool, SelfplayPool), "the environment's pool is self-play's"
        proofs = schedule.problems * batch.group_size
        judged = proofs * section.verifications
        return [
            f"{pool.source}: {self.problems.records:,} records, {self.problems.duplicates:,} of them duplicates, "
            f"{self.environment.overlong:,} too long for the context with {self.config.sampling.max_new_tokens:,} new tokens",
            f"round: {schedule.problems:,} problems x {batch.group_size} proofs = {proofs:,} proofs, x {section.verifications} "
            f"verifications = {judged:,}, x at most {section.meta_verifications} checks = {judged * section.meta_verifications:,}; "
            f"{section.more_verifications} more verifications of a proof in doubt",
            f"run: {schedule.rounds} rounds of {schedule.batches:,} steps that play and {schedule.updates:,} that train "
            f"= {schedule.steps:,} steps",
            f"accepted: the lowest score with {section.confirmations} verifications that more than half of their checks confirm",
        ]

    def _play(self, step: int, moment: Moment) -> tuple[dict[str, Any], dict[str, float]]:
        """Samples and judges proofs for one batch of problems; writes training data, samples and replay bundles.

        Returns the metrics of the step, and the figures to show on the console.
        """
        config = self.config
        first = moment.part * config.batch.prompts_per_step
        problems = self._problems(moment.round)[first : first + config.batch.prompts_per_step]
        # Publishing clears the prefix cache, so that the samples of a resumed run do not depend on where it was resumed.
        for model in self.roles.models:
            engine = self.engines[id(model)]
            engine.run(engine.update_weights(model, self._version(model)))
        began = time.perf_counter()
        attempts = self.play.play(problems, (config.run.seed, "selfplay", step))
        seconds = time.perf_counter() - began
        record(self.streams, self.replays, step, moment.round, attempts)
        self.streams.write_counts()
        first_proof = attempts[0].trajectories
        self.run.samples(step, (t.record(step, self.tokenizer.decode(t.token_ids)) for t in first_proof))
        tokens = sum(trajectory.sampled_tokens for one in attempts for trajectory in one.trajectories)
        values = metrics(attempts)
        shown = {"accepted": values["proofs_accepted"], "tokens/s": tokens / seconds}
        return {**values, "time_rollout_s": seconds, "tokens_per_second": tokens / seconds}, shown

    def _problems(self, round_: int) -> list[Problem]:
        """Returns the problems of a round, each once. Rounds take consecutive parts of one shuffled order; when too few are left, a
        new order starts.
        """
        order, index = divmod(round_ - 1, (self.problems.size - self.environment.overlong) // self.schedule.problems)
        if self.order is None or self.order[0] != order:
            everything = map(self.problems.at, range(order * self.problems.size, (order + 1) * self.problems.size))
            context, limit = self.roles.context_tokens, self.config.sampling.max_new_tokens
            self.order = order, [one for one in everything if self.environment.prompts.fits(one, context, limit)]
        return self.order[1][index * self.schedule.problems : (index + 1) * self.schedule.problems]

    def _train(self, step: int, moment: Moment) -> tuple[dict[str, Any], dict[str, float]]:
        """Takes one optimizer step of each role on its share of the round's data; returns metrics, and figures to show
        on the console."""
        if self.training is None or self.training[0] != moment.round:
            found = RoundTraining.of(self.config, self.streams, moment.round, self.schedule.updates)
            self.training = (moment.round, found)
            self.run.note(
                f"step {step}: training on {len(found.evidence):,} verifications, and on {len(found.groups):,} problems whose "
                "proofs differ in their rewards"
            )
        training = self.training[1]
        for engine in self.engines.values():
            engine.sleep()
        began = time.perf_counter()
        values = training.verifier_update(self.learners[VERIFIER], moment.part)
        values |= training.generator_update(self.policy, self.advantages, step, moment.part)
        seconds = time.perf_counter() - began
        for learner in self.learners.values():
            learner.publish(self.engines[id(learner.model)]).result()
        shown = {"loss": values["verifier_loss"]} if "verifier_loss" in values else {}
        return {**values, "time_learn_s": seconds}, shown

    def evaluate(self) -> HeldOut | None:
        """Measures how often the verifier is right on held-out problems with known answers; None without held-out problems."""
        if self.held_out is None:
            return None
        results = self.held_out.evaluate(self.engines[id(self.roles.verifier)], self.roles.context_tokens)
        return HeldOut({}, f"verifier, held-out {results[0]}", [result.record() for result in results])

    def _version(self, model: Transformer) -> int:
        return next((one.version for one in self.learners.values() if one.model is model), 0)

    def start(self) -> None:
        self.streams.load_state(None)
        left_out = {"duplicate": self.problems.duplicates, "overlong": self.environment.overlong}
        self.streams.count("problems", {"records": self.problems.records, **left_out})
        self.streams.write_counts()

    def parts(self) -> dict[str, Part]:
        roles: dict[str, Part] = {
            role: Subdirectory(role, {"learner": learner, "tokenizer": Files(self.tokenizer.save)})
            for role, learner in self.learners.items()
        }
        environment = JsonPart(self.environment.state, self.environment.load_state)
        return roles | {"environment": environment, "streams": JsonPart(self.streams.state, self.streams.load_state)}


def _judges_config(config: SelfplayConfig) -> SelfplayConfig:
    """Returns the configuration with the judges' checkpoint as its model, if the judges have a separate checkpoint."""
    if config.selfplay.verifier is None:
        return config
    named = {"path": config.selfplay.verifier, "shape": None}
    return config.model_copy(update={"model": config.model.model_copy(update=named)})


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"
