"""[data]: the text that a model is pretrained on."""

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section, duplicates
from nmoe.config.tables.mixture import MixtureSource


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
