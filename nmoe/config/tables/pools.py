"""[task_pool] of an environment: where its problems come from."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nmoe.config.base import MAX_SEED, Array, Conflict, DataPath, NameIn, Section, duplicates
from nmoe.config.registry import DATASET_TASKS, GENERATED_TASKS, POOLS, TASKS

GoldExtractor = Literal["none", "gsm8k_hash", "boxed", "last_number"]
"""How the gold answer is read from its field: the whole field, the part after `####`, the content of `\\boxed{}`, the last
number."""


class GeneratedPool(Section):
    """An endless sequence of problems from a seeded generator. No problem is in two splits."""

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
    """number of solved training problems shown in each prompt before the question (few-shot)"""
    hints: Array[str] = ()
    r"""texts of which one, drawn at random, is appended to each question, such as `\nfinal:`; "" for no text"""
    max_examples: int | None = Field(default=None, ge=1)
    """number of problems; default: endless"""

    def conflicts(self) -> Iterator[Conflict]:
        least, most = self.difficulty
        if least < 1 or least > most:
            yield Conflict("difficulty", "must be [least, most] with 1 <= least <= most")


class DatasetKeys(Section):
    """The keys that all dataset pools share: how records become problems."""

    task_type: Annotated[str, NameIn(TASKS, tuple(DATASET_TASKS))] = Field(
        description=f"the task that renders and grades the problems: {', '.join(DATASET_TASKS)}, "
        "or one of your own as `module:Name`"
    )
    problem_field: str | None = Field(default=None, min_length=1)
    """the field with the problem's text or messages; default: the one of problem, question, prompt and input that the first
    record has; several are refused"""
    answer_field: str | None = Field(default=None, min_length=1)
    """the field with the gold answer or solution, `a.b` for field b of object a; default: the one of answer, label,
    reward_spec.ground_truth and reward_model.ground_truth that the first record has; several are refused"""
    gold_extractor: GoldExtractor = "none"
    """how the gold answer is found in its field"""
    check_gold: Literal["all", "sample", "off"] = "all"
    """grade gold answers before the run starts, and refuse incorrect ones: all, a sample of 64, or off"""
    answer_order: Literal["any", "as_gold"] = "any"
    """task `math`: whether order counts in a list without brackets, such as `1, 2`; never in a list of tuples, always for values
    with names, and the question may ask for it"""
    units: Literal["asked", "as_gold", "any"] = "asked"
    """task `math`: which unit an answer may add to a gold answer without one: asked: the only one that the question names;
    as_gold: none; any"""
    easy_first: str | None = Field(default=None, min_length=1)
    """sort the first pass from easy to hard by this field: a difficulty such as `level` or, with a minus, a measured solve rate,
    `-solve_rate` (`nmoe data solve-rates`); later passes are shuffled"""
    levels: Array[str] = ()
    """only problems whose field `level` is one of these, such as ["4", "5"], also written "Level 4"; default: all"""
    record_defaults: dict[str, Any] = Field(default={})
    """fields of records that lack them, such as the server of a live environment, `{ url = "http://127.0.0.1:8000" }`"""
    max_examples: int | None = Field(default=None, ge=1)
    """maximum number of records to read"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the order of problems"""

    def conflicts(self) -> Iterator[Conflict]:
        for key, default in (("answer_order", "any"), ("units", "asked")):
            if getattr(self, key) != default and self.task_type != "math":
                yield Conflict(key, f'is of task_type = "math", not of {self.task_type!r}')


class JsonlPool(DatasetKeys):
    """One or several local files with one JSON object per line."""

    type: Literal["jsonl"]
    path: Annotated[str, DataPath()] = Field(min_length=1)
    """the JSONL file, or a pattern such as `data/*.jsonl`; `@[a:b]` selects some of its records"""


class ProgramPool(DatasetKeys):
    """Problems of local files with one JSON object per line, answered by a program that asks the policy through OpenAI's API."""

    type: Literal["program"]
    path: Annotated[str, DataPath()] = Field(min_length=1)
    """the JSONL file, or a pattern such as `data/*.jsonl`; `@[a:b]` selects some of its records"""
    command: Array[str]
    """the program and its arguments, started for each sample with `OPENAI_BASE_URL` set, and the problem as JSON on its input"""

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not self.command:
            yield Conflict("command", "names no program")


class VerifiersPool(Section):
    """Tasks of an environment of the package verifiers, which plays their episodes in its own interpreter and process."""

    type: Literal["verifiers"]
    venv: Annotated[str, DataPath()] = Field(min_length=1)
    """the virtual environment with verifiers 0.4.0 (v1) or 0.3.1 (v0) and the environment's package"""
    environment: dict[str, Any]
    """v1: the table `[env]` of `vf-eval`, such as `{ taskset = { id = "gsm8k" } }`; v0: `id`, and `args` of `load_environment`"""
    split: Literal["train", "eval"] | None = None
    """v0: which of the environment's datasets; default: train"""
    max_examples: int | None = Field(default=None, ge=1)
    """number of tasks; default: all"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of the order of tasks"""


class CsvPool(DatasetKeys):
    """A local CSV file; all its fields are read as strings."""

    type: Literal["csv"]
    path: Annotated[str, DataPath()] = Field(min_length=1)
    """the CSV file; `@[a:b]` selects some of its rows"""


class ParquetPool(DatasetKeys):
    """One or several local Parquet files."""

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
    """Records from a Python program: a list of dicts, or a function without arguments that returns or yields dicts."""

    type: Literal["python"]
    call: Annotated[str, NameIn(POOLS)]
    """the function or list, as `package.module:name`"""


class ReasoningGymPool(Section):
    """An endless sequence of problems from a dataset of the package reasoning-gym. No question is in two splits."""

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
    """give a wrong answer the dataset's score between 0 and 1, if the dataset has one"""

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
    """Solutions with labelled steps, which the policy learns to judge: from PRM800K, Math-Shepherd or stepwise records."""

    type: Literal["prm"]
    source: str = Field(default="prm800k", min_length=1)
    """`prm800k`, `math_shepherd`, `both`, or a file, directory or hub name with records in their formats or the stepwise one"""
    split: str = Field(default="train", min_length=1)
    """split, with an optional slice such as `train[:1024]`"""
    task_type: Literal["prm_step", "prm_solution"] = "prm_step"
    """prm_step: predict the label of the last step; prm_solution: predict the score of the whole solution"""
    prm800k: Annotated[str, DataPath(may_be_name=True)] = "tasksource/PRM800K"
    """PRM800K: a directory or a Hugging Face name"""
    math_shepherd: Annotated[str, DataPath(may_be_name=True)] = "peiyi9979/Math-Shepherd"
    """Math-Shepherd: a file, directory or Hugging Face name"""
    max_examples: int | None = Field(default=None, ge=1)
    """maximum number of problems"""
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
    """Records from a Python program as a source of a mixture."""


class HubSource(HubPool, SourceKeys):
    """A Hugging Face dataset as a source of a mixture."""


class ReasoningGymSource(ReasoningGymPool, SourceKeys):
    """A reasoning-gym dataset as a source of a mixture."""


class PrmSource(PrmPool, SourceKeys):
    """Solutions with labelled steps as a source of a mixture."""


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
    | ProgramPool
    | VerifiersPool
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
    """Returns the task types of a pool's problems, as far as its settings name them: none for pools of reasoning-gym, verifiers and
    self-play."""
    sources = pool.sources if isinstance(pool, MixturePool) else (pool,)
    return {source.task_type for source in sources if isinstance(source, (GeneratedPool, DatasetKeys, PrmPool))}
