"""[algorithm], [batch], [critic] and [distillation]: the policy gradient, its batches, the critic and the teacher."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmoe.config.base import Array, Conflict, NameIn, Section
from nmoe.config.registry import ADVANTAGES, LOSSES
from nmoe.config.tables.rollout import fault_of_urls

# The largest batches that papers report are of some thousand samples.
MOST_SAMPLES = 2**20


class MicroBatchSection(Section):
    """[batch] of the supervised commands: the size of a micro-batch."""

    tokens_per_microbatch: int = Field(default=16384, gt=0)
    """tokens per forward and backward pass"""


class GroupBatchSection(MicroBatchSection):
    """[batch] of self-play."""

    prompts_per_step: int = Field(default=16, gt=0)
    """problems per step"""
    group_size: int = Field(default=8, ge=1)
    """completions per problem, which are compared with one another"""

    def conflicts(self) -> Iterator[Conflict]:
        samples = self.prompts_per_step * self.group_size
        if samples > MOST_SAMPLES:
            key = "group_size" if self.group_size > self.prompts_per_step else "prompts_per_step"
            yield Conflict(
                key, f"prompts_per_step x group_size = {samples:,} samples of a step; at most {MOST_SAMPLES:,}"
            )


class BatchSection(GroupBatchSection):
    """[batch]: how many samples a step has, and how many tokens a forward and backward pass has."""

    updates_per_step: int = Field(default=1, ge=1)
    """optimizer steps per pass over a step's groups; each uses its part of the groups"""
    passes_per_step: int = Field(default=1, ge=1)
    """passes over a step's groups"""
    oversampling: float = Field(default=1.0, ge=1)
    """problems sampled per problem needed, as groups with equal rewards carry no learning signal and are dropped"""
    max_refills: int = Field(default=1, ge=0)
    """how often a step may sample more problems to replace groups without learning signal"""
    favour_unsolved: bool = False
    """draw from each source of problems in proportion to its unsolved share, at least a tenth"""
    favour_learnable: bool = False
    """draw from each source of problems in proportion to r (1 - r), r its solved share, at least a tenth: easy sources first,
    harder ones as they begin to be solved"""
    solve_rate: Array[float] = (0.0, 1.0)
    """train only on groups whose mean correctness lies in this range"""

    @property
    def updates(self) -> int:
        """The maximum number of optimizer steps in one training step."""
        return self.updates_per_step * self.passes_per_step

    def conflicts(self) -> Iterator[Conflict]:
        if len(self.solve_rate) != 2 or not 0 <= self.solve_rate[0] <= self.solve_rate[1] <= 1:
            yield Conflict("solve_rate", "must be two rates between 0 and 1, the lower one first, such as [0.1, 0.9]")
        elif self.group_size == 1 and self.solve_rate[0] > 0 and self.solve_rate[1] < 1:
            yield Conflict("solve_rate", "a group of one has a rate of 0 or 1, so no group would be trained on")
        if self.favour_unsolved and self.favour_learnable:
            yield Conflict(
                "favour_learnable", "excludes favour_unsolved, which draws hard problems first; give one of the two"
            )
        if self.updates_per_step > self.prompts_per_step:
            yield Conflict(
                "updates_per_step",
                f"an update takes whole groups, and a step has prompts_per_step = {self.prompts_per_step} of them",
            )


# The default bounds of each loss. For clip and dual_clip they are the training guidelines', half of PPO's 0.2, because tokens with
# extreme ratios made gradients jump; for the others they come from their papers (docs/guides/algorithms.md).
CLIP_DEFAULTS = {
    "clip": (0.1, 0.1),
    "dual_clip": (0.1, 0.1),
    "gspo": (3e-4, 4e-4),
    "cispo": (None, 4.0),
    "dppo": (0.2, 0.2),
}

StepBaseline = Literal["leave_one_out", "none", "normalised"]


