"""Self-play: problems without answers are solved, the solutions verified, the verifications checked; what is confirmed becomes
training data and, with `train`, trains verifier and generator, round by round. `nmoe selfplay CONFIG --problem_source=...`

DeepSeekMath-V2 (arXiv:2511.22570), sections 2.1 to 2.3. A round is a number of steps that play, a batch of problems each, and with
training a number of steps that train: one optimizer step of the verifier each and, in the first of them, one of the generator. Any
step can be the last before a kill; the run goes on from the checkpoint before it, and what it leaves is the same.

The meta-verifier is the verifier as the run began, and stays it: who confirms the labels must not learn from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nmoe.config import to_toml
from nmoe.config.commands.selfplay import SelfplayConfig
from nmoe.config.environment import EnvironmentSettings, reseeded
from nmoe.config.tables.curriculum import Rubric
from nmoe.config.tables.pools import SelfplayPool
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.envs.pools.selfplay import OpenProblems
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.evaluate import evaluate
from nmoe.learner.learner import Learner
from nmoe.model.transformer import Transformer
from nmoe.recipes.interrupt import Interruptible
from nmoe.recipes.setup import (
    build_model,
    load_tokenizer,
    model_identity,
    optimizer_settings,
    provenance_of,
    run_path,
    set_threads,
)
from nmoe.rl.update import PolicyUpdate
from nmoe.rollout.collector import Collector, RolloutSettings
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.runs.checkpoint import mark_best, save_checkpoint
from nmoe.runs.directory import RunDirectory
from nmoe.runs.progress import Progress
from nmoe.selfplay.play import Judges, SelfPlay
from nmoe.selfplay.records import metrics, record
from nmoe.selfplay.streams import Streams
from nmoe.selfplay.training import RoundTraining, generator_config
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Problem

GENERATOR, VERIFIER = "generator", "verifier"


class Moment(NamedTuple):
    """What a step does: `Moment(round=2, trains=False, part=3)` plays the fourth batch of the second round."""

    round: int
    trains: bool
    part: int


@dataclass(frozen=True)
class Schedule:
    """Rounds of `batches` steps that play and `updates` steps that train. Steps and rounds count from 1, a round's parts from 0."""

    rounds: int
    batches: int
    updates: int

    @property
    def steps(self) -> int:
        return self.rounds * (self.batches + self.updates)

    def at(self, step: int) -> Moment:
        round_, place = divmod(step - 1, self.batches + self.updates)
        trains = place >= self.batches
        return Moment(round_ + 1, trains, place - self.batches if trains else place)

    def ends_round(self, step: int) -> bool:
        return step % (self.batches + self.updates) == 0


def selfplay_environment(config: SelfplayConfig) -> EnvironmentSettings:
    """The environment that all three roles share: the run's own, or else Harmony without tools, over the problems that [selfplay]
    names. A reply earns what its task says of it."""
    section, own = config.selfplay, config.environment
    if own is None:
        assert section.problem_source is not None, "the configuration asks for a source where there is no environment"
        default = SelfplayPool(type="selfplay", source=section.problem_source)
        own = EnvironmentSettings(env_id="selfplay", version="1", format="harmony", task_pool=default, rubric=Rubric())
    named = {"source": section.problem_source, "problem_field": section.problem_field}
    pool = own.task_pool.model_copy(update={key: value for key, value in named.items() if value is not None})
    return reseeded(own.model_copy(update={"task_pool": pool}), config.run.seed)


def selfplay(config: SelfplayConfig) -> Path:
    """Runs the configuration to its end and returns the run's directory. Raises KeyboardInterrupt, with a checkpoint saved, where a
    signal asked it to stop."""
    threads = set_threads(config)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(selfplay_environment(config), tokenizer)
    probe = None
    if config.eval.environment is not None:
        probe = Environment.from_settings(config.eval.environment, tokenizer)
    roles = Roles.of(config, tokenizer)
    for loaded in [environment, probe] if probe is not None else [environment]:
        loaded.leave_out_overlong(roles.context_tokens, config.sampling.max_new_tokens)
    with ExitStack() as stack:
        runtime = stack.enter_context(ToolRuntime(environment, config.sandbox))
        probe_runtime = None if probe is None else stack.enter_context(ToolRuntime(probe, config.sandbox))
        run = stack.enter_context(
            RunDirectory.create(run_path(config), to_toml(config), provenance_of(config, threads), config.run.resume)
        )
        _Selfplay(config, run, tokenizer, environment, runtime, probe, probe_runtime, roles).run_to_the_end()
    return run.path


