"""[task_pool] of an environment: where its problems come from."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nmoe.config.base import MAX_SEED, Array, Conflict, DataPath, NameIn, Section, duplicates
from nmoe.config.registry import DATASET_TASKS, GENERATED_TASKS, POOLS, TASKS

GoldExtractor = Literal["none", "gsm8k_hash", "boxed", "last_number"]
"""How to read the gold answer from its field: all of it, the part after `####`, the content of `\\boxed{}`, the last number."""


class GeneratedPool(Section):
    """An endless sequence of problems from a seeded generator. The splits never share a problem."""

    type: Literal["generated"]
    task_type: Annotated[str, NameIn(TASKS, tuple(GENERATED_TASKS))] = Field(
        description=f"the task whose problems are generated: {', '.join(GENERATED_TASKS)}, or one of your own as `module:Name`"
    )
    difficulty: Annotated[tuple[int, int], Field(strict=False)] = (1, 3)
    """[least, most], both included and at least 1; its meaning depends on the task"""
    split: Literal["train", "validation", "eval", "all"] = "train"
    """the part of all problems to draw from"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the order of problems"""
    examples: int = Field(default=0, ge=0, le=64)
    """number of solved training problems that each prompt shows before its question"""
    hints: Array[str] = ()
    r"""texts of which one, drawn at random, follows each question, such as `\nfinal:`; "" for nothing"""
    max_examples: int | None = Field(default=None, ge=1)
    """number of problems; default: endless"""

    def conflicts(self) -> Iterator[Conflict]:
        least, most = self.difficulty
        if least < 1 or least > most:
            yield Conflict("difficulty", "must be [least, most] with 1 <= least <= most")


class DatasetKeys(Section):
    """The keys that all datasets share: the conversion of their records to problems."""

    task_type: Annotated[str, NameIn(TASKS, tuple(DATASET_TASKS))] = Field(
        description=f"the task that renders and grades the problems: {', '.join(DATASET_TASKS)}, "
        "or one of your own as `module:Name`"
    )
    problem_field: str | None = Field(default=None, min_length=1)
    """the field with the problem's text or messages; default: the one of problem, question, prompt and input that exists"""
    answer_field: str | None = Field(default=None, min_length=1)
    """the field with the gold answer or solution, `a.b` for field b of object a; default: the one of answer, label,
    reward_spec.ground_truth and reward_model.ground_truth that exists"""
    gold_extractor: GoldExtractor = "none"
    """how the gold answer is found in its field"""
    check_gold: Literal["all", "sample", "off"] = "all"
    """which gold answers are graded before a run starts, and have to be correct: all, 64 of them, or none"""
    answer_order: Literal["any", "as_gold"] = "any"
    """of `math`: whether a list without brackets, `1, 2`, has an order; lists of tuples have none, values with names have one, and
    the question may ask for one"""
    units: Literal["asked", "as_gold", "any"] = "asked"
    """of `math`: the unit that an answer may add to a gold without one: the only one that the question names, none, or any"""
    easy_first: str | None = Field(default=None, min_length=1)
    """a field with each problem's difficulty, `level`, or, with a minus, its measured solve rate, `-solve_rate` (`nmoe data
    solve-rates`): the first pass begins with the easiest; later passes are shuffled"""
    levels: Array[str] = ()
    """only problems whose field `level` is one of these, such as ["4", "5"], also written "Level 4"; default: all"""
    max_examples: int | None = Field(default=None, ge=1)
    """maximum number of records to read"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the order of problems"""

    def conflicts(self) -> Iterator[Conflict]:
        for key, default in (("answer_order", "any"), ("units", "asked")):
            if getattr(self, key) != default and self.task_type != "math":
                yield Conflict(key, f'is of task_type = "math", not of {self.task_type!r}')


class JsonlPool(DatasetKeys):
    """A local file with one JSON object per line, or several."""

    type: Literal["jsonl"]
    path: Annotated[str, DataPath()] = Field(min_length=1)
    """the JSONL file, or a pattern such as `data/*.jsonl`; `@[a:b]` selects some of its records"""


class CsvPool(DatasetKeys):
    """A local CSV file, whose fields are all texts."""

    type: Literal["csv"]
    path: Annotated[str, DataPath()] = Field(min_length=1)
    """the CSV file; `@[a:b]` selects some of its rows"""


class ParquetPool(DatasetKeys):
    """A local Parquet file, or several."""

    type: Literal["parquet"]
    path: Annotated[str, DataPath()] = Field(min_length=1)
    """the Parquet file, or a pattern such as `data/*.parquet`; `@[a:b]` selects some of its rows"""


class HubPool(DatasetKeys):
    """One split of a Hugging Face dataset, from the hub or from a local directory or file."""

    type: Literal["hf"]
    dataset: Annotated[str, DataPath(may_be_name=True)] = Field(min_length=1)
    """name on the hub, or a local directory or file; `@[a:b]` selects some of its rows"""
    data_files: Array[str] = ()
    """files of `dataset` to read, wildcards allowed; with `json`, `parquet`, `csv`: local ones"""
    subset: str | None = None
    """the dataset's configuration, such as `main`"""
    split: str = Field(default="train", min_length=1)
    """split, with an optional slice such as `train[:1024]`"""