class PolicyLossSection(Section):
    """[algorithm] of self-play: the policy-gradient loss."""

    advantage: Annotated[str, NameIn(ADVANTAGES, ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp"))] = "dr_grpo"
    """dr_grpo: reward minus the group's mean; grpo: the same, divided by the group's standard deviation; rloo: minus the others'
    mean; maxrl: divided by the mean; reinforce_pp: normalised over the batch; or your own function of rewards and group ids, as
    `module:name`"""
    loss: Annotated[str, NameIn(LOSSES)] = "clip"
    """clip: PPO's clipped ratio; dual_clip: also bounded for negative advantages; gspo: one ratio per sequence; cispo: the
    clipped ratio as a weight; dppo: a trust region in probabilities; or your own function of this table that returns an
    objective, as `module:name`"""
    aggregation: Literal["token", "sequence", "constant"] = "constant"
    """token: mean over all tokens; sequence: mean of each sequence's mean; constant: sum divided by sampling.max_new_tokens"""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """the ratio is clipped below at 1 - clip_low; default: 0.1, gspo 3e-4; dppo: 0.2, in probabilities"""
    clip_high: float | None = Field(default=None, gt=0)
    """the ratio is clipped above at 1 + clip_high; default: 0.1, gspo 4e-4, cispo 4; dppo: 0.2, in probabilities"""
    dual_clip_bound: float = Field(default=3.0, gt=1)
    """bound of dual_clip on the ratio for negative advantages"""
    correction: Literal["none", "tis", "mask", "sequence_mask"] = "none"
    """importance weights for an engine that computes other probabilities than the learner. tis: truncated weights; mask: tokens
    with a ratio outside a window are masked (icepop); sequence_mask: whole sequences outside it are masked"""
    correction_cap: float = Field(default=2.0, ge=1)
    """highest weight of a token, for tis and sequence_mask"""
    correction_window: Array[float] | None = None
    """lowest and highest ratio that is not masked; default: [0.5, 2] for mask, [0.99, 1.01] for sequence_mask"""
    entropy_coef: float = Field(default=0.0, ge=0)
    """weight of the entropy bonus"""
    overlong_buffer: int = Field(default=0, ge=0)
    """penalise completions that end within this many tokens of the limit, rising from 0 to 1; 0: off"""

    @property
    def clip_range(self) -> tuple[float | None, float]:
        """The lower and upper clip bound of the loss, with the loss's defaults filled in. The lower one is None for cispo, which
        has none."""
        low, high = CLIP_DEFAULTS.get(self.loss, CLIP_DEFAULTS["clip"])
        return self.clip_low if self.clip_low is not None else low, self.clip_high or high

    def given(self) -> set[str]:
        """Returns the keys whose values differ from their defaults."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}

    def conflicts(self) -> Iterator[Conflict]:
        given = self.given()
        if self.loss == "gspo" and self.aggregation != "sequence":
            yield Conflict(
                "aggregation",
                'gspo has one ratio per sequence, so long sequences would count more; set algorithm.aggregation = "sequence"',
            )
        if self.loss == "cispo" and "clip_low" in given:
            yield Conflict("clip_low", "cispo has no lower bound")
        if self.loss != "dual_clip" and "dual_clip_bound" in given:
            yield Conflict("dual_clip_bound", f'is for loss = "dual_clip", and loss is "{self.loss}"')
        if self.loss == "dppo" and self.correction != "none":
            yield Conflict(
                "correction", "the ratio of dppo is already to the sampler; a correction would count it twice"
            )
        if self.correction not in ("tis", "sequence_mask") and "correction_cap" in given:
            yield Conflict("correction_cap", f'correction = "{self.correction}" caps nothing')
        if (window := self.correction_window) is not None:
            if self.correction not in ("mask", "sequence_mask"):
                yield Conflict("correction_window", f'correction = "{self.correction}" has no window')
            elif len(window) != 2 or not 0 < window[0] <= 1 <= window[1]:
                yield Conflict("correction_window", "must be two ratios around 1, such as [0.5, 2.0]")
        if self.advantage == "maxrl" and self.overlong_buffer:
            yield Conflict("overlong_buffer", "maxrl divides by the mean reward, which may not become negative")


class AlgorithmSection(PolicyLossSection):
    """[algorithm]: the policy-gradient estimator."""

    advantage: Annotated[str, NameIn(ADVANTAGES)] = "dr_grpo"
    """dr_grpo: reward minus the group's mean; grpo: the same, divided by the group's standard deviation; rloo: minus the others'
    mean; maxrl: divided by the mean; reinforce_pp: normalised over the batch; gae: by a [critic], as in PPO; or your own
    function of rewards and group ids, as `module:name`"""
    multi_reward: Literal["sum", "gdpo"] = "sum"
    """sum: advantages of the rubric's weighted sum; gdpo: normalise each reward separately, then sum"""
    step_reward_coef: float = Field(default=1.0, ge=0)
    """weight of a verifier's rewards for the steps of an answer"""
    step_baseline: StepBaseline = "leave_one_out"
    """baseline subtracted from the sum of the step rewards that follow a token. leave_one_out: the mean sum of the group's other
    samples; none: no baseline; normalised: each step's reward is normalised over all steps of its group, which is biased
    (DeepSeekMath's process supervision)"""
    kl_coef: float = Field(default=0.0, ge=0)
    """weight of the KL divergence from the reference model; 0: no reference model"""
    kl_in: Literal["loss", "reward"] = "loss"
    """where the KL penalty is applied"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """estimator of the KL divergence; default: k3 in the loss, k1 in the reward"""
    kl_importance_weights: bool = True
    """in the loss, weight the KL term by the ratio policy / sampler, so that stale samples do not bias its gradient"""
    reference_every_steps: int = Field(default=0, ge=0)
    """replace the reference by the policy every this many steps; 0: keep the initial model"""
    mask_truncated: bool = False
    """exclude completions cut at the token limit from the loss; they still count in baselines"""

    @property
    def in_groups(self) -> bool:
        """Whether samples of one prompt are compared with one another; a group with equal rewards then has no learning signal."""
        return self.advantage not in ("reinforce_pp", "gae")

    def conflicts(self) -> Iterator[Conflict]:
        given = self.given()
        if self.multi_reward == "gdpo" and self.advantage != "grpo":
            yield Conflict("multi_reward", f'gdpo normalises as advantage = "grpo" does, and not as "{self.advantage}"')
        if self.multi_reward == "gdpo" and self.kl_in == "reward":
            yield Conflict("kl_in", "gdpo normalises each reward on its own, and the KL penalty is not one of them")
        if self.advantage == "maxrl" and self.kl_in == "reward":
            yield Conflict("kl_in", "maxrl divides by the mean reward, which may not become negative")
        if self.kl_coef == 0:
            for key in ("kl_in", "kl_estimator", "kl_importance_weights", "reference_every_steps"):
                if key in given:
                    yield Conflict(key, "needs kl_coef above 0")
        elif self.kl_in == "reward" and "kl_importance_weights" in given:
            yield Conflict("kl_importance_weights", 'weights the KL term in the loss, and kl_in = "reward"')


class CriticSection(Section):
    """[critic]: the value function of PPO, for algorithm.advantage = "gae"."""

    shared: bool = False
    """true: a value head on the policy's trunk; false: a separate model with a value head"""
    path: str | None = Field(default=None, min_length=1)
    """checkpoint that a separate critic starts from; default: model.path"""
    learning_rate: float = Field(default=1e-5, gt=0)
    """peak learning rate of the critic, or of the shared head"""
    coef: float = Field(default=0.1, gt=0)
    """weight of the value loss of a shared critic, relative to the policy's loss"""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """discount of a reward per token"""
    trace_decay: float = Field(default=0.95, ge=0, le=1)
    """lambda of GAE: 1 uses returns only, 0 the critic only"""
    clip: float | None = Field(default=0.2, gt=0)
    """how far a predicted value may move from its prediction before the step's updates"""
    warmup_steps: int = Field(default=0, ge=0)
    """steps at the start that train only the critic"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.shared and self.path is not None:
            yield Conflict("path", "a shared critic is a head on the policy's trunk and has no separate checkpoint")
        if self.shared and self.warmup_steps:
            yield Conflict(
                "warmup_steps", "training a shared critic changes the policy; only a separate critic has a warm-up"
            )
        if not self.shared and self.coef != type(self).model_fields["coef"].default:
            yield Conflict("coef", "only a shared critic has it; a separate one has its learning_rate")


class DistillationSection(Section):
    """[distillation]: a teacher model, whose log-probabilities of the policy's tokens are the learning signal in place of
    rewards."""

    teacher: str = Field(min_length=1)
    """run or directory of the teacher, with the tokenizer of the policy"""
    coef: float = Field(default=1.0, gt=0)
    """weight of the divergence from the teacher, token by token"""
    reward_coef: float = Field(default=0.0, ge=0)
    """weight of the advantages from rewards, in addition to the teacher; 0: only the teacher"""
    urls: Array[str] = ()
    """running servers of nmoe's engine with the teacher's model, which score in place of this process, such as
    `http://127.0.0.1:8001`; `teacher` then needs no weights, and their key is $NMOE_ENGINE_KEY"""

    def conflicts(self) -> Iterator[Conflict]:
        if (problem := fault_of_urls(self.urls)) is not None:
            yield Conflict("urls", problem)
