"""The configuration of `nmoe speedrun PIPELINE`: stages in order, which make a tokenizer, train a model or evaluate models."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section, duplicates
from nmoe.config.tables.run import NAME


class StageSettings(Section):
    """[[stage]]: one stage. It makes a tokenizer (`texts`), trains a model (`config`), or evaluates models (`benchmarks`)."""

    name: str = Field(pattern=NAME)
    """the stage, and the directory of its output in the pipeline's directory"""
    texts: Array[str] = ()
    """files or datasets to train a tokenizer on"""
    vocab_size: int = Field(default=65_536, gt=0)
    """tokens of this tokenizer"""
    most_chars: int | None = Field(default=None, gt=0)
    """characters of `texts` to read; default: all"""
    config: str | None = Field(default=None, min_length=1)
    """configuration to train by: a TOML file or a packaged name"""
    overrides: Array[str] = ()
    """values in place of the configuration's, as `--section.key=value`"""
    start: str | None = Field(default=None, min_length=1)
    """earlier stage whose tokenizer or model the training starts from; default: the configuration's own"""
    problems_of_pool: int | None = Field(default=None, gt=0)
    """problems of the training environment, for a plan without its data"""
    benchmarks: Array[str] = ()
    """environments to evaluate on: TOML files, directories or packaged names; or `core` alone"""
    models: Array[str] = ()
    """earlier stages to evaluate on `benchmarks`"""
    problems: int | None = Field(default=None, gt=0)
    """problems of each benchmark; default: 200, of CORE at most 500 a set"""
    max_tokens: int | None = Field(default=None, gt=0)
    """the most tokens of an answer; default: the rest of the context"""

    def conflicts(self) -> Iterator[Conflict]:
        kinds = [key for key in ("texts", "config", "benchmarks") if getattr(self, key)]
        if len(kinds) != 1:
            yield Conflict("", "needs one of texts (a tokenizer), config (training) and benchmarks (an evaluation)")
            return
        of_kind = {
            "texts": {"vocab_size", "most_chars"},
            "config": {"overrides", "start", "problems_of_pool"},
            "benchmarks": {"models", "problems", "max_tokens"},
        }
        for key in sorted(self.model_fields_set - {"name", kinds[0]} - of_kind[kinds[0]]):
            yield Conflict(key, f"is of no stage with {kinds[0]}; leave it out")
        if self.benchmarks and not self.models:
            yield Conflict("models", "names no stage to evaluate")
        if "core" in self.benchmarks and len(self.benchmarks) > 1:
            yield Conflict("benchmarks", "core is evaluated alone; give it a stage of that kind")


class BudgetSection(Section):
    """[machine]: the machine that `--dry-run` plans for, with its assumed speed and price."""

    ranks: int = Field(default=1, gt=0)
    """ranks that train together, on one machine"""
    memory_gib: float | None = Field(default=None, gt=0)
    """memory of each rank's device"""
    peak_tflops: float | None = Field(default=None, gt=0)
    """TFLOP/s of a device at its peak, in the precision of the runs"""
    dollars_an_hour: float | None = Field(default=None, gt=0)
    """price of the machine"""
    training_share: float = Field(default=0.45, gt=0, le=1)
    """share of the peak that training is assumed to reach"""
    sampling_share: float = Field(default=0.03, gt=0, le=1)
    """share of the peak that sampling is assumed to reach; it reads all weights for each token of a small batch"""
    completion_tokens: int | None = Field(default=None, gt=0)
    """tokens of a mean completion of RL; default: the most that it may have"""


class PipelineSettings(Section):
    """The stages of a pipeline. Relative paths start from the directory that the command runs in."""

    directory: str = Field(min_length=1)
    """where the pipeline writes, unless `--out` names another directory"""
    stage: Array[StageSettings] = Field(min_length=1)
    """the stages, in order"""
    data: dict[str, str] = Field(default={})
    """commands that fetch data, by the name under which stages read it"""
    machine: BudgetSection = BudgetSection()
    """what `--dry-run` plans for"""

    def conflicts(self) -> Iterator[Conflict]:
        yield from duplicates("stage", (stage.name for stage in self.stage))
        made: set[str] = set()
        for index, stage in enumerate(self.stage):
            for key, names in (("start", [stage.start] if stage.start else []), ("models", stage.models)):
                for name in names:
                    if name not in made:
                        yield Conflict(
                            f"stage.{index}.{key}", f"{name!r} is no earlier stage that makes a model or tokenizer"
                        )
            if not stage.benchmarks:
                made.add(stage.name)
