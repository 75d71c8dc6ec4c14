"""The configuration of `nmoe data prepare`: a source of problems, filters, and the files that are drawn from the remaining
problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmoe.config.base import MAX_SEED, Array, Conflict, DataPath, Section
from nmoe.config.tables.run import NAME

OWN_FILES = ("rl_pool", "sft", "dev", "small_pool", "id_probe")
"""The files drawn from the source, in order of priority: a problem that fits several goes to the first."""


class SourceSection(Section):
    """[source]: the problems to prepare, in Parquet."""

    path: Annotated[str, DataPath(may_be_name=True)] = Field(default="AI-MO/NuminaMath-1.5", min_length=1)
    """Parquet file, pattern (`data/*.parquet`), directory or Hugging Face name; with NuminaMath-1.5's columns"""
    tokenizer: str | None = Field(default=None, min_length=1)
    """tokenizer, checkpoint or run: prompt lengths are counted in its tokens too"""


class FiltersSection(Section):
    """[filters]: which problems of the source are kept."""

    question_types: Array[str] = ("math-word-problem",)
    """values of `question_type` to keep; empty: all"""
    exclude_sources: Array[str] = ("amc_aime",)
    """values of `source` to leave out"""
    require_valid: bool = True
    """keep only rows whose `problem_is_valid` and `solution_is_valid` are Yes"""
    least_problem_chars: int = Field(default=20, ge=1)
    """shorter problems are left out"""
    least_solution_chars: int = Field(default=20, ge=1)
    """shorter solutions are left out"""


class SplitsSection(Section):
    """[splits]: number of problems in each file; 0: no file. No problem is in two files."""

    rl_pool: int = Field(default=50_000, ge=0)
    """`rl_pool.jsonl`: input and label"""
    sft: int = Field(default=5_000, ge=0)
    r"""`sft.jsonl`: input, label, and an output that ends in \boxed{label}"""
    dev: int = Field(default=500, ge=0)
    """`dev.jsonl`: input, label and output as in `sft.jsonl`, to evaluate SFT on"""
    small_pool: int = Field(default=400, ge=0)
    """`small_pool.jsonl`: input and label, for short experiments"""
    id_probe: int = Field(default=200, ge=0)
    """`id_probe.jsonl`: input and label, to evaluate on held-out problems of the training distribution"""

    def conflicts(self) -> Iterator[Conflict]:
        if not any(getattr(self, name) for name in OWN_FILES):
            yield Conflict("", "all sizes are 0, so nothing would be written")


class GivenSetSection(Section):
    """A dataset of problems from elsewhere: a file, a directory or a Hugging Face name."""

    path: Annotated[str, DataPath(may_be_name=True)] = Field(min_length=1)
    """file (JSONL, JSON, Parquet, CSV), directory or Hugging Face name"""
    subset: str | None = None
    """the dataset's configuration, such as `main`"""
    split: str = Field(default="test", min_length=1)
    """split of a directory or hub dataset"""
    problem_field: str | None = Field(default=None, min_length=1)
    """the field with the problem's text; default: the first of problem, question, context, prompt, input"""


class ProbeSection(GivenSetSection):
    """[[probes]]: problems of another dataset, to evaluate on. No file drawn from the source contains any of them."""

    name: str = Field(default="ood_probe", min_length=1)
    """the file, `NAME.jsonl`; probes of one name are written into one"""
    size: int = Field(gt=0)
    """how many problems with an integer answer to draw"""
    answer_field: str | None = Field(default=None, min_length=1)
    """the field with the answer; default: the first of answer and label that exists"""

    def conflicts(self) -> Iterator[Conflict]:
        if not re.fullmatch(NAME, self.name) or self.name in (*OWN_FILES, "manifest"):
            yield Conflict(
                "name", f"is a file's name, letters, digits and . _ + = -, and none of {', '.join(OWN_FILES)}"
            )


class ContaminationSection(Section):
    """[contamination]: finds problems of the source that are also in given evaluation sets."""

    action: Literal["remove", "report"] = "remove"
    """remove or only report a problem that is in an evaluation set, or shares an n-gram with one there"""
    ngram: int = Field(default=13, ge=2)
    """n-gram length in words: two problems that share one this long count as the same"""
    sets: Array[GivenSetSection] = ()
    """the evaluation sets, as [[contamination.sets]]"""


class PreparationSettings(Section):
    """The configuration of `nmoe data prepare`."""

    seed: int = Field(default=42, ge=0, le=MAX_SEED)
    """seed of all random draws"""
    directory: str = Field(default="data/numina", min_length=1)
    """the directory to write to"""
    source: SourceSection = SourceSection()
    """problems to prepare"""
    filters: FiltersSection = FiltersSection()
    """which problems are kept"""
    splits: SplitsSection = SplitsSection()
    """sizes of the files"""
    probes: Array[ProbeSection] = ()
    """problems of other datasets to evaluate on"""
    contamination: ContaminationSection = ContaminationSection()
    """evaluation sets whose problems must not be trained on"""
