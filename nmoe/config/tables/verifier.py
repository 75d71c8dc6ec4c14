"""The settings of [verifier]: which labelled steps a verifier is trained on, and what it predicts."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmoe.config.base import Conflict, DataPath, Section


class VerifierSection(Section):
    """[verifier]: the labelled steps, and the kind of verifier that is trained on them."""

    prm_source: str = Field(
        default="prm800k",
        min_length=1,
        description="`prm800k`, `math_shepherd`, `both`, or a file, directory or hub name with records of theirs or stepwise "
        "ones; also `--prm_source=`",
    )
    prm_split: str = Field(
        default="train",
        min_length=1,
        description="split, with an optional slice such as `train[:1024]`; also `--prm_split=`",
    )
    mode: Literal["step", "score"] = Field(
        default="step",
        description="step: a label for every step; score: 0, 0.5 or 1 for whole solutions; also `--mode=`",
    )
    head: Literal["generative", "discriminative"] = Field(
        default="generative",
        description="generative: the model answers with the label; discriminative: a head on the last token of each step",
    )
    reads: Literal["last", "every"] = Field(
        default="last",
        description="the tokens of a step that a discriminative head reads; every: a step is right if each of its tokens is, which "
        "shows where a step goes wrong without a label for it",
    )
    neutral: Literal["positive", "negative", "own"] = Field(
        default="positive",
        description="the label of a neutral step; own: a third label, for a generative verifier",
    )
    language_weight: float = Field(
        default=0.0, ge=0, description="weight of a language-modelling loss on right steps; 0: off"
    )
    prm800k: Annotated[str, DataPath(may_be_name=True)] = Field(
        default="tasksource/PRM800K",
        description="where PRM800K lies: a directory with phase1_train.jsonl and the like, a copy of its repository, or a Hugging "
        "Face name; the default stands for copies named openai/prm800k and prm800k, too",
    )
    math_shepherd: Annotated[str, DataPath(may_be_name=True)] = Field(
        default="peiyi9979/Math-Shepherd",
        description="where Math-Shepherd lies: a file, directory or Hugging Face name",
    )
    held_out_source: str | None = Field(
        default=None,
        min_length=1,
        description="source to evaluate on, as `prm_source`; default: a held-out share of the problems",
    )
    held_out_split: str = Field(default="test", min_length=1, description="the split of `held_out_source`")
    held_out_share: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share of the problems held out for evaluation if there is no `held_out_source`",
    )
    tokens_per_step: int = Field(default=16384, gt=0, description="tokens per optimizer step")

    @property
    def trains_head_alone(self) -> bool:
        """Whether the language model keeps its weights, and only the head on it learns."""
        return self.head == "discriminative" and self.language_weight == 0

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.reads == "every" and self.head == "generative":
            yield Conflict("reads", 'every is what a head reads; it needs head = "discriminative"')
        if self.neutral == "own" and (self.head, self.mode) != ("generative", "step"):
            yield Conflict(
                "neutral", 'own is a third label of steps; it needs head = "generative" and mode = "step" alone'
            )
