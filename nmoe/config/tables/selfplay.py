"""[selfplay]: how often a proof is judged, how many judgements have to agree, and what is trained on them."""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Conflict, Section


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
