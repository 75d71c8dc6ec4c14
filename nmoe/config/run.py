"""The settings of a run: one class per table of its TOML file, every key with its meaning, default and limits.

Relative paths start from the directory that the command runs in, except those that name an environment's file, which start
from the file they stand in, as do the paths in that file.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from nmoe.config.base import Array, Conflict, FromFile, Section
from nmoe.config.dataset import RecordsSection, SFTRecordsSection
from nmoe.config.environment import MAX_SEED, EnvironmentSettings, duplicates, held_out, task_types
from nmoe.config.loader import load
from nmoe.config.packaged import find_environment
from nmoe.config.sandbox import SandboxSettings
from nmoe.config.slices import split_path
from nmoe.config.verifier import VerifierSection

NAME = r"\w[\w.+=-]*"
# Adapters learn at about ten times the rate of all weights (Thinking Machines, "LoRA Without Regret", 2025).
LORA_LEARNING_RATE_FACTOR = 10


class RunSection(Section):
    """[run]: what the run is called, where it lives and how long it goes on."""

    name: str = Field(default="run", description="the run lives in directory/name; default: the file's name")
    directory: str = Field(default="runs", min_length=1, description="the directory of all runs")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of everything that is drawn at random")
    threads: int = Field(default=0, ge=0, description="CPU threads; 0: as many as are free")
    steps: int = Field(gt=0, description="optimizer steps to take; left out where records.epochs says how far to go")
    resume: bool = Field(default=False, description="go on from the run's latest checkpoint")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not re.fullmatch(NAME, self.name):
            yield Conflict("name", "is a directory's name: letters, digits and . _ + = -, the first a letter or digit")


class RecordsRunSection(RunSection):
    """[run] of what learns from records, which may go on for epochs instead."""

    steps: int = Field(default=0, ge=0, description="optimizer steps to take; 0: those of records.epochs")


class ModelShape(Section):
    """[model.shape]: a new model, dense or mixture-of-experts. The tokenizer gives the vocabulary's size."""

    hidden_size: int = Field(gt=0, description="width of the residual stream")
    layers: int = Field(gt=0, description="transformer blocks")
    heads: int = Field(gt=0, description="query heads")
    kv_heads: int = Field(gt=0, description="key and value heads, each shared by heads / kv_heads query heads")
    head_dim: int = Field(gt=0, description="width of one head; even, because rotary embeddings turn pairs")
    context_tokens: int = Field(gt=1, description="longest sequence, prompt and completion together")
    intermediate_size: int = Field(default=0, ge=0, description="width of the dense FFN; used when experts = 0")
    experts: int = Field(default=0, ge=0, description="routed experts of each layer; 0: dense")
    experts_per_token: int = Field(default=0, ge=0, description="experts chosen for each token")
    expert_width: int = Field(default=0, ge=0, description="width of one expert's FFN")
    shared_experts: int = Field(default=0, ge=0, description="experts that see every token, beside the routed ones")
    router_scores: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="how router logits become scores"
    )
    renormalize: bool = Field(default=True, description="scale the chosen experts' scores to sum to 1")
    qk_norm: bool = Field(default=True, description="RMS-normalise queries and keys")
    tie_embeddings: bool = Field(default=True, description="one matrix for embedding and output head")
    rope_theta: float = Field(default=10000.0, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(default=1e-6, gt=0, description="epsilon of the RMS norms")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.heads % self.kv_heads:
            yield Conflict("kv_heads", f"must divide heads = {self.heads}")
        if self.head_dim % 2:
            yield Conflict("head_dim", "must be even")
        if self.experts == 0 and self.intermediate_size == 0:
            yield Conflict("intermediate_size", "a dense model (experts = 0) needs the width of its FFN")
        if self.experts > 0 and not 1 <= self.experts_per_token <= self.experts:
            yield Conflict("experts_per_token", f"must be between 1 and experts = {self.experts}")
        if self.experts > 0 and self.expert_width == 0:
            yield Conflict("expert_width", "a mixture-of-experts model needs the width of an expert")


class ModelSection(Section):
    """[model]: a checkpoint to start from, or the shape of a new model."""

    path: str | None = Field(default=None, min_length=1, description="directory of the checkpoint to start from")
    shape: ModelShape | None = Field(default=None, description="the shape of a new model")
    numerics: Literal["fast", "exact"] = Field(
        default="fast",
        description="exact: engine and learner compute the same bits (fp32 on CPU), at some cost in speed",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="of weights and activations; below float32 the optimizer holds float32 masters of the weights",
    )
    router_bias_rate: float | None = Field(
        default=None,
        ge=0,
        description="step of loss-free load balancing, 0: off; default: as the checkpoint was trained, and off in RL and self-play",
    )
    router_aux_loss_coef: float | None = Field(
        default=None, ge=0, description="weight of the load-balancing loss, 0: off; default: as router_bias_rate"
    )
    checkpoint_activations: bool = Field(
        default=False, description="keep only each block's input for the backward pass, which runs the block again"
    )
    compile: bool = Field(
        default=False, description="compile the feed-forward half of the blocks; on a CPU needs a C++ compiler"
    )
    tokenizer: str | None = Field(
        default=None, min_length=1, description="directory of the tokenizer; default: the one in `path`"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.path is not None and self.shape is not None:
            yield Conflict("path", "a checkpoint has its own shape; give either path or [model.shape]")
        if self.path is None and self.shape is None:
            yield Conflict("", "needs either path (a checkpoint) or [model.shape] (a new model)")
        if self.path is None and self.shape is not None and self.tokenizer is None:
            yield Conflict("tokenizer", "a new model needs the directory of a tokenizer")
        if self.numerics == "exact" and self.precision != "float32":
            yield Conflict("numerics", f"exact is for float32, and precision is {self.precision}")
        if self.numerics == "exact" and self.compile:
            yield Conflict("numerics", "exact fixes how sums are taken, and compile takes them its own way")


class LoraSection(Section):
    """[lora]: train a low-rank adapter beside the frozen base that model.path names, and nothing else."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="run or directory of the adapter to start from, which then gives rank, alpha, rslora and targets",
    )
    rank: int = Field(default=32, gt=0, description="rank of each update")
    alpha: float | None = Field(
        default=None, gt=0, description="the update is scaled by alpha / rank; default: twice the rank"
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank) instead")
    targets: Array[
        Literal[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "q_a_proj",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "experts.gate_up_proj",
            "experts.down_proj",
        ]
    ] = Field(
        default=(), description="projections to adapt; none: those of attention, and in a dense model of the MLP too"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.path is not None:
            for key in ("rank", "alpha", "rslora", "targets"):
                if key in self.model_fields_set:
                    yield Conflict(key, "the adapter in lora.path has its own")


class DocumentSourceSection(Section):
    """[[data.sources]]: one source of a mixture of documents."""

    path: str = Field(min_length=1, description="as `documents` of [data]")
    weight: float = Field(default=1.0, gt=0, description="share of the tokens, relative to the other sources' weights")
    name: str = Field(default="", description="name of the source in metrics, unique; default: the file's name")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not re.fullmatch(NAME, self.label):
            yield Conflict(
                "name" if self.name else "path",
                f"the source's name would be {self.label!r}; give it a `name`, which metrics carry: letters, digits and "
                ". _ + = -, the first a letter or digit",
            )

    @property
    def label(self) -> str:
        """The name, made of the path's last part where none is given."""
        return self.name or Path(split_path(self.path)[0]).name.partition(".")[0]


class DataSection(Section):
    """[data]: the text to pretrain on."""

    documents: str | None = Field(
        default=None,
        min_length=1,
        description="dataset with a document's `text` or `token_ids` in each row: a file, a directory or a hub name",
    )
    sources: Array[DocumentSourceSection] = Field(
        default=(), description="several datasets, mixed by weight, as [[data.sources]], in place of `documents`"
    )
    tokens_per_step: int = Field(default=16384, gt=0, description="tokens of one optimizer step")
    held_out_documents: int = Field(
        default=0, ge=0, description="documents of each source kept from training, to evaluate on"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.documents is None and not self.sources:
            yield Conflict("", "needs either documents (one dataset) or [[data.sources]] (several, mixed)")
        if self.documents is not None and self.sources:
            yield Conflict("documents", "is one of several sources here: give it a [[data.sources]] of its own")
        yield from duplicates("sources", (source.label for source in self.sources))

    @property
    def mixture(self) -> tuple[DocumentSourceSection, ...]:
        """The sources, of which `documents` is the only one."""
        return self.sources if self.documents is None else (DocumentSourceSection(path=self.documents),)


class EngineSection(Section):
    """[engine]: how rollouts are generated."""

    max_sequences: int = Field(default=256, gt=0, description="the most sequences that are generated side by side")
    cache_mb: int = Field(
        default=0, ge=0, description="memory of the key-value cache; 0: what max_sequences need, at most 4096"
    )


class SamplingSection(Section):
    """[sampling]: the distribution that completions are drawn from."""

    max_new_tokens: int = Field(default=256, gt=0, description="the most tokens of one completion")
    temperature: float = Field(default=1.0, ge=0, description="0: always the most likely token")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="smallest set of tokens with this much probability; 1: off"
    )
    top_k: int = Field(default=0, ge=0, description="only so many most likely tokens; 0: off")


class MicroBatchSection(Section):
    """[batch] of every command: in what portions a step goes through the model."""

    tokens_per_microbatch: int = Field(default=16384, gt=0, description="tokens of one forward and backward pass")


class GroupBatchSection(MicroBatchSection):
    """[batch] of what samples groups: self-play takes these keys alone."""

    prompts_per_step: int = Field(default=16, gt=0, description="problems of one step")
    group_size: int = Field(default=8, ge=1, description="completions of each problem, compared with one another")


class BatchSection(GroupBatchSection):
    """[batch]: how much goes into one step, and in what portions."""

    updates_per_step: int = Field(
        default=1, ge=1, description="optimizer steps of one pass over a step's groups, which are dealt out among them"
    )
    passes_per_step: int = Field(default=1, ge=1, description="passes over a step's groups")
    oversampling: float = Field(
        default=1.0, ge=1, description="problems sampled for each that is wanted, since some groups teach nothing"
    )
    max_refills: int = Field(
        default=1, ge=0, description="how many times a step samples more prompts for groups that teach nothing"
    )
    favour_unsolved: bool = Field(
        default=False,
        description="draw the problems of a source in proportion to the share of it that is not solved yet, at least a tenth",
    )
    solve_rate: Array[float] = Field(
        default=(0.0, 1.0), description="lowest and highest mean correctness of a group that is trained on"
    )

    @property
    def updates(self) -> int:
        """The most optimizer steps of one step."""
        return self.updates_per_step * self.passes_per_step

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if len(self.solve_rate) != 2 or not 0 <= self.solve_rate[0] <= self.solve_rate[1] <= 1:
            yield Conflict("solve_rate", "is two rates between 0 and 1, the lower one first, such as [0.1, 0.9]")
        elif self.group_size == 1 and self.solve_rate[0] > 0 and self.solve_rate[1] < 1:
            yield Conflict("solve_rate", "that of a group of one is 0 or 1, so that none would be trained on")
        if self.updates_per_step > self.prompts_per_step:
            yield Conflict(
                "updates_per_step",
                f"an update takes whole groups, and a step has prompts_per_step = {self.prompts_per_step} of them",
            )


# What bounds a loss where clip_low and clip_high say nothing: those of its paper (docs/algorithms.md).
CLIP_DEFAULTS = {
    "clip": (0.2, 0.2),
    "dual_clip": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (None, 4.0),
    "dppo": (0.2, 0.2),
}


class PolicyLossSection(Section):
    """[algorithm] of every policy gradient: self-play takes these keys alone."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp"] = Field(
        default="dr_grpo",
        description="reward minus group mean; grpo: over its deviation; rloo: mean of the others; maxrl: over the mean; "
        "reinforce_pp: whitened over the batch",
    )
    loss: Literal["clip", "dual_clip", "gspo", "cispo", "dppo"] = Field(
        default="clip",
        description="clipped ratio; dual_clip: bounded where the advantage is negative; gspo: one ratio for a sequence; "
        "cispo: the clipped ratio as a weight; dppo: a region in probabilities",
    )
    aggregation: Literal["token", "sequence", "constant"] = Field(
        default="constant",
        description="mean over all tokens; over each sequence, then over sequences; sum over sampling.max_new_tokens",
    )
    clip_low: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="the ratio is clipped below at 1 - clip_low; default: 0.2, gspo 3e-4; dppo's is of probabilities, 0.2",
    )
    clip_high: float | None = Field(
        default=None,
        gt=0,
        description="the ratio is clipped above at 1 + clip_high; default: 0.2, gspo 4e-4, cispo 4; dppo's as above, 0.2",
    )
    dual_clip_bound: float = Field(
        default=3.0, gt=1, description="dual_clip: bound on the ratio where the advantage is negative"
    )
    correction: Literal["none", "tis", "mask", "sequence_mask"] = Field(
        default="none",
        description="weights for a sampler that differs from the learner: capped; masked outside a window, by token (icepop) "
        "or by the mean of a sequence",
    )
    correction_cap: float = Field(default=2.0, ge=1, description="tis, sequence_mask: highest weight of a token")
    correction_window: Array[float] | None = Field(
        default=None, description="lowest and highest ratio kept; default: mask [0.5, 2], sequence_mask [0.99, 1.01]"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    overlong_buffer: int = Field(
        default=0, ge=0, description="over the last so many tokens before the limit a penalty rises to 1; 0: none"
    )
    length_penalty: float = Field(
        default=0.0, ge=0, description="weight of a reward for answers shorter than others of their group"
    )

    @property
    def clip_range(self) -> tuple[float | None, float]:
        """Lower and upper bound of the loss, with its defaults filled in."""
        low, high = CLIP_DEFAULTS[self.loss]
        return self.clip_low if self.clip_low is not None else low, self.clip_high or high

    def given(self) -> set[str]:
        """The keys whose values are not their defaults."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        given = self.given()
        if self.loss == "gspo" and self.aggregation != "sequence":
            yield Conflict(
                "aggregation",
                'gspo has one ratio for a sequence, and long ones would count more: set algorithm.aggregation = "sequence"',
            )
        if self.loss == "cispo" and "clip_low" in given:
            yield Conflict("clip_low", "cispo has no lower bound")
        if self.loss != "dual_clip" and "dual_clip_bound" in given:
            yield Conflict("dual_clip_bound", f'is for loss = "dual_clip", and loss is "{self.loss}"')
        if self.loss == "dppo" and self.correction != "none":
            yield Conflict(
                "correction", "dppo's ratio is to the sampler already; a correction on top would count it twice"
            )
        if self.correction not in ("tis", "sequence_mask") and "correction_cap" in given:
            yield Conflict("correction_cap", f'correction = "{self.correction}" caps nothing')
        if (window := self.correction_window) is not None:
            if self.correction not in ("mask", "sequence_mask"):
                yield Conflict("correction_window", f'correction = "{self.correction}" has no window')
            elif len(window) != 2 or not 0 < window[0] <= 1 <= window[1]:
                yield Conflict("correction_window", "is two ratios around 1, such as [0.5, 2.0]")
        if self.advantage == "maxrl":
            for key, value in (("overlong_buffer", self.overlong_buffer), ("length_penalty", self.length_penalty)):
                if value:
                    yield Conflict(key, "maxrl divides by the mean reward, which may not become negative")


class AlgorithmSection(PolicyLossSection):
    """[algorithm]: the policy-gradient estimator."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "gae"] = Field(  # type: ignore[assignment]
        default="dr_grpo",
        description="reward minus group mean; grpo: over its deviation; rloo: mean of the others; maxrl: over the mean; "
        "reinforce_pp: whitened over the batch; gae: by the critic of [critic], which is PPO",
    )
    multi_reward: Literal["sum", "gdpo"] = Field(
        default="sum", description="the rubric's weighted sum; gdpo: each of its rewards normalised by itself first"
    )
    step_reward_coef: float = Field(
        default=1.0, ge=0, description="weight of the rewards that a verifier gives to the steps of an answer"
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the divergence from the reference; 0: no reference"
    )
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="where that divergence is taken off")
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="estimator of that divergence; default: k3 in the loss, k1 in the reward"
    )
    kl_importance_weights: bool = Field(
        default=True,
        description="in the loss, weigh that divergence by policy / sampler, so that stale samples do not bias its gradient",
    )
    reference_every_steps: int = Field(
        default=0, ge=0, description="the policy becomes the reference every so many steps; 0: the start stays it"
    )
    mask_truncated: bool = Field(
        default=False, description="completions cut at the token limit count in baselines and are not trained on"
    )

    @property
    def in_groups(self) -> bool:
        """Whether a sample is compared with the others of its prompt, so that a group whose rewards are alike teaches nothing."""
        return self.advantage not in ("reinforce_pp", "gae")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        given = self.given()
        if self.multi_reward == "gdpo" and self.advantage != "grpo":
            yield Conflict("multi_reward", f'gdpo normalises as advantage = "grpo" does, and not as "{self.advantage}"')
        if self.multi_reward == "gdpo" and self.kl_in == "reward":
            yield Conflict("kl_in", "gdpo normalises each reward by itself, and the divergence is none of them")
        if self.advantage == "maxrl" and self.kl_in == "reward":
            yield Conflict("kl_in", "maxrl divides by the mean reward, which may not become negative")
        if self.kl_coef == 0:
            for key in ("kl_in", "kl_estimator", "kl_importance_weights", "reference_every_steps"):
                if key in given:
                    yield Conflict(key, "there is no divergence to measure: kl_coef is 0")
        elif self.kl_in == "reward" and "kl_importance_weights" in given:
            yield Conflict("kl_importance_weights", 'weighs the divergence in the loss, and kl_in = "reward"')


class CriticSection(Section):
    """[critic]: what estimates the value of a state, for algorithm.advantage = "gae"."""

    shared: bool = Field(
        default=False, description="a value head on the policy's own trunk; otherwise a model of its own, with its head"
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="checkpoint that the critic's own model starts from; default: model.path",
    )
    learning_rate: float = Field(
        default=1e-5, gt=0, description="peak learning rate of the critic, or of the shared head"
    )
    coef: float = Field(default=0.1, gt=0, description="shared: weight of the value loss beside the policy's")
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount of a reward per token")
    trace_decay: float = Field(
        default=0.95, ge=0, le=1, description="lambda: 1 trusts returns alone, 0 the critic alone"
    )
    clip: float | None = Field(
        default=0.2, gt=0, description="how far a value may move from that before the step's updates"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps at the start that train the critic alone")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.shared and self.path is not None:
            yield Conflict("path", "a shared critic is a head on the policy's trunk and has no checkpoint of its own")
        if self.shared and self.warmup_steps:
            yield Conflict(
                "warmup_steps", "training a shared critic moves the policy; the warm-up is for one of its own"
            )
        if not self.shared and self.coef != type(self).model_fields["coef"].default:
            yield Conflict("coef", "a critic of its own is trained by itself; its learning_rate is what counts")


class DistillationSection(Section):
    """[distillation]: a teacher whose log-probabilities of what the policy samples take the place of rewards."""

    teacher: str = Field(min_length=1, description="run or directory of the teacher, with the tokenizer of the policy")
    coef: float = Field(default=1.0, gt=0, description="weight of the divergence from the teacher, token by token")
    reward_coef: float = Field(
        default=0.0, ge=0, description="weight of the advantages from rewards beside it; 0: the teacher alone"
    )


class PreferenceSection(Section):
    """[preference]: the loss of DPO and its kin."""

    loss: Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo"] = Field(
        default="sigmoid",
        description="of the pairs' log ratios: DPO's; DPO's of means over tokens; unbiased under flipped labels; a hinge; IPO's "
        "square, of means over tokens",
    )
    beta: float = Field(
        default=0.1, gt=0, description="strength of the tie to the reference, IPO's tau; higher: tighter"
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="share of pairs whose sides are taken to be swapped"
    )
    sft_weight: float = Field(
        default=0.0, ge=0, description="weight of the mean loss over the tokens of the preferred side"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.label_smoothing > 0 and self.loss in ("hinge", "ipo"):
            yield Conflict("label_smoothing", f'loss = "{self.loss}" has none; sigmoid, sigmoid_norm and robust do')


class RewardModelSection(Section):
    """[reward_model]: the Bradley-Terry loss."""

    margin: float = Field(
        default=0.0, ge=0, description="how far the preferred answer's reward is to lie above the other's"
    )
    centering: float = Field(
        default=0.0, ge=0, description="weight of the squared sum of a pair's rewards, which holds their mean near 0"
    )


class OptimizerSection(Section):
    """[optimizer]: AdamW with linear warm-up and cosine decay."""

    learning_rate: float = Field(
        default=1e-6,
        gt=0,
        description="peak learning rate; where it is left out 3e-4 in pretrain, 1e-5 in sft, reward and verifier, 1e-6 in dpo, "
        "rl and selfplay, and ten times that with a [lora]",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="steps of linear warm-up; a run of no more steps than these warms up until its last",
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate as a share of the peak")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    max_grad_norm: float = Field(default=1.0, gt=0, description="the gradient's norm is clipped to this")


class PeriodSection(Section):
    """[eval] of what learns from given examples, some of which are held out."""

    every_steps: int = Field(default=0, ge=0, description="steps between evaluations; 0: none during the run")


class CountedEvalSection(PeriodSection):
    """[eval] of a verifier."""

    problems: int = Field(default=200, gt=0, description="held-out problems of one evaluation")


class EvalSection(CountedEvalSection):
    """[eval]: evaluation during the run."""

    environment: Annotated[EnvironmentSettings | None, FromFile(find_environment)] = Field(
        default=None, description="held-out environment, or its `path`; default: a split of the training environment"
    )
    split: Literal["validation", "eval"] = Field(
        default="eval",
        description="the training environment's split to evaluate on; what decides when a run ends is not what it is judged by",
    )
    temperature: float = Field(default=0.0, ge=0, description="0: greedy; otherwise one sample at this temperature")
    enough: float | None = Field(
        default=None, gt=0, le=1, description="the run ends when every source of problems is solved at this rate"
    )
    patience: int | None = Field(
        default=None, gt=0, description="the run ends after so many evaluations in a row in which no source got better"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        for key in ("enough", "patience"):
            if getattr(self, key) is not None and self.every_steps == 0:
                yield Conflict(key, "looks at evaluations, of which there are none during the run; set every_steps")
        if self.environment is not None and self.split != "eval":
            yield Conflict("split", "is of the training environment, and eval.environment names another")


class CheckpointSection(Section):
    """[checkpoint]: what is kept to resume from and to choose from."""

    every_steps: int = Field(default=50, gt=0, description="steps between checkpoints")
    keep: int = Field(default=2, gt=0, description="newest checkpoints that are kept")


class SampleRateSection(Section):
    """[monitor] of what samples: self-play takes this key alone."""

    replay_sample_rate: float = Field(
        default=0.001, ge=0, le=1, description="share of all trajectories kept as replay bundles"
    )


class MonitorSection(SampleRateSection):
    """[monitor]: what a run keeps of its rollouts, to look into later."""

    replays_per_failure: int = Field(
        default=1, ge=0, description="replay bundles kept of each class of failure and step, in addition"
    )


class RunConfig(Section):
    """What every run has. Each command has a schema of its own, which adds the tables that it reads: any other is refused."""

    default_learning_rate: ClassVar[float] = 1e-6

    run: RunSection = Field(description="name, length, seed")
    model: ModelSection = Field(description="checkpoint or shape")
    batch: MicroBatchSection = Field(default=MicroBatchSection(), description="batch sizes")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="optimizer and schedule")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="checkpoints")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        shape = self.model.shape
        if shape is not None and self.batch.tokens_per_microbatch < shape.context_tokens:
            yield Conflict(
                "batch.tokens_per_microbatch",
                f"a sequence of model.shape.context_tokens = {shape.context_tokens} does not fit in",
            )


class AdaptableConfig(RunConfig):
    """A run that trains all weights or an adapter."""

    lora: LoraSection | None = Field(default=None, description="train an adapter; without it, all weights")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.lora is not None and self.model.path is None:
            yield Conflict("lora", "an adapter is trained beside a base; name its checkpoint in model.path")


class SupervisedConfig(AdaptableConfig):
    """A run that learns from given examples."""

    eval: PeriodSection = Field(default=PeriodSection(), description="evaluation during the run")


class PretrainConfig(SupervisedConfig):
    """A run of `nmoe pretrain`: [data] is required."""

    default_learning_rate: ClassVar[float] = 3e-4

    data: DataSection = Field(description="text to pretrain on")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.eval.every_steps > 0 and self.data.held_out_documents == 0:
            yield Conflict("eval.every_steps", "nothing to evaluate on; set data.held_out_documents")


class RecordsConfig(SupervisedConfig):
    """A run that learns from [records], for run.steps or for records.epochs."""

    run: RecordsRunSection = Field(default=RecordsRunSection(), description="name, length, seed")
    records: RecordsSection = Field(description="examples to learn from")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        epochs = self.records.epochs
        if self.run.steps == 0 and epochs is None:
            yield Conflict("run.steps", "must be more than 0, or records.epochs be given")
        if self.run.steps > 0 and epochs is not None:
            yield Conflict("run.steps", f"and records.epochs = {epochs:g}: give one or the other")
        if self.eval.every_steps > 0 and not self.records.holds_out:
            yield Conflict(
                "eval.every_steps", "nothing to evaluate on; set records.held_out, held_out_path or held_out_split"
            )
        if self.records.holds_out and self.eval.every_steps == 0:
            yield Conflict("eval.every_steps", "records are held out, and never evaluated on; say how often")


class SFTConfig(RecordsConfig):
    """A run of `nmoe sft`."""

    default_learning_rate: ClassVar[float] = 1e-5

    records: SFTRecordsSection = Field(description="examples to learn from")


class PreferenceConfig(RecordsConfig):
    """A run that learns from preference pairs."""

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.records.kind not in (None, "preference"):
            yield Conflict("records.kind", "pairs are records of the kind preference")


class DPOConfig(PreferenceConfig):
    """A run of `nmoe dpo`."""

    preference: PreferenceSection = Field(default=PreferenceSection(), description="the loss of preference pairs")


class RewardConfig(PreferenceConfig):
    """A run of `nmoe reward`."""

    default_learning_rate: ClassVar[float] = 1e-5

    reward_model: RewardModelSection = Field(default=RewardModelSection(), description="the loss of a reward model")


class RLConfig(AdaptableConfig):
    """A run of `nmoe rl train`: [environment] is required."""

    environment: Annotated[EnvironmentSettings, FromFile(find_environment)] = Field(
        description="the environment, or its `path`: a TOML file, a directory, or a packaged name"
    )
    sandbox: SandboxSettings = Field(default=SandboxSettings(), description="isolation of tools and tests")
    engine: EngineSection = Field(default=EngineSection(), description="rollout engine")
    sampling: SamplingSection = Field(default=SamplingSection(), description="sampling distribution")
    batch: BatchSection = Field(default=BatchSection(), description="batch sizes")
    algorithm: AlgorithmSection = Field(default=AlgorithmSection(), description="policy gradient")
    critic: CriticSection | None = Field(default=None, description="the critic of PPO")
    distillation: DistillationSection | None = Field(default=None, description="a teacher in the place of rewards")
    eval: EvalSection = Field(default=EvalSection(), description="evaluation during the run")
    monitor: MonitorSection = Field(default=MonitorSection(), description="what is kept of rollouts")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        shape = self.model.shape
        if shape is not None and self.sampling.max_new_tokens >= shape.context_tokens:
            yield Conflict(
                "sampling.max_new_tokens",
                f"leaves no room for a prompt in model.shape.context_tokens = {shape.context_tokens}",
            )
        yield from self._algorithm_conflicts()
        if self.batch.favour_unsolved and "open" in task_types(self.environment.task_pool):
            yield Conflict(
                "batch.favour_unsolved", "open problems are never solved, and would be drawn in place of all others"
            )
        if self.sampling.temperature == 0:
            yield Conflict("sampling.temperature", "at 0 a group's completions are all alike, and nothing is learned")
        if self.eval.every_steps > 0 and self.eval.environment is None and held_out(self.environment) is None:
            yield Conflict(
                "eval.every_steps", "the training problems have no eval split; name another in eval.environment"
            )

    def _algorithm_conflicts(self) -> Iterator[Conflict]:
        algorithm, critic = self.algorithm, self.critic
        if algorithm.advantage == "gae" and critic is None:
            yield Conflict("algorithm.advantage", "gae needs the values of a critic: add a [critic] table")
        if algorithm.advantage != "gae" and critic is not None:
            yield Conflict(
                "critic", f'advantage = "{algorithm.advantage}" asks no critic; set algorithm.advantage = "gae"'
            )
        if critic is not None and not critic.shared and (critic.path or self.model.path) is None:
            yield Conflict(
                "critic", "a critic of its own starts from a checkpoint: name it in critic.path, or set shared"
            )
        if critic is not None and critic.warmup_steps >= self.run.steps:
            yield Conflict("critic.warmup_steps", f"leaves no step to the policy (run.steps = {self.run.steps})")
        rewarded = self.distillation is None or self.distillation.reward_coef > 0
        if not rewarded and critic is not None:
            yield Conflict(
                "critic", "distillation.reward_coef is 0, so that there are no rewards for a critic to foretell"
            )
        if not rewarded and algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
            yield Conflict("algorithm.kl_in", "distillation.reward_coef is 0, so that rewards do not count")
        if rewarded and algorithm.in_groups and self.batch.group_size < 2:
            yield Conflict(
                "batch.group_size", f'must be at least 2: advantage = "{algorithm.advantage}" compares within a group'
            )
        if algorithm.length_penalty and self.batch.group_size < 2:
            yield Conflict("algorithm.length_penalty", "compares lengths within a group, and batch.group_size is 1")
        if algorithm.overlong_buffer > self.sampling.max_new_tokens:
            yield Conflict(
                "algorithm.overlong_buffer", f"is more than sampling.max_new_tokens = {self.sampling.max_new_tokens}"
            )
        if algorithm.reference_every_steps and self.lora is not None:
            yield Conflict(
                "algorithm.reference_every_steps", "with a [lora] the reference stays what the run starts from; set 0"
            )


class VerifierConfig(SupervisedConfig):
    """A run of `nmoe verifier`: [verifier] is required, and has defaults for all of its keys."""

    default_learning_rate: ClassVar[float] = 1e-5

    verifier: VerifierSection = Field(
        default=VerifierSection(), description="labelled steps that a verifier learns from"
    )
    eval: CountedEvalSection = Field(default=CountedEvalSection(), description="evaluation during the run")


C = TypeVar("C", bound=RunConfig)


def load_run(path: Path, schema: type[C], overrides: Sequence[str] = ()) -> C:
    """`load`, with the file's stem as the name of a run that has none, and with the command's learning rate where the run has none.
    Raises ConfigError with all problems."""
    config = load(path, schema, overrides)
    if "learning_rate" not in config.optimizer.model_fields_set:
        adapts = isinstance(config, AdaptableConfig) and config.lora is not None
        rate = schema.default_learning_rate * (LORA_LEARNING_RATE_FACTOR if adapts else 1)
        optimizer = config.optimizer.model_copy(update={"learning_rate": rate})
        config = config.model_copy(update={"optimizer": optimizer})
    if "name" in config.run.model_fields_set:
        return config
    name = re.sub(r"^\W|[^\w.+=-]", "_", path.stem)
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