class PythonPool(DatasetKeys):
    """Records that a program makes: a function without arguments that returns or yields dicts, or a list of them."""

    type: Literal["python"]
    call: Annotated[str, NameIn(POOLS)]
    """the function or list, as `package.module:name`"""


class ReasoningGymPool(Section):
    """An endless sequence of problems from a dataset of the package reasoning-gym. The splits never share a question."""

    type: Literal["reasoning_gym"]
    dataset: str = Field(min_length=1)
    """name of the dataset in reasoning-gym, such as `leg_counting`"""
    config: dict[str, Any] = Field(default={})
    """the dataset's own settings, such as `{min_animals = 2}`"""
    split: Literal["train", "validation", "eval", "all"] = "train"
    """the part of all problems to draw from"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the order of problems"""
    max_examples: int | None = Field(default=None, ge=1)
    """number of problems; default: endless"""
    partial: bool = False
    """whether an answer that is wrong gets the dataset's score between 0 and 1, where it has one"""

    def conflicts(self) -> Iterator[Conflict]:
        for key in {"seed", "size"} & self.config.keys():
            yield Conflict("config", f"must not have {key!r}: `seed` and `max_examples` of the task pool decide")


class SelfplayPool(Section):
    """Problems without an answer, for self-play: verifiers judge the solutions."""

    type: Literal["selfplay"]
    source: str = Field(min_length=1)
    """prm800k[:PATH], math_shepherd[:PATH], hf:NAME[:SUBSET]:SPLIT, deepseek_math_v2_inputs:PATH or jsonl:PATH"""
    problem_field: str | None = Field(default=None, min_length=1)
    """the field with the problem's text; default: the first of problem, question, prompt and input that exists"""
    max_examples: int | None = Field(default=None, ge=1)
    """maximum number of records to read"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the order of problems"""


class PrmPool(Section):
    """Solutions with labelled steps, to be judged: from PRM800K, Math-Shepherd or stepwise records."""

    type: Literal["prm"]
    source: str = Field(default="prm800k", min_length=1)
    """`prm800k`, `math_shepherd`, `both`, or a file, directory or hub name with records of theirs or stepwise ones"""
    split: str = Field(default="train", min_length=1)
    """split, with an optional slice such as `train[:1024]`"""
    task_type: Literal["prm_step", "prm_solution"] = "prm_step"
    """prm_step: predict the label of the last step; prm_solution: predict the score of the whole solution"""
    prm800k: Annotated[str, DataPath(may_be_name=True)] = "tasksource/PRM800K"
    """where PRM800K lies: a directory or a Hugging Face name"""
    math_shepherd: Annotated[str, DataPath(may_be_name=True)] = "peiyi9979/Math-Shepherd"
    """where Math-Shepherd lies: a file, directory or Hugging Face name"""
    max_examples: int | None = Field(default=None, ge=1)
    """the most problems"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the order of problems"""


class SourceKeys(Section):
    """The additional keys of a pool that is one source of a mixture."""

    name: str = Field(min_length=1)
    """name of the source in logs and metrics, unique in the mixture"""
    weight: float = Field(gt=0)
    """share of the problems, relative to the other sources' weights"""


class GeneratedSource(GeneratedPool, SourceKeys):
    """A generated pool as a source of a mixture."""


class JsonlSource(JsonlPool, SourceKeys):
    """A JSONL file as a source of a mixture."""


class CsvSource(CsvPool, SourceKeys):
    """A CSV file as a source of a mixture."""


class ParquetSource(ParquetPool, SourceKeys):
    """A Parquet file as a source of a mixture."""


class PythonSource(PythonPool, SourceKeys):
    """A program's records as a source of a mixture."""


class HubSource(HubPool, SourceKeys):
    """A Hugging Face dataset as a source of a mixture."""


class ReasoningGymSource(ReasoningGymPool, SourceKeys):
    """A reasoning-gym dataset as a source of a mixture."""


class PrmSource(PrmPool, SourceKeys):
    """Labelled steps as a source of a mixture."""


Source = Annotated[
    GeneratedSource
    | JsonlSource
    | CsvSource
    | ParquetSource
    | HubSource
    | PythonSource
    | ReasoningGymSource
    | PrmSource,
    Field(discriminator="type"),
]


class MixturePool(Section):
    """Several sources; each problem comes from one of them, drawn by weight."""

    type: Literal["mixture"]
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the draws between sources"""
    sources: Array[Source]
    """the sources, as [[task_pool.sources]]"""

    def conflicts(self) -> Iterator[Conflict]:
        if not self.sources:
            yield Conflict("sources", "a mixture needs at least one [[task_pool.sources]]")
        yield from duplicates("sources", (source.name for source in self.sources))


TaskPool = (
    GeneratedPool
    | JsonlPool
    | CsvPool
    | ParquetPool
    | HubPool
    | PythonPool
    | ReasoningGymPool
    | PrmPool
    | SelfplayPool
    | MixturePool
)


def task_types(pool: TaskPool) -> set[str]:
    """The task types of a pool's problems, as far as its settings name them."""
    sources = pool.sources if isinstance(pool, MixturePool) else (pool,)
    return {source.task_type for source in sources if isinstance(source, (GeneratedPool, DatasetKeys, PrmPool))}
