"""[batch]: how many samples and tokens go into a step."""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section


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
