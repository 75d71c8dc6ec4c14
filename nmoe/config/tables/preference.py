"""[preference] and [reward_model]: the losses over preference pairs."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Conflict, Section


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
