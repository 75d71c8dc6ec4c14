"""[preference], [reward_model], [verifier] and [selfplay]: the losses and labels of the recipes beside SFT and RL."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmoe.config.base import Conflict, DataPath, Section


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


class SelfplaySection(Section):
    """[selfplay]: how often a proof is judged, and what is trained on the judgements."""

    problem_source: str | None = Field(
        default=None,
        min_length=1,
        description="prm800k[:PATH], math_shepherd[:PATH], hf:NAME[:SUBSET]:SPLIT, deepseek_math_v2_inputs:PATH or jsonl:PATH; "
        "default: that of [environment]",
    )
    problem_field: str | None = Field(
        default=None,
        min_length=1,
        description="the field with the problem's text; default: the first of problem, question, prompt and input that exists",
    )
    max_problems: int = Field(default=1000, gt=0, description="maximum problems per round")
    verifications: int = Field(default=8, gt=0, description="verifications of each proof (n)")
    meta_verifications: int = Field(default=3, gt=0, description="checks of each verification that claims a defect (m)")
    confirmations: int = Field(
        default=2, gt=0, description="confirmed verifications that the lowest score needs to be accepted (k)"
    )
    verifier: str | None = Field(
        default=None,
        min_length=1,
        description="checkpoint of verifier and meta-verifier; default: model.path, which is the generator",
    )
    train: bool = Field(default=False, description="train verifier and generator at the end of each round")
    rounds: int = Field(default=1, gt=0, description="rounds of generation, each followed by training")
    generator_steps: int = Field(
        default=2,
        gt=0,
        description="the generator's optimizer steps per round, each on its part of the problems, during the verifier's "
        "first ones",
    )
    verifier_epochs: int = Field(default=1, gt=0, description="passes over a round's accepted verifications")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.confirmations > self.verifications:
            yield Conflict(
                "confirmations",
                f"are more than the verifications = {self.verifications}, so no score could be accepted",
            )
        if self.rounds > 1 and not self.train:
            yield Conflict("rounds", "only differ if training happens between them; set train, or raise max_problems")