@dataclass(frozen=True)
class Roles:
    """The model of each role: one for all, where they start from one checkpoint and nothing is trained."""

    generator: Transformer
    verifier: Transformer
    meta_verifier: Transformer

    @classmethod
    def of(cls, config: SelfplayConfig, tokenizer: Tokenizer) -> Roles:
        """Loads them. Raises UserError as `build_model` does."""
        section, seed = config.selfplay, config.run.seed
        generator = build_model(config.model, tokenizer, seed, balance=False)
        judges = _judges_config(config).model
        apart = section.train or section.verifier is not None
        verifier = build_model(judges, tokenizer, seed, balance=False) if apart else generator
        return cls(
            generator, verifier, build_model(judges, tokenizer, seed, balance=False) if section.train else verifier
        )

    @property
    def models(self) -> list[Transformer]:
        """Each model once."""
        return list({id(one): one for one in (self.generator, self.verifier, self.meta_verifier)}.values())

    @property
    def context_tokens(self) -> int:
        """What all of them can read."""
        return min(model.config.context_tokens for model in self.models)


class _Selfplay:
    """The state of one run: the roles' models, engines and learners, the streams and the position in the pool."""

    def __init__(
        self,
        config: SelfplayConfig,
        run: RunDirectory,
        tokenizer: Tokenizer,
        environment: Environment,
        runtime: ToolRuntime,
        probe: Environment | None,
        probe_runtime: ToolRuntime | None,
        roles: Roles,
    ) -> None:
        section, batch = config.selfplay, config.batch
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.environment, self.probe, self.probe_runtime = environment, probe, probe_runtime
        self.probe_start = None if probe is None else probe.state()
        assert isinstance(environment.pool.order, OpenProblems), "the environment's pool is self-play's"
        self.problems = environment.pool.order
        self.of_round = min(section.max_problems, self.problems.size - environment.overlong)
        self.schedule = Schedule(
            section.rounds,
            -(-self.of_round // batch.prompts_per_step),
            config.run.steps // section.rounds if section.train else 0,
        )
        self.roles = roles
        self.engines = {
            id(model): NativeEngine(model, config.engine.max_sequences, config.engine.cache_mb)
            for model in roles.models
        }
        own = model_identity(config, None).model_dump()
        judge = model_identity(_judges_config(config), None).model_dump()
        context = roles.context_tokens

        def collector(model: Transformer, identity: Mapping[str, str]) -> Collector:
            engine, workspaces = self.engines[id(model)], runtime.workspaces
            return Collector(engine, environment, context, runtime.sandboxes, identity, workspaces)

        self.play = SelfPlay(
            environment,
            collector(roles.generator, own),
            collector(roles.verifier, judge),
            collector(roles.meta_verifier, judge),
            RolloutSettings(
                batch.group_size,
                config.sampling.max_new_tokens,
                config.sampling.temperature,
                config.sampling.top_p,
                config.sampling.top_k,
            ),
            Judges(section.verifications, section.meta_verifications, section.confirmations),
            context,
        )
        self.learners: dict[str, Learner] = {}
        if section.train:
            steps = section.rounds * section.generator_steps
            for role, model, total in (
                (GENERATOR, roles.generator, steps),
                (VERIFIER, roles.verifier, config.run.steps),
            ):
                self.learners[role] = Learner(
                    model,
                    optimizer_settings(config),
                    total,
                    batch.tokens_per_microbatch,
                    config.sampling.temperature,
                )
            rl_config = generator_config(config, environment.settings)
            self.policy = PolicyUpdate(rl_config, self.learners[GENERATOR], None, None, config.sampling.max_new_tokens)
        self.training: tuple[int, RoundTraining] | None = None
        self.order: tuple[int, list[Problem]] | None = None
        self.replays = ReplayRecorder(
            run.replays,
            environment,
            tokenizer,
            seed=config.run.seed,
            sample_rate=config.monitor.replay_sample_rate,
            per_failure=0,
            sandbox=runtime.record(),
        )
        self.streams = Streams(run.path)
        self._load(run.resumed_from)

    def run_to_the_end(self) -> None:
        config, schedule, first = self.config, self.schedule, self.run.start_step
        with (
            Interruptible() as interrupt,
            Progress(schedule.steps, self.run.log, config.run.name, first) as progress,
        ):
            self.progress = progress
            for line in self._arithmetic():
                progress.note(line)
            if first:
                progress.note(f"resumed from step {first}")
                # The kill may have come between the checkpoint and its mark.
                if self.run.resumed_from is not None and self.run.ledger.is_best(first):
                    mark_best(self.run.resumed_from)
            else:
                self._evaluate(0)
            for step in range(first + 1, schedule.steps + 1):
                began = time.perf_counter()
                moment = schedule.at(step)
                values = self._train(step, moment) if moment.trains else self._play(step, moment)
                self.run.ledger.metrics(
                    step, {"round": moment.round, **values, "time_step_s": time.perf_counter() - began}
                )
                last = step == schedule.steps
                if schedule.ends_round(step) and self.learners:
                    self._evaluate(step)
                best = self.run.ledger.is_best(step)
                stopping = (
                    interrupt.requested
                )  # asked once: a signal that comes during the save is met after the next step
                if last or best or stopping or step % config.checkpoint.every_steps == 0:
                    saved = save_checkpoint(self.run.checkpoints, step, self._save, config.checkpoint.keep)
                    if best:
                        mark_best(saved)
                if stopping and not last:
                    progress.note(f"interrupted: saved step {step}; go on with --run.resume=true")
                    raise KeyboardInterrupt
            progress.note(f"outcomes: {_shown(self.streams.counts.get('outcomes', {}))}")

    def _arithmetic(self) -> list[str]:
        """What the run comes to, and what of its problems was left out."""
        section, schedule, batch = self.config.selfplay, self.schedule, self.config.batch
        pool = self.environment.settings.task_pool
        assert isinstance(pool, SelfplayPool), "the environment's pool is self-play's"
        proofs = self.of_round * batch.group_size
        judged = proofs * section.verifications
        lines = [
            f"{pool.source}: {self.problems.records:,} records, {self.problems.duplicates:,} of them duplicates, "
            f"{self.environment.overlong:,} too long for the context with {self.config.sampling.max_new_tokens:,} new tokens",
            f"round: {self.of_round:,} problems x {batch.group_size} proofs = {proofs:,} proofs, x {section.verifications} "
            f"verifications = {judged:,}, x at most {section.meta_verifications} checks = {judged * section.meta_verifications:,}",
            f"run: {schedule.rounds} rounds of {schedule.batches:,} steps that play and {schedule.updates:,} that train "
            f"= {schedule.steps:,} steps",
            f"accepted: the lowest score with {section.confirmations} verifications that more than half of their checks confirm",
        ]
        return lines

    def _play(self, step: int, moment: Moment) -> dict[str, Any]:
        """Plays one batch and leaves what it gave."""
        config = self.config
        first = moment.part * config.batch.prompts_per_step
        problems = self._problems(moment.round)[first : first + config.batch.prompts_per_step]
        # No prefix of an earlier step is found in a cache: what a resumed run samples must not depend on where it went on.
        for model in self.roles.models:
            engine = self.engines[id(model)]
            engine.run(engine.update_weights(model, self._version(model)))
        began = time.perf_counter()
        attempts = self.play.play(problems, (config.run.seed, "selfplay", step))
        seconds = time.perf_counter() - began
        record(self.streams, self.replays, step, moment.round, attempts)
        self.streams.write_counts()
        shown = attempts[0].trajectories
        self.run.ledger.samples(step, (t.record(step, self.tokenizer.decode(t.token_ids)) for t in shown))
        tokens = sum(trajectory.sampled_tokens for one in attempts for trajectory in one.trajectories)
        values = metrics(attempts)
        self.progress.step(step, {"accepted": values["proofs_accepted"], "tokens/s": tokens / seconds})
        return {**values, "time_rollout_s": seconds, "tokens_per_second": tokens / seconds}

    def _problems(self, round_: int) -> list[Problem]:
        """Those of a round, each once: rounds share out an order of all problems, and a new one when what is left is too few."""
        order, place = divmod(round_ - 1, (self.problems.size - self.environment.overlong) // self.of_round)
        if self.order is None or self.order[0] != order:
            everything = map(self.problems.at, range(order * self.problems.size, (order + 1) * self.problems.size))
            context, limit = self.roles.context_tokens, self.config.sampling.max_new_tokens
            self.order = order, [one for one in everything if self.environment.fits(one, context, limit)]
        return self.order[1][place * self.of_round : (place + 1) * self.of_round]

    def _train(self, step: int, moment: Moment) -> dict[str, Any]:
        """One optimizer step of each role on its share of what the round left."""
        if self.training is None or self.training[0] != moment.round:
            found = RoundTraining.of(self.config, self.streams, moment.round, self.schedule.updates)
            self.training = (moment.round, found)
            self.progress.note(
                f"step {step}: training on {len(found.evidence):,} verifications, and on {len(found.groups):,} problems whose "
                "proofs differ in their rewards"
            )
        training = self.training[1]
        began = time.perf_counter()
        values = training.verifier_update(self.learners[VERIFIER], moment.part)
        values |= training.generator_update(self.policy, step, moment.part)
        seconds = time.perf_counter() - began
        for learner in self.learners.values():
            learner.publish(self.engines[id(learner.model)]).result()
        self.progress.step(step, {"loss": values["verifier_loss"]} if "verifier_loss" in values else {})
        return {**values, "time_learn_s": seconds}

    def _evaluate(self, step: int) -> None:
        """How the verifier does on held-out problems of an environment that knows the answers, which nothing here is trained on."""
        if self.probe is None or self.probe_start is None:
            return
        self.probe.load_state(self.probe_start)
        results = evaluate(
            self.engines[id(self.roles.verifier)],
            self.probe,
            self.roles.context_tokens,
            problems=self.config.eval.problems,
            samples=1,
            temperature=0.0,
            max_new_tokens=self.config.sampling.max_new_tokens,
            seed=self.config.run.seed,
            runtime=self.probe_runtime,
        )
        self.run.ledger.evaluation(step, {"results": [result.record() for result in results]})
        self.progress.note(f"step {step}: verifier, held-out {results[0]}")

    def _version(self, model: Transformer) -> int:
        return next((one.version for one in self.learners.values() if one.model is model), 0)

    def _save(self, directory: Path) -> None:
        versions = {}
        for role, learner in self.learners.items():
            below = directory / role
            below.mkdir()
            learner.save(below)
            self.tokenizer.save(below)
            (below / "state.json").write_text(json.dumps({"version": learner.version}) + "\n")
            versions[role] = learner.version
        state = {"environment": self.environment.state(), "versions": versions, "streams": self.streams.state()}
        (directory / "state.json").write_text(json.dumps(state) + "\n")

    def _load(self, directory: Path | None) -> None:
        """Goes on from a checkpoint; from nothing without one."""
        state: Mapping[str, Any] | None = None
        if directory is not None:
            state = json.loads((directory / "state.json").read_text())
            self.environment.load_state(state["environment"])
            for role, learner in self.learners.items():
                learner.load(directory / role)
                learner.version = state["versions"][role]
        self.streams.load_state(None if state is None else state["streams"])
        if state is None:
            left_out = {"duplicate": self.problems.duplicates, "overlong": self.environment.overlong}
            self.streams.count("problems", {"records": self.problems.records, **left_out})
            self.streams.write_counts()


def _judges_config(config: SelfplayConfig) -> SelfplayConfig:
    """The configuration with the checkpoint of the judges, where they have their own, in the model's place."""
    if config.selfplay.verifier is None:
        return config
    named = {"path": config.selfplay.verifier, "shape": None}
    return config.model_copy(update={"model": config.model.model_copy(update=named)})


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"
