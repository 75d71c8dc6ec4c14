"""The schema of each training command: the tables that it reads, and which of their values exclude one another.

Relative paths start from the directory that the command runs in, with two exceptions: the path of an environment's file starts from
the directory of the file that names it, and data paths in an environment's file start from that file's directory.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer

from nmoe.config.base import Array, Conflict, FromFile, Section
from nmoe.config.environment import EnvironmentSettings, held_out
from nmoe.config.packaged import find_environment
from nmoe.config.tables.algorithm import (
    AlgorithmSection,
    BatchSection,
    CriticSection,
    DistillationSection,
    GroupBatchSection,
    MicroBatchSection,
    PolicyLossSection,
)
from nmoe.config.tables.asynchrony import AsyncSection
from nmoe.config.tables.evaluation import (
    CountedEvalSection,
    ExamplesEvalSection,
    HeldOutEvalSection,
    PeriodSection,
    RLEvalSection,
    SelfplayEvalSection,
    confusable,
    effort_in_plain_text,
    only_one,
)
from nmoe.config.tables.model import (
    FineTuningOptimizerSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PretrainingOptimizerSection,
)
from nmoe.config.tables.monitor import MonitorSection, SampleRateSection, WatchSection
from nmoe.config.tables.placement import PlacementSection
from nmoe.config.tables.pools import SelfplayPool, task_types
from nmoe.config.tables.recipes import (
    DataSection,
    PreferenceSection,
    RecordsSection,
    RewardModelSection,
    SelfplaySection,
    SFTRecordsSection,
    VerifierSection,
)
from nmoe.config.tables.rollout import EngineSection, RolloutEngineSection, SamplingSection, SandboxSettings
from nmoe.config.tables.run import (
    CheckpointSection,
    RecordsRunSection,
    RLRunSection,
    RunSection,
    SelfplayRunSection,
    SinksSection,
)


class RunConfig(Section):
    """The tables of every run. Each command's schema adds the tables that it reads; unknown tables are refused."""

    run: RunSection
    """name, length, seed"""
    model: ModelSection
    """checkpoint or shape"""
    batch: MicroBatchSection = MicroBatchSection()
    """batch sizes"""
    optimizer: OptimizerSection = OptimizerSection()
    """optimizer and schedule"""
    monitor: WatchSection = WatchSection()
    """rules that watch the run"""
    checkpoint: CheckpointSection = CheckpointSection()
    """checkpoints"""
    parallel: ParallelSection = ParallelSection()
    """ranks that train together"""
    sinks: SinksSection = SinksSection()
    """TensorBoard, W&B, trackio, CSV"""

    def conflicts(self) -> Iterator[Conflict]:
        shape = self.model.shape
        if shape is not None and self.batch.tokens_per_microbatch < shape.context_tokens:
            yield Conflict(
                "batch.tokens_per_microbatch",
                f"a sequence of model.shape.context_tokens = {shape.context_tokens} does not fit",
            )
        if self.model.expert_weights != "dequantized" and self.parallel.ep not in (1, "auto"):
            yield Conflict("parallel.ep", "every rank holds all packed experts: leave it out, or model.expert_weights")
        if self.trains_base and self.model.expert_weights != "dequantized":
            yield Conflict(
                "model.expert_weights",
                f"experts held in {self.model.expert_weights} are frozen: train an adapter beside them, by [lora], or leave it "
                "out. model.expert_profile trains experts through the rounding; nmoe eval, chat and data pairs have "
                "--expert-weights",
            )

    @property
    def trains(self) -> bool:
        """Whether the run changes weights; self-play may only sample."""
        return True

    @property
    def trains_base(self) -> bool:
        """Whether the run changes the weights of the model itself, and not only of an adapter."""
        return self.trains


class AdaptableConfig(RunConfig):
    """The configuration of a run that trains either all weights or a LoRA adapter."""

    lora: LoraSection | None = None
    """train an adapter; without it, all weights"""

    @property
    def trains_base(self) -> bool:
        return self.lora is None

    def conflicts(self) -> Iterator[Conflict]:
        if self.lora is not None and self.model.path is None:
            yield Conflict("lora", "an adapter needs a base; name its checkpoint in model.path")
        if self.lora is not None and self.optimizer.kind == "muon":
            yield Conflict(
                "optimizer.kind", 'muon trains the weights within the blocks, which [lora] freezes; set it to "adamw"'
            )
        if self.lora is not None and self.model.expert_profile is not None:
            yield Conflict(
                "model.expert_profile",
                "trains experts, and an adapter's base is frozen: leave it out, or hold the experts so by model.expert_weights",
            )
        if self.lora is not None and self.model.context_tokens is not None:
            yield Conflict(
                "model.context_tokens",
                "an adapter does not record it; write rope_scaling into the base's config.json instead",
            )


