"""A source of a mixture by weight: what [[data.sources]] and [[records.sources]] have in common."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from nmoe.config.base import Conflict, Section
from nmoe.config.slices import split_path
from nmoe.config.tables.run import NAME


class MixtureSource(Section):
    """One source of a mixture."""

    path: str = Field(min_length=1, description="as `documents` of [data]")
    weight: float = Field(default=1.0, gt=0, description="share of the tokens, relative to the other sources' weights")
    name: str = Field(default="", description="name of the source in metrics, unique; default: the file's name")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not re.fullmatch(NAME, self.label):
            yield Conflict(
                "name" if self.name else "path",
                f"the source's name would be {self.label!r}; give it a `name`, which metrics carry: letters, digits and "
                ". _ + = -, the first a letter or digit",
            )

    @property
    def label(self) -> str:
        """The name, made of the path's last part where none is given."""
        return self.name or Path(split_path(self.path)[0]).name.partition(".")[0]
