"""[algorithm]: the policy gradient."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section

# What bounds a loss where clip_low and clip_high say nothing: those of its paper (docs/guides/algorithms.md).
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
