"""[data] and [records]: where documents and records lie and what they are, with the keys that every recipe over records shares."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from nmoe.config.base import Array, Conflict, DataPath, Section, duplicates
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


class DocumentSourceSection(MixtureSource):
    """[[data.sources]]: one source of a mixture of documents."""


class DataSection(Section):
    """[data]: the text to pretrain on."""

    documents: str | None = Field(
        default=None,
        min_length=1,
        description="dataset with a document's `text` or `token_ids` in each row: a file, a directory or a hub name",
    )
    sources: Array[DocumentSourceSection] = Field(
        default=(), description="several datasets, mixed by weight, as [[data.sources]], in place of `documents`"
    )
    tokens_per_step: int = Field(default=16384, gt=0, description="tokens per optimizer step")
    held_out_documents: int = Field(default=0, ge=0, description="documents of each source held out for evaluation")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.documents is None and not self.sources:
            yield Conflict("", "needs either documents (one dataset) or [[data.sources]] (a mixture)")
        if self.documents is not None and self.sources:
            yield Conflict("documents", "there are [[data.sources]] too: make it one of them")
        yield from duplicates("sources", (source.label for source in self.sources))

    @property
    def mixture(self) -> tuple[DocumentSourceSection, ...]:
        """The sources, of which `documents` is the only one."""
        return self.sources if self.documents is None else (DocumentSourceSection(path=self.documents),)


Kind = Literal["text", "messages", "prompt", "prompt_completion", "preference", "stepwise"]
"""The formats of a record (docs/guides/data.md)."""

Column = Literal["text", "messages", "tools", "prompt", "completion", "chosen", "rejected", "completions", "labels"]
"""The columns that the formats are made of."""


class DatasetSettings(Section):
    """Records of a dataset: a file, a directory, or a name on the hub."""

    path: Annotated[str, DataPath(may_be_name=True)] = Field(
        min_length=1,
        description="file (JSONL, JSON, Parquet, CSV), directory or Hugging Face name; `@[a:b]` selects some of its rows",
    )
    data_files: Array[str] = Field(
        default=(), description="files of `path` to read, wildcards allowed; with `json`, `parquet`, `csv`: local ones"
    )
    subset: str | None = Field(default=None, description="the dataset's configuration, such as `main`")
    split: str = Field(
        default="train", min_length=1, description="split, with an optional slice such as `train[:1024]`"
    )
    kind: Kind | None = Field(
        default=None, description="the format of the records; default: recognised by their columns"
    )
    columns: dict[str, str] = Field(
        default={}, description='which columns of the data to take: `{prompt = "question", completion = "answer"}`'
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        known = get_args(Column)
        for column in self.columns:
            if column not in known:
                yield Conflict("columns", f"{column!r} is not a column of a format; the columns are {', '.join(known)}")


class RecordsSection(DatasetSettings):
    """[records] of DPO and reward models."""

    format: Literal["auto", "harmony", "chat", "text"] = Field(
        default="auto",
        description="how records become tokens: Harmony, the tokenizer's chat template, or plain text; "
        "auto: Harmony if the tokenizer has its control tokens, else its chat template",
    )
    tokens_per_step: int = Field(default=16384, gt=0, description="tokens per optimizer step")
    epochs: float | None = Field(
        default=None, gt=0, description="passes over the records, in place of run.steps; may be a fraction"
    )
    held_out: float = Field(
        default=0.0,
        ge=0,
        description="records held out for evaluation: a share below 1, or from 1 on their number; records with the same prompt "
        "stay together",
    )
    held_out_path: Annotated[str | None, DataPath(may_be_name=True)] = Field(
        default=None, min_length=1, description="separate records to evaluate on, read like those of `path`"
    )
    held_out_split: str | None = Field(
        default=None, min_length=1, description="split to evaluate on, of `held_out_path` if given, else of `path`"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.held_out > 1 and not self.held_out.is_integer():
            yield Conflict("held_out", "is neither a share, below 1, nor a number of records, which is whole")
        for key in ("held_out_path", "held_out_split"):
            if self.held_out > 0 and getattr(self, key) is not None:
                yield Conflict(key, "excludes held_out; evaluate on one of the two")

    @property
    def datasets(self) -> "tuple[DatasetSettings, ...]":
        """The datasets that are trained on."""
        return (self,)

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


class RecordSourceSection(DatasetSettings, MixtureSource):
    """[[records.sources]]: one source of a mixture of records."""


class SFTRecordsSection(RecordsSection):
    """[records]: the examples that SFT, DPO and reward models learn from."""

    path: Annotated[str, DataPath(may_be_name=True)] = Field(
        default="",
        description="file (JSONL, JSON, Parquet, CSV), directory or Hugging Face name; `@[a:b]` selects some of its rows",
    )
    sources: Array[RecordSourceSection] = Field(
        default=(), description="several datasets, mixed by weight, as [[records.sources]], in place of `path`"
    )
    share_prefixes: bool = Field(
        default=False,
        description="compute a prefix that sequences of a step share, such as a long instruction, once for all of them; a "
        "router's load then counts it once",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not self.path and not self.sources:
            yield Conflict("path", "missing: give it (one dataset) or [[records.sources]] (a mixture)")
        yield from duplicates("sources", (source.label for source in self.sources))
        if not self.sources:
            return
        if self.path:
            yield Conflict("path", "there are [[records.sources]] too: make it one of them")
        if self.epochs is not None:
            yield Conflict("epochs", "the sources of a mixture end at different times; give run.steps")
        if self.held_out_path is None:
            if self.held_out_split is not None:
                yield Conflict("held_out_split", "of which source? name the data in held_out_path")
            of_path = self.model_fields_set & (DatasetSettings.model_fields.keys() - {"path"})
            for key in sorted(of_path):
                yield Conflict(key, "is of one dataset; give it to each of [[records.sources]]")

    @property
    def datasets(self) -> tuple[DatasetSettings, ...]:
        return self.sources or (self,)
