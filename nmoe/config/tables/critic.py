"""[critic] and [distillation]: the models that judge the policy's tokens."""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Conflict, Section


class CriticSection(Section):
    """[critic]: the value function of PPO, for algorithm.advantage = "gae"."""

    shared: bool = Field(
        default=False, description="true: a value head on the policy's trunk; false: a separate model with a value head"
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="checkpoint that a separate critic starts from; default: model.path",
    )
    learning_rate: float = Field(
        default=1e-5, gt=0, description="peak learning rate of the critic, or of the shared head"
    )
    coef: float = Field(
        default=0.1, gt=0, description="weight of the value loss of a shared critic, relative to the policy's loss"
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount of a reward per token")
    trace_decay: float = Field(
        default=0.95, ge=0, le=1, description="lambda of GAE: 1 uses returns only, 0 the critic only"
    )
    clip: float | None = Field(
        default=0.2, gt=0, description="how far a value may move from its value before the step's updates"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps at the start that train only the critic")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.shared and self.path is not None:
            yield Conflict("path", "a shared critic is a head on the policy's trunk and has no checkpoint of its own")
        if self.shared and self.warmup_steps:
            yield Conflict(
                "warmup_steps", "training a shared critic changes the policy; only a separate critic has a warm-up"
            )
        if not self.shared and self.coef != type(self).model_fields["coef"].default:
            yield Conflict("coef", "only a shared critic has it; a separate one has its learning_rate")


class DistillationSection(Section):
    """[distillation]: a teacher whose log-probabilities of the policy's tokens replace rewards."""

    teacher: str = Field(min_length=1, description="run or directory of the teacher, with the tokenizer of the policy")
    coef: float = Field(default=1.0, gt=0, description="weight of the divergence from the teacher, token by token")
    reward_coef: float = Field(
        default=0.0, ge=0, description="weight of the advantages from rewards, in addition; 0: only the teacher"
    )
