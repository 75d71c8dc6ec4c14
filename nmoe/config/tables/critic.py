"""[critic] and [distillation]: the models beside the policy that say how good its tokens are."""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Conflict, Section


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
