"""[batch]: how many samples and tokens go into a step."""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section

# The largest batches that papers report are of some thousand samples.
MOST_SAMPLES = 2**20


class MicroBatchSection(Section):
    """[batch] of the supervised commands: the size of a micro-batch."""

    tokens_per_microbatch: int = Field(default=16384, gt=0, description="tokens per forward and backward pass")


class GroupBatchSection(MicroBatchSection):
    """[batch] of self-play."""

    prompts_per_step: int = Field(default=16, gt=0, description="problems per step")
    group_size: int = Field(default=8, ge=1, description="completions per problem, which are compared with one another")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        samples = self.prompts_per_step * self.group_size
        if samples > MOST_SAMPLES:
            key = "group_size" if self.group_size > self.prompts_per_step else "prompts_per_step"
            yield Conflict(
                key, f"prompts_per_step x group_size = {samples:,} samples of a step; at most {MOST_SAMPLES:,}"
            )


class BatchSection(GroupBatchSection):
    """[batch]: how many samples go into a step, and how many tokens through the model at once."""

    updates_per_step: int = Field(
        default=1, ge=1, description="optimizer steps per pass over a step's groups; each takes its part of the groups"
    )
    passes_per_step: int = Field(default=1, ge=1, description="passes over a step's groups")
    oversampling: float = Field(
        default=1.0, ge=1, description="problems sampled per problem wanted, because some groups carry no signal"
    )
    max_refills: int = Field(
        default=1, ge=0, description="how many times a step samples more prompts to replace groups without signal"
    )
    favour_unsolved: bool = Field(
        default=False,
        description="weight the sources of problems by the share of each that is unsolved, at least a tenth",
    )
    favour_learnable: bool = Field(
        default=False,
        description="weight the sources of problems by r (1 - r), r the share of each that is solved, at least a tenth: easy ones "
        "first, and harder ones as they begin to be solved",
    )
    solve_rate: Array[float] = Field(
        default=(0.0, 1.0), description="train only on groups whose mean correctness lies in this range"
    )

    @property
    def updates(self) -> int:
        """The most optimizer steps of one step."""
        return self.updates_per_step * self.passes_per_step

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
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