class SupervisedConfig(AdaptableConfig):
    """The configuration of a run that learns from given examples (pretraining, SFT, DPO, reward models, verifiers)."""

    eval: Array[PeriodSection] = ()
    """evaluation during the run, as [[eval]]"""

    @property
    def probes(self) -> Mapping[int, ExamplesEvalSection]:
        """The [[eval]] tables that sample answers to the problems of an environment, by index."""
        return {}

    @property
    def held_out_tables(self) -> list[int]:
        """The indices of the [[eval]] tables that evaluate on held-out examples: at most one."""
        return [number for number in range(len(self.eval)) if number not in self.probes]

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations on held-out examples; 0 if the run has none."""
        return self.eval[self.held_out_tables[0]].every_steps if self.held_out_tables else 0

    @property
    def allows_trained_on(self) -> bool:
        """Whether held-out examples may repeat questions from the training data."""
        tables = (self.eval[number] for number in self.held_out_tables)
        return any(isinstance(one, HeldOutEvalSection) and one.allow_trained_on for one in tables)

    def conflicts(self) -> Iterator[Conflict]:
        yield from only_one(self.held_out_tables, "the held-out examples are one set, evaluated in one way")


# The tables that nothing reads without a probe.
_OF_PROBES = frozenset({"engine", "sandbox"})


class ProbedConfig(SupervisedConfig):
    """The configuration of a run that learns from given examples, and whose [[eval]] tables may also sample answers to an
    environment's problems."""

    eval: Array[ExamplesEvalSection] = ()
    """evaluations during the run, as [[eval]]: held-out examples, or problems of an environment"""
    engine: EngineSection = EngineSection()
    """rollout engine, with which [[eval]] tables sample"""
    sandbox: SandboxSettings = SandboxSettings()
    """isolation of tools and tests in [[eval]] tables"""

    @property
    def probes(self) -> Mapping[int, ExamplesEvalSection]:
        return {number: one for number, one in enumerate(self.eval) if one.environment is not None}

    def conflicts(self) -> Iterator[Conflict]:
        shape = self.model.shape
        for number, probe in self.probes.items():
            assert probe.environment is not None, "what makes it a probe"
            yield from effort_in_plain_text(number, probe, probe.environment)
            if shape is not None and (probe.max_tokens or 0) >= shape.context_tokens:
                yield Conflict(
                    f"eval.{number}.max_tokens",
                    f"leaves no room for a prompt in model.shape.context_tokens = {shape.context_tokens}",
                )
        yield from confusable(self.probes)
        for key in () if self.probes else sorted(self.model_fields_set & _OF_PROBES):
            yield Conflict(key, "is of probes, which sample, and no [[eval]] names an environment; leave it out")

    @model_serializer(mode="wrap")
    def _only_what_applies(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = written(self)
        return {key: value for key, value in found.items() if self.probes or key not in _OF_PROBES}


class PretrainConfig(ProbedConfig):
    """The configuration of `nmoe pretrain`: [data] is required."""

    data: DataSection
    """text to pretrain on"""
    optimizer: PretrainingOptimizerSection = PretrainingOptimizerSection()

    def conflicts(self) -> Iterator[Conflict]:
        if self.evaluate_every and self.data.held_out_documents == 0:
            yield Conflict(
                f"eval.{self.held_out_tables[0]}.every_steps", "nothing to evaluate on; set data.held_out_documents"
            )


class RecordsConfig(SupervisedConfig):
    """The configuration of a run that learns from [records], for run.steps or for records.epochs."""

    run: RecordsRunSection = RecordsRunSection()
    records: RecordsSection
    """examples to learn from"""

    def conflicts(self) -> Iterator[Conflict]:
        epochs = self.records.epochs
        if self.run.steps == 0 and epochs is None:
            yield Conflict("run.steps", "must be more than 0, unless records.epochs is given")
        if self.run.steps > 0 and epochs is not None:
            yield Conflict("run.steps", f"excludes records.epochs = {epochs:g}; give one of the two")
        if self.evaluate_every and not self.records.holds_out:
            yield Conflict(
                f"eval.{self.held_out_tables[0]}.every_steps",
                "nothing to evaluate on; set records.held_out, held_out_path or held_out_split",
            )
        if self.records.holds_out and not self.evaluate_every:
            yield Conflict("eval", "records are held out but never evaluated on; add [[eval]] with every_steps")


class SFTConfig(ProbedConfig, RecordsConfig):
    """The configuration of `nmoe sft`: [records] is required."""

    # Said again, since of two bases with a [run] the first counts.
    run: RecordsRunSection = RecordsRunSection()
    records: SFTRecordsSection
    optimizer: FineTuningOptimizerSection = FineTuningOptimizerSection()


class PreferenceConfig(RecordsConfig):
    """The configuration of a run that learns from preference pairs."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.records.kind not in (None, "preference"):
            yield Conflict("records.kind", 'must be "preference" or left out')


class DPOConfig(ProbedConfig, PreferenceConfig):
    """The configuration of `nmoe dpo`: [records] is required."""

    # Said again, since of two bases with a [run] the first counts.
    run: RecordsRunSection = RecordsRunSection()
    preference: PreferenceSection = PreferenceSection()
    """the loss of preference pairs"""


class RewardConfig(PreferenceConfig):
    """The configuration of `nmoe reward`: [records] is required."""

    reward_model: RewardModelSection = RewardModelSection()
    """the loss of a reward model"""
    eval: Array[HeldOutEvalSection] = ()
    optimizer: FineTuningOptimizerSection = FineTuningOptimizerSection()


class VerifierConfig(SupervisedConfig):
    """The configuration of `nmoe verifier`. [verifier] may be left out, since all of its keys have defaults."""

    verifier: VerifierSection = VerifierSection()
    """labelled steps that a verifier learns from"""
    eval: Array[CountedEvalSection] = ()
    optimizer: FineTuningOptimizerSection = FineTuningOptimizerSection()


if TYPE_CHECKING:
    _Asynchronous = Section
else:
    # No class can name a field by a keyword.
    _ASYNC = Field(default=AsyncSection(), description="sampling beside the trainer")
    _Asynchronous = create_model(
        "_Asynchronous", __base__=Section, __module__=__name__, **{"async": (AsyncSection, _ASYNC)}
    )


class RLConfig(AdaptableConfig, _Asynchronous):
    """The configuration of `nmoe rl train`: [environment] is required."""

    run: RLRunSection = RLRunSection()
    environment: Annotated[EnvironmentSettings, FromFile(find_environment)]
    """the environment, or its `path`: a TOML file, a directory, or a packaged name"""
    sandbox: SandboxSettings = SandboxSettings()
    """isolation of tools and tests"""
    engine: RolloutEngineSection = RolloutEngineSection()
    """rollout engine"""
    placement: PlacementSection | None = None
    """processes to start and to watch; without it, the run's own process trains"""
    sampling: SamplingSection = SamplingSection()
    """sampling distribution"""
    batch: BatchSection = BatchSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    """policy gradient"""
    critic: CriticSection | None = None
    """the critic of PPO"""
    distillation: DistillationSection | None = None
    """a teacher in place of rewards"""
    eval: Array[RLEvalSection] = ()
    """evaluations during the run, as [[eval]]"""
    monitor: MonitorSection = MonitorSection()
    """rules that watch the run; kept rollouts"""

    @property
    def asynchrony(self) -> AsyncSection:
        """The table [async]."""
        section: AsyncSection = getattr(self, "async")
        return section

    def conflicts(self) -> Iterator[Conflict]:
        steps, episodes, shape = self.run.steps, self.run.episodes, self.model.shape
        if steps == 0 and episodes is None:
            yield Conflict("run.steps", "must be more than 0, unless run.episodes is given")
        if steps > 0 and episodes is not None:
            yield Conflict("run.steps", f"excludes run.episodes = {episodes:g}; give one of the two")
        if shape is not None and self.sampling.max_new_tokens >= shape.context_tokens:
            yield Conflict(
                "sampling.max_new_tokens",
                f"leaves no room for a prompt in model.shape.context_tokens = {shape.context_tokens}",
            )
        yield from self._algorithm_conflicts()
        if (form := self.model.expert_weights) != "dequantized" and self.engine.on_servers:
            if self.engine.transport(True) != "adapter":
                yield Conflict("engine.weights", f'must be "adapter": experts held in {form} are not sent')
            if form != "mxfp4" and self.engine.kind != "server":
                yield Conflict(
                    "engine.kind",
                    f'would sample from experts as the checkpoint has them, and not in {form}; use "server" or "native"',
                )
        if self.asynchrony.max_staleness:
            yield from self._asynchrony_conflicts()
        yield from self._placement_conflicts()
        if "open" in task_types(self.environment.task_pool) and self.batch.favour_unsolved:
            yield Conflict("batch.favour_unsolved", "open problems are never solved, so they would be drawn most often")
        if self.sampling.temperature == 0:
            yield Conflict("sampling.temperature", "at 0 all completions of a group are equal, so nothing is learned")
        for index, probe in enumerate(self.eval):
            if probe.environment is None and held_out(self.environment) is None:
                yield Conflict(
                    f"eval.{index}.every_steps",
                    "the training problems have no eval split; name another environment in eval.environment, or train on a part of "
                    "them (`train[200:]`) and name one with the rest (`train[:200]`)",
                )
            yield from effort_in_plain_text(index, probe, probe.environment or self.environment)
        yield from confusable(dict(enumerate(self.eval)), self.environment.env_id)

    @property
    def has_parent(self) -> bool:
        """Whether `nmoe rl train` is the parent of the processes that train and sample. These get the engines' addresses."""
        return self.placement is not None and not self.engine.urls

    @property
    def placed_engine(self) -> RolloutEngineSection:
        """[engine] with the number and the sizes of the servers that [placement] starts, if it does."""
        if self.placement is None or self.engine.urls:
            return self.engine
        placed = self.placement
        sizes = {"tensor_parallel": placed.tensor_parallel, "memory_share": placed.memory_share}
        return self.engine.model_copy(update={"servers": placed.engines, **sizes})

    def _placement_conflicts(self) -> Iterator[Conflict]:
        if self.placement is None:
            return
        if not self.engine.on_servers:
            yield Conflict(
                "engine.kind", f'is "{self.engine.kind}", and [placement] starts engine servers: set "server" or "vllm"'
            )
        here = {"servers": "engines", "tensor_parallel": "tensor_parallel", "memory_share": "memory_share"}
        for name, placed in here.items():
            default = RolloutEngineSection.model_fields[name].default
            if self.has_parent and getattr(self.engine, name) != default:
                yield Conflict(f"engine.{name}", f"is of servers without [placement]; give placement.{placed}")

    def _algorithm_conflicts(self) -> Iterator[Conflict]:
        algorithm, critic = self.algorithm, self.critic
        if algorithm.advantage == "gae" and critic is None:
            yield Conflict("algorithm.advantage", "gae needs a critic; add a [critic] table")
        if algorithm.advantage != "gae" and critic is not None:
            yield Conflict(
                "critic", f'advantage = "{algorithm.advantage}" uses no critic; set algorithm.advantage = "gae"'
            )
        if critic is not None and not critic.shared and (critic.path or self.model.path) is None:
            yield Conflict(
                "critic", "a separate critic starts from a checkpoint; name it in critic.path, or set shared"
            )
        if critic is not None and self.run.steps and critic.warmup_steps >= self.run.steps:
            yield Conflict("critic.warmup_steps", f"leaves no step for the policy (run.steps = {self.run.steps})")
        rewarded = self.distillation is None or self.distillation.reward_coef > 0
        if not rewarded and critic is not None:
            yield Conflict("critic", "distillation.reward_coef is 0, so there are no rewards for a critic to predict")
        if not rewarded and algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
            yield Conflict("algorithm.kl_in", "distillation.reward_coef is 0, so rewards do not count")
        if rewarded and algorithm.in_groups and self.batch.group_size < 2:
            yield Conflict(
                "batch.group_size", f'must be at least 2: advantage = "{algorithm.advantage}" compares within a group'
            )
        if algorithm.overlong_buffer > self.sampling.max_new_tokens:
            yield Conflict(
                "algorithm.overlong_buffer", f"is more than sampling.max_new_tokens = {self.sampling.max_new_tokens}"
            )
        if self.engine.weights == "adapter" and self.lora is None:
            yield Conflict(
                "engine.weights", 'is "adapter", and the run trains all weights; add [lora], or leave it out'
            )
        if self.engine.publish_every > 1 and algorithm.correction == "none" and algorithm.loss != "dppo":
            yield Conflict(
                "engine.publish_every",
                'trains on samples of older weights; correct for it: algorithm.correction = "tis"',
            )
        if self.engine.kind == "vllm" and self.batch.group_size > self.engine.max_sequences:
            yield Conflict(
                "engine.max_sequences",
                f"vLLM refuses a group of batch.group_size = {self.batch.group_size} samples with fewer sequences at once",
            )
        if self.lora is not None and self.lora.path and (self.engine.kind, self.engine.weights) == ("vllm", "adapter"):
            yield Conflict(
                "engine.weights",
                'vLLM would add the adapter to a base that has it already, because lora.path names a trained one; use "disk"',
            )
        if algorithm.reference_every_steps and self.lora is not None:
            yield Conflict(
                "algorithm.reference_every_steps", "with a [lora] the reference is always the initial model; set 0"
            )

    def _asynchrony_conflicts(self) -> Iterator[Conflict]:
        engine, key = self.engine, "async.max_staleness"
        if not engine.on_servers:
            yield Conflict(
                key,
                f'engine.kind = "{engine.kind}" samples on the thread that trains; set engine.kind = "server", or leave it out',
            )
        if engine.publish_every > 1:
            yield Conflict(
                "engine.publish_every",
                "samples have one way to be older than the learner: leave it out, and raise async.max_staleness",
            )
        if engine.weights == "group":
            yield Conflict(
                "engine.weights",
                '"group" cannot send the last publication once more to a server that failed while the learner trains; use "disk"',
            )


class SelfplayConfig(RunConfig):
    """The configuration of `nmoe selfplay`: [selfplay] is required. It trains whole models, without adapters."""

    run: SelfplayRunSection
    selfplay: SelfplaySection
    """judges, rounds, training"""
    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = None
    """the environment, or its `path`; default: Harmony over selfplay.problem_source"""
    sandbox: SandboxSettings = SandboxSettings()
    """isolation of tools and tests"""
    engine: EngineSection = EngineSection()
    """rollout engine"""
    sampling: SamplingSection = SamplingSection()
    """sampling distribution"""
    batch: GroupBatchSection = GroupBatchSection()
    algorithm: PolicyLossSection = PolicyLossSection()
    """policy gradient of the generator"""
    eval: Array[SelfplayEvalSection] = ()
    """evaluation of the verifier, as [[eval]]"""
    monitor: SampleRateSection = SampleRateSection()
    """rules that watch the run; kept rollouts"""

    def conflicts(self) -> Iterator[Conflict]:
        yield from only_one(range(len(self.eval)), "the verifier is evaluated on one environment")
        if self.environment is not None:
            yield from self._environment_conflicts(self.environment)
        elif self.selfplay.problem_source is None:
            yield Conflict("selfplay.problem_source", "is required, or an [environment] with a task pool")
        if self.sampling.temperature == 0:
            yield Conflict("sampling.temperature", "at 0 all verifications of a proof are equal, and count once")
        if self.selfplay.train:
            yield from self._training_conflicts()

    @property
    def trains(self) -> bool:
        return self.selfplay.train

    def _environment_conflicts(self, environment: EnvironmentSettings) -> Iterator[Conflict]:
        if not isinstance(environment.task_pool, SelfplayPool):
            yield Conflict("environment.task_pool.type", 'must be "selfplay": problems without answers')
        for key in ("rubric", "curriculum"):
            if getattr(environment, key) is not None:
                yield Conflict(f"environment.{key}", "self-play has its own rewards for each role; leave it out")
        if environment.rewards:
            yield Conflict("environment.rewards", "self-play has its own rewards for each role; leave them out")

    def _training_conflicts(self) -> Iterator[Conflict]:
        if self.sampling.top_p < 1 or self.sampling.top_k:
            yield Conflict("sampling", "training needs the full distribution; set top_p = 1 and top_k = 0")
        if self.run.steps % self.selfplay.rounds:
            yield Conflict("run.steps", f"must be a multiple of selfplay.rounds = {self.selfplay.rounds}")
        elif self.selfplay.generator_steps > self.run.steps // self.selfplay.rounds:
            yield Conflict(
                "selfplay.generator_steps",
                f"are more than the steps of a round, run.steps / selfplay.rounds = {self.run.steps // self.selfplay.rounds}",
            )
        if self.batch.group_size < 2:
            yield Conflict("batch.group_size", "must be at least 2: the rewards of proofs are compared within a group")
        if self.algorithm.overlong_buffer > self.sampling.max_new_tokens:
            yield Conflict(
                "algorithm.overlong_buffer", f"is more than sampling.max_new_tokens = {self.sampling.max_new_tokens}"
            )


COMMANDS: dict[str, type[RunConfig]] = {
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward": RewardConfig,
    "verifier": VerifierConfig,
    "rl train": RLConfig,
    "selfplay": SelfplayConfig,
}
