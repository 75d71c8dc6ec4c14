"""[preference] and [reward_model]: the losses over preference pairs."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Conflict, Section


class PreferenceSection(Section):
    """[preference]: the loss of DPO and its kin."""

    loss: Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo"] = Field(
        default="sigmoid",
        description="sigmoid: DPO; sigmoid_norm: DPO with mean log-ratios over tokens; robust: unbiased if labels flip; hinge; "
        "ipo: the squared loss of IPO, "
        "with mean log-ratios over tokens",
    )
    beta: float = Field(default=0.1, gt=0, description="strength of the tie to the reference (tau of IPO)")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="share of pairs that are assumed to be swapped"
    )
    sft_weight: float = Field(default=0.0, ge=0, description="weight of an SFT loss on the preferred side")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.label_smoothing > 0 and self.loss in ("hinge", "ipo"):
            yield Conflict("label_smoothing", f'loss = "{self.loss}" has none; sigmoid, sigmoid_norm and robust do')


class RewardModelSection(Section):
    """[reward_model]: the Bradley-Terry loss."""

    margin: float = Field(
        default=0.0, ge=0, description="margin by which the preferred answer's reward should exceed the other's"
    )
    centering: float = Field(
        default=0.0, ge=0, description="weight of the squared sum of a pair's rewards, which keeps their mean near 0"
    )
