"""Where the records of a dataset lie and what they are: the keys that every recipe over records shares."""

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from nmoe.config.base import Array, Conflict, DataPath, Section

Kind = Literal["text", "messages", "prompt", "prompt_completion", "preference", "stepwise"]
"""The formats of a record (docs/guides/data.md)."""

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


class RecordsSection(DatasetSettings):
    """[records] of DPO and reward models."""

    format: Literal["auto", "harmony", "chat", "text"] = Field(
        default="auto",
        description="how records become tokens: Harmony, the tokenizer's chat template, completions behind prompts as they are; "
        "auto: Harmony where the tokenizer has its control tokens, or else its template",
    )
    tokens_per_step: int = Field(default=16384, gt=0, description="tokens per optimizer step")
    epochs: float | None = Field(
        default=None, gt=0, description="passes over the records, in place of run.steps; 0.5 is half of them"
    )
    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the records kept from training, to evaluate on: all of a prompt or none",
    )
    held_out_path: Annotated[str | None, DataPath(may_be_name=True)] = Field(
        default=None, min_length=1, description="records of their own to evaluate on, read as those of `path` are"
    )
    held_out_split: str | None = Field(
        default=None, min_length=1, description="split to evaluate on, of `held_out_path` or else of `path`"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        for key in ("held_out_path", "held_out_split"):
            if self.held_out > 0 and getattr(self, key) is not None:
                yield Conflict(key, "and held_out: evaluate on one or the other")

    @property
    def holds_out(self) -> bool:
        return self.held_out > 0 or self.held_out_dataset is not None

    @property
    def held_out_dataset(self) -> DatasetSettings | None:
        """The records to evaluate on, where they are other ones than those of `path` and `split`."""
        if self.held_out_path is None and self.held_out_split is None:
            return None
        where: dict[str, object] = {} if self.held_out_path is None else {"path": self.held_out_path, "data_files": ()}
        return self.model_copy(update=where | {"split": self.held_out_split or "train"})


class SFTRecordsSection(RecordsSection):
    """[records]: the examples that SFT, DPO and reward models learn from."""

    share_prefixes: bool = Field(
        default=False,
        description="run what sequences of a step begin with alike once for all of them, such as one long instruction; a "
        "router's load then counts it once",
    )
