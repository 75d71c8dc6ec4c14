"""[sinks]: where a run's metrics go besides metrics.jsonl."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section

SinkName = Literal["csv", "tensorboard", "wandb", "trackio"]


class SinksSection(Section):
    """[sinks]: where a run's metrics go besides metrics.jsonl. Nothing leaves the machine unless `to` names "wandb", or "trackio"
    with `trackio_remote`."""

    to: Array[SinkName] = Field(
        default=(), description='any of "csv", "tensorboard", "wandb", "trackio"; empty: metrics.jsonl alone'
    )
    project: str = Field(default="nmoe", min_length=1, description="the project of W&B and trackio")
    wandb_mode: Literal["online", "offline"] = Field(
        default="online", description="offline: written to the run's directory, for `wandb sync` later"
    )
    trackio_remote: bool = Field(
        default=False,
        description="lets trackio send metrics and alerts where TRACKIO_SPACE_ID, TRACKIO_SERVER_URL or TRACKIO_WEBHOOK_URL says; "
        "a run whose environment sets one of these is refused without it",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if len(set(self.to)) < len(self.to):
            yield Conflict("to", "names a sink twice")
