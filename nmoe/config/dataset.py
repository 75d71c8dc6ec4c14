"""Where the records of a dataset lie and what they are: the keys that every recipe over records shares."""

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from nmoe.config.base import Array, Conflict, DataPath, Section

Kind = Literal["text", "messages", "prompt", "prompt_completion", "preference", "stepwise"]
"""The formats of a record (docs/data.md)."""

Column = Literal["text", "messages", "tools", "prompt", "completion", "chosen", "rejected", "completions", "labels"]
"""The columns that the formats are made of."""


class DatasetSettings(Section):
    """Records of a dataset: a file, a directory, or a name on the hub."""

    path: Annotated[str, DataPath(may_be_name=True)] = Field(
        min_length=1,
        description="file (JSONL, JSON, Parquet, CSV), directory or Hugging Face name; `@[a:b]` behind it takes a part",
    )
    data_files: Array[str] = Field(
        default=(), description="files of `path` to read, wildcards allowed; with `json`, `parquet`, `csv`: local ones"
    )
    subset: str | None = Field(default=None, description="the dataset's configuration, such as `main`")
    split: str = Field(default="train", min_length=1, description="split, slices such as `train[:1024]` included")
    kind: Kind | None = Field(default=None, description="the format of the records; default: told by their columns")
    columns: dict[str, str] = Field(
        default={}, description='which columns of the data to take: `{prompt = "question", completion = "answer"}`'
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        known = get_args(Column)
        for column in self.columns:
            if column not in known:
                yield Conflict("columns", f"{column!r} is no column of a format; those are {', '.join(known)}")
