"""[run] and [checkpoint]: the name, place and length of a run, and which of its checkpoints are kept."""

import re
from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import MAX_SEED, Conflict, Section

NAME = r"\w[\w.+=-]*"


class RunSection(Section):
    """[run]: what the run is called, where it lives and how long it goes on."""

    name: str = Field(default="run", description="the run lives in directory/name; default: the file's name")
    directory: str = Field(default="runs", min_length=1, description="the directory of all runs")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of everything that is drawn at random")
    threads: int = Field(default=0, ge=0, description="CPU threads; 0: as many as are free")
    steps: int = Field(gt=0, description="optimizer steps to take; left out where records.epochs says how far to go")
    resume: bool = Field(default=False, description="go on from the run's latest checkpoint")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not re.fullmatch(NAME, self.name):
            yield Conflict("name", "is a directory's name: letters, digits and . _ + = -, the first a letter or digit")


class RecordsRunSection(RunSection):
    """[run] of what learns from records, which may go on for epochs instead."""

    steps: int = Field(default=0, ge=0, description="optimizer steps to take; 0: those of records.epochs")


class SelfplayRunSection(RunSection):
    """[run] of self-play."""

    steps: int = Field(
        default=1,
        gt=0,
        description="optimizer steps of the verifier over all rounds; without training, none",
    )


class CheckpointSection(Section):
    """[checkpoint]: what is kept to resume from and to choose from."""

    every_steps: int = Field(default=50, gt=0, description="steps between checkpoints")
    keep: int = Field(default=2, gt=0, description="newest checkpoints that are kept")
