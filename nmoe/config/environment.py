"""The settings of an environment: where its problems come from, what a good answer earns, and in which order it is learned.

An environment is a TOML file of its own or the `[environment]` table of a run; both are this one schema. Relative paths
in its own file start from that file's directory, those in a run's table from the directory that the command runs in.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from nmoe.config.base import Array, Conflict, DataPath, Section
from nmoe.config.loader import load
from nmoe.config.packaged import find_environment
from nmoe.config.rewards import RewardSettings

GeneratedTask = Literal["sort", "reverse", "add", "arithmetic", "sum"]
"""Tasks that make their own problems."""

DatasetTask = Literal[
    "gsm8k",
    "math",
    "multiple_choice",
    "proof_verification",
    "meta_verification",
    "prm_step",
    "prm_solution",
    "arithmetic",
    "sum",
    "sort",
    "reverse",
    "add",
    "humaneval",
    "mbpp",
    "code_edit",
    "file_search",
    "text_match",
    "open",
]
"""Tasks that can grade the records of a dataset."""

GoldExtractor = Literal["none", "gsm8k_hash", "boxed", "last_number"]
"""How the gold answer is found in a record's answer field: taken as it is, after `####`, in `\\boxed{}`, last number."""

GateMetric = Literal["format_ok", "structure_ok", "reasoning_ok", "tool_use_ok", "correctness"]

BuiltinTool = Literal["python", "bash", "read", "write", "edit", "search"]
"""Tools that come with nmoe; they work in the trajectory's sandbox."""

MAX_SEED = 2**63 - 1


class GeneratedPool(Section):
    """Problems made by a seeded generator, without end; the splits never share a problem."""

    type: Literal["generated"]
    task_type: GeneratedTask = Field(description="the task whose problems are generated")
    difficulty: Annotated[tuple[int, int], Field(strict=False)] = Field(
        default=(1, 3), description="[least, most], both at least 1 and included; each task says what it counts"
    )
    split: Literal["train", "validation", "eval", "all"] = Field(
        default="train", description="the part of all problems to draw from"
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the order of problems")
    max_examples: int | None = Field(default=None, ge=1, description="how many problems there are; without it, no end")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        least, most = self.difficulty
        if least < 1 or least > most:
            yield Conflict("difficulty", "must be [least, most] with 1 <= least <= most")


class DatasetKeys(Section):
    """How the records of a dataset become problems; the part that all datasets share."""

    task_type: DatasetTask = Field(description="the task that renders and grades the problems")
    problem_field: str | None = Field(
        default=None,
        min_length=1,
        description="the field with the problem's text or messages; by default the one of problem, question, prompt and input "
        "that the records have",
    )
    answer_field: str | None = Field(
        default=None,
        min_length=1,
        description="the field with the gold answer or solution, `a.b` for field b of object a; by default the one of answer, "
        "label, reward_spec.ground_truth and reward_model.ground_truth that the records have",
    )
    gold_extractor: GoldExtractor = Field(default="none", description="how the gold answer is found in its field")
    check_gold: Literal["all", "sample", "off"] = Field(
        default="all",
        description="which gold answers have to be graded correct before a run starts: all, 64 of them, or none",
    )
    answer_order: Literal["any", "as_gold"] = Field(
        default="any",
        description="of `math`: whether a list without brackets, `1, 2`, has an order; lists of tuples have none, values with "
        "names have one, and the question may ask for one",
    )
    units: Literal["asked", "as_gold", "any"] = Field(
        default="asked",
        description="of `math`: the unit that an answer may add to a gold without one: the only one that the question names, "
        "none, or any",
    )
    max_examples: int | None = Field(default=None, ge=1, description="read no more records than these")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the order of problems")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        for key, default in (("answer_order", "any"), ("units", "asked")):
            if getattr(self, key) != default and self.task_type != "math":
                yield Conflict(key, f'is of task_type = "math", not of {self.task_type!r}')


class JsonlPool(DatasetKeys):
    """A local file with one JSON object per line."""

    type: Literal["jsonl"]
    path: Annotated[str, DataPath()] = Field(
        min_length=1, description="the JSONL file; `@[a:b]` behind it takes a part of its records"
    )


class CsvPool(DatasetKeys):
    """A local CSV file, whose fields are all texts."""

    type: Literal["csv"]
    path: Annotated[str, DataPath()] = Field(
        min_length=1, description="the CSV file; `@[a:b]` behind it takes a part of its rows"
    )


class ParquetPool(DatasetKeys):
    """A local Parquet file."""

    type: Literal["parquet"]
    path: Annotated[str, DataPath()] = Field(
        min_length=1, description="the Parquet file; `@[a:b]` behind it takes a part of its rows"
    )


class HubPool(DatasetKeys):
    """One split of a Hugging Face dataset, from the hub or from a local directory or file."""

    type: Literal["hf"]
    dataset: Annotated[str, DataPath(may_be_name=True)] = Field(
        min_length=1, description="name on the hub, or a local directory or file; `@[a:b]` behind it takes a part of it"
    )
    data_files: Array[str] = Field(
        default=(),
        description="files of `dataset` to read, wildcards allowed; with `json`, `parquet`, `csv`: local ones",
    )
    subset: str | None = Field(default=None, description="the dataset's configuration, such as `main`")
    split: str = Field(default="train", min_length=1, description="split, slices such as `train[:1024]` included")


class ReasoningGymPool(Section):
    """Problems made by a dataset of the package reasoning-gym, without end; the splits never share a question."""

    type: Literal["reasoning_gym"]
    dataset: str = Field(min_length=1, description="name of the dataset in reasoning-gym, such as `leg_counting`")
    config: dict[str, Any] = Field(default={}, description="the dataset's own settings, such as `{min_animals = 2}`")
    split: Literal["train", "validation", "eval", "all"] = Field(
        default="train", description="the part of all problems to draw from"
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the order of problems")
    max_examples: int | None = Field(default=None, ge=1, description="how many problems there are; without it, no end")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        for key in {"seed", "size"} & self.config.keys():
            yield Conflict("config", f"must not have {key!r}: `seed` and `max_examples` of the task pool decide")


class SelfplayPool(Section):
    """Problems without an answer, for self-play: whoever solves them is judged by verifiers."""

    type: Literal["selfplay"]
    source: str = Field(
        min_length=1,
        description="prm800k[:PATH], math_shepherd[:PATH], hf:NAME[:SUBSET]:SPLIT, deepseek_math_v2_inputs:PATH or jsonl:PATH",
    )
    problem_field: str | None = Field(
        default=None,
        min_length=1,
        description="the field with the problem's text; default: the first there of problem, question, prompt, input",
    )
    max_examples: int | None = Field(default=None, ge=1, description="read no more records than these")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the order of problems")


class PrmPool(Section):
    """Labelled steps of solutions, to be judged: those of PRM800K, of Math-Shepherd, or of stepwise records."""

    type: Literal["prm"]
    source: str = Field(
        default="prm800k",
        min_length=1,
        description="`prm800k`, `math_shepherd`, `both`, or a file, directory or hub name with records of theirs or stepwise ones",
    )
    split: str = Field(default="train", min_length=1, description="split, slices such as `train[:1024]` included")
    task_type: Literal["prm_step", "prm_solution"] = Field(
        default="prm_step", description="prm_step: the label of the last of some steps; prm_solution: the score of all"
    )
    prm800k: Annotated[str, DataPath(may_be_name=True)] = Field(
        default="openai/prm800k", description="where PRM800K lies: a directory or a Hugging Face name"
    )
    math_shepherd: Annotated[str, DataPath(may_be_name=True)] = Field(
        default="peiyi9979/Math-Shepherd",
        description="where Math-Shepherd lies: a file, directory or Hugging Face name",
    )
    max_examples: int | None = Field(default=None, ge=1, description="the most problems")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the order of problems")


class SourceKeys(Section):
    """What a pool gets in addition when it is one source of a mixture."""

    name: str = Field(min_length=1, description="name of the source in logs and metrics, unique in the mixture")
    weight: float = Field(gt=0, description="share of the problems, relative to the other sources' weights")


class GeneratedSource(GeneratedPool, SourceKeys):
    """A generated pool as a source of a mixture."""


class JsonlSource(JsonlPool, SourceKeys):
    """A JSONL file as a source of a mixture."""


class CsvSource(CsvPool, SourceKeys):
    """A CSV file as a source of a mixture."""


class ParquetSource(ParquetPool, SourceKeys):
    """A Parquet file as a source of a mixture."""


class HubSource(HubPool, SourceKeys):
    """A Hugging Face dataset as a source of a mixture."""


class ReasoningGymSource(ReasoningGymPool, SourceKeys):
    """A reasoning-gym dataset as a source of a mixture."""


class PrmSource(PrmPool, SourceKeys):
    """Labelled steps as a source of a mixture."""


Source = Annotated[
    GeneratedSource | JsonlSource | CsvSource | ParquetSource | HubSource | ReasoningGymSource | PrmSource,
    Field(discriminator="type"),
]


class MixturePool(Section):
    """Several sources; each problem comes from one of them, drawn by weight."""

    type: Literal["mixture"]
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the draws between sources")
    sources: Array[Source] = Field(description="the sources, as [[task_pool.sources]]")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not self.sources:
            yield Conflict("sources", "a mixture needs at least one [[task_pool.sources]]")
        yield from duplicates("sources", (source.name for source in self.sources))


TaskPool = (
    GeneratedPool
    | JsonlPool
    | CsvPool
    | ParquetPool
    | HubPool
    | ReasoningGymPool
    | PrmPool
    | SelfplayPool
    | MixturePool
)


class Weights(Section):
    """What each component of a grade, itself between 0 and 1, contributes to the reward."""

    format: float = Field(default=0.0, ge=0, description="the completion has the form that the environment asks for")
    structure: float = Field(
        default=0.0, ge=0, description="share of the form's parts that hold, for a policy that does not have it yet"
    )
    reasoning: float = Field(default=0.0, ge=0, description="there is reasoning, well formed and not empty")
    tool_use: float = Field(default=0.0, ge=0, description="a tool was called and answered, before a well-formed end")
    correctness: float = Field(default=0.0, ge=0, description="the answer is the gold answer")
    efficiency: float = Field(default=0.0, ge=0, description="a correct answer took few tokens and calls")

    @property
    def all_zero(self) -> bool:
        return not any(self.model_dump().values())


class Rubric(Weights):
    """The weights in force when there is no curriculum: pure correctness unless the file says more."""

    correctness: float = Field(default=1.0, ge=0, description="the answer is the gold answer")


class GateSettings(Section):
    """What opens the next stage: `{metric = "format_ok", at_least = 0.9}`."""

    metric: GateMetric = Field(description="the rate that is measured over the curriculum's window")
    at_least: float = Field(gt=0, le=1, description="the rate at which the next stage opens")
    close_below: float | None = Field(
        default=None, gt=0, lt=1, description="the rate below which the stage closes again; without it, never"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.close_below is not None and self.close_below >= self.at_least:
            yield Conflict("close_below", f"must be below at_least = {self.at_least}, or stages would flicker")


class StageSettings(Section):
    """One stage of a curriculum. The last stage has no gate: nothing comes after it."""

    name: str = Field(min_length=1, description="name of the stage in logs, unique in the curriculum")
    weights: Weights = Field(description="the weights in force during the stage; those not named are 0")
    gate: GateSettings | None = Field(default=None, description="what opens the next stage")


class CurriculumSettings(Section):
    """Stages that open one after the other, so that nothing is rewarded before what it rests on has been learned."""

    window_steps: int = Field(default=4, ge=1, description="a gate holds when its mean over so many steps does")
    stages: Array[StageSettings] = Field(description="the stages in order, as [[curriculum.stages]]")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not self.stages:
            yield Conflict("stages", "a curriculum needs at least one [[curriculum.stages]]")
        yield from duplicates("stages", (stage.name for stage in self.stages))
        last = len(self.stages) - 1
        for index, stage in enumerate(self.stages):
            if index < last and stage.gate is None:
                yield Conflict(f"stages.{index}.gate", "must be there, or the stages after this one never open")
            if index == last and stage.gate is not None:
                yield Conflict(f"stages.{index}.gate", "must not be there: after the last stage it would open nothing")


class ToolsSettings(Section):
    """The tools that the policy may call between its turns."""

    use: Array[str] = Field(
        description=f"the tools: {', '.join(get_args(BuiltinTool))}, or a function of your own as `package.module:function`"
    )
    read: Array[str] | None = Field(
        default=None,
        description="paths of the workspace that calls may read, `.` for all of it; what may be written may be read. Default: all",
    )
    write: Array[str] | None = Field(
        default=None, description="paths of the workspace that calls may write. Default: all"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if not self.use:
            yield Conflict("use", "names no tool; leave [tools] out where there are none")
        for index, name in enumerate(self.use):
            if ":" not in name and name not in get_args(BuiltinTool):
                yield Conflict(
                    f"use.{index}", f"must be one of {', '.join(get_args(BuiltinTool))} or `package.module:function`"
                )
        for key, paths in (("read", self.read), ("write", self.write)):
            for index, path in enumerate(paths or ()):
                if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
                    yield Conflict(f"{key}.{index}", "is a path within the workspace, relative to it")
        seen: set[str] = set()
        for index, name in enumerate(name.rpartition(":")[2] for name in self.use):
            if name in seen:
                yield Conflict(f"use.{index}", f"is the second tool of the name {name!r}; names must be unique")
            seen.add(name)


class BudgetSettings(Section):
    """Limits on what one trajectory may use."""

    completion_tokens: int | None = Field(
        default=None,
        ge=1,
        description="the most tokens that the policy may sample, all turns together; without it, the run's max_new_tokens alone",
    )
    turns: int = Field(default=16, ge=1, description="the most turns of the policy")
    tool_calls: int = Field(default=16, ge=1, description="the most calls of tools")
    wall_s: float = Field(default=600.0, gt=0, description="seconds from the end of the first turn to that of the last")
    tool_s: float = Field(default=10.0, gt=0, description="seconds of one call of a tool, CPU time likewise")
    tool_output_chars: int = Field(
        default=8192, ge=256, description="longest output of a tool that the policy is shown"
    )
    memory_mb: int = Field(default=512, ge=16, description="memory of a call's processes together")
    processes: int = Field(default=64, ge=1, description="processes and threads of a call")
    disk_mb: int = Field(default=64, ge=1, description="size of the workspace and of all temporary files together")


class WorkspaceSettings(Section):
    """[workspace]: the files that each trajectory starts with, from a directory or a git commit, and what becomes of them."""

    directory: Annotated[str | None, DataPath()] = Field(
        default=None, min_length=1, description="directory whose files are copied; or name a repository"
    )
    repository: Annotated[str | None, DataPath()] = Field(
        default=None, min_length=1, description="git clone on this machine that commits are taken from"
    )
    base_commit: str | None = Field(
        default=None, min_length=1, description="commit to start from; default: base_commit of each problem's record"
    )
    target_commit: str | None = Field(
        default=None, min_length=1, description="commit that made the change asked for, for provenance alone"
    )
    bootstrap: Literal["none", "pip", "uv", "requirements"] = Field(
        default="none",
        description="what is installed into .packages beforehand: nothing; the project, by pip or uv; requirements.txt",
    )
    bootstrap_wall_s: float = Field(default=600.0, gt=0, description="seconds that the bootstrap may take")
    keep: Literal["never", "failed", "always"] = Field(
        default="never", description="whose files are saved at the end of a trajectory: nobody's, those not solved, all"
    )
    max_age_days: float = Field(
        default=14.0, gt=0, description="days without use after which `nmoe env gc` removes them"
    )
    max_disk_mb: int = Field(
        default=10240,
        gt=0,
        description="disk beyond which `nmoe env gc` removes this environment's least recently used",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if (self.directory is None) == (self.repository is None):
            yield Conflict("", "needs either directory or repository")
        for key in ("base_commit", "target_commit"):
            if self.directory is not None and getattr(self, key) is not None:
                yield Conflict(key, "a directory has no commits; name a repository instead")


class SystemByFormat(Section):
    """[system_by_format]: a system message for one format, in place of `system`."""

    harmony: str | None = Field(default=None, description="where the format is Harmony")
    chat: str | None = Field(default=None, description="where it is the tokenizer's chat template")
    boxed: str | None = Field(default=None, description="where it is plain text")


class EnvironmentSettings(Section):
    """An environment: task pool, format contract, rewards and their order."""

    own_file: ClassVar[bool] = True

    env_id: str = Field(min_length=1, description="name of the environment")
    version: str = Field(default="1", min_length=1, description="version of the environment, changed with its meaning")
    description: str = Field(default="", description="what it is, in one line, for lists of environments")
    format: Literal["auto", "harmony", "chat", "boxed"] = Field(
        default="auto",
        description="Harmony messages, messages by the tokenizer's chat template, or plain text with the answer in \\boxed{}; "
        "auto: Harmony where the tokenizer has its control tokens, or else its template",
    )
    system: str = Field(default="", description="system message before every problem; empty for none")
    system_by_format: SystemByFormat = Field(
        default=SystemByFormat(), description="system messages for single formats, in place of `system`"
    )
    task_pool: TaskPool = Field(discriminator="type", description="where the problems come from")
    rubric: Rubric | None = Field(default=None, description="weights of the reward; without them, correctness alone")
    curriculum: CurriculumSettings | None = Field(default=None, description="weights that change as gates open")
    tools: ToolsSettings | None = Field(default=None, description="tools that the policy may call")
    budget: BudgetSettings = Field(default=BudgetSettings(), description="limits of one trajectory")
    workspace: WorkspaceSettings | None = Field(default=None, description="files that each trajectory starts with")
    rewards: Array[RewardSettings] = Field(
        default=(), description="rewards beside the rubric's components, as [[rewards]]; docs/rewards.md"
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.rubric is not None and self.curriculum is not None:
            yield Conflict(
                "rubric", "the weights of the curriculum's stages are in force; drop [rubric] or [curriculum]"
            )
        if self.tools is not None and self.format == "boxed":
            yield Conflict("tools", "the boxed format has no form for calls; use harmony or chat")
        yield from duplicates("rewards", (reward.name for reward in self.rewards))
        if "open" in task_types(self.task_pool) and not self._rewards_open_problems():
            yield Conflict(
                "task_pool", "open problems have no right answer that correctness could reward; add [[rewards]]"
            )
        if task_types(self.task_pool) == {"open"}:
            for index, stage in enumerate(() if self.curriculum is None else self.curriculum.stages):
                if stage.gate is not None and stage.gate.metric == "correctness":
                    yield Conflict(
                        f"curriculum.stages.{index}.gate",
                        "open problems have no right answer, so that it would never open",
                    )
        if not any(reward.weight for reward in self.rewards):
            stages = () if self.curriculum is None else self.curriculum.stages
            weighed = {f"curriculum.stages.{index}.weights": stage.weights for index, stage in enumerate(stages)}
            if self.rubric is not None:
                weighed["rubric"] = self.rubric
            for key, weights in weighed.items():
                if weights.all_zero:
                    yield Conflict(key, "all weights are 0, so that every reward would be 0")

    def _rewards_open_problems(self) -> bool:
        """Whether anything is rewarded beside the answers being right."""
        stages = () if self.curriculum is None else self.curriculum.stages
        weights = [*(stage.weights for stage in stages), *([] if self.rubric is None else [self.rubric])]
        beside = any(any(one.model_dump(exclude={"correctness", "efficiency"}).values()) for one in weights)
        return beside or any(reward.weight for reward in self.rewards)


def task_types(pool: TaskPool) -> set[str]:
    """The types of the problems that a pool may hand out, as far as its settings name them."""
    sources = pool.sources if isinstance(pool, MixturePool) else (pool,)
    return {source.task_type for source in sources if isinstance(source, (GeneratedPool, DatasetKeys, PrmPool))}


def load_environment(named: Path) -> EnvironmentSettings:
    """The settings in a TOML file, in a directory's environment.toml, or of a packaged environment. Raises UserError."""
    return load(find_environment(str(named)), EnvironmentSettings)


def held_out(
    settings: EnvironmentSettings, split: Literal["validation", "eval"] = "eval"
) -> EnvironmentSettings | None:
    """The same environment over problems that training never meets: this split of its generated and reasoning-gym pools.

    None where that can not be promised, because a pool is a dataset or does not train on the `train` split.
    """
    pool = settings.task_pool
    if isinstance(pool, GeneratedPool | ReasoningGymPool) and pool.split == "train":
        pool = pool.model_copy(update={"split": split})
    elif isinstance(pool, MixturePool) and all(
        isinstance(source, GeneratedPool | ReasoningGymPool) and source.split == "train" for source in pool.sources
    ):
        sources = tuple(source.model_copy(update={"split": split}) for source in pool.sources)
        pool = pool.model_copy(update={"sources": sources})
    else:
        return None
    return settings.model_copy(update={"task_pool": pool})


def reseeded(settings: EnvironmentSettings, seed: int) -> EnvironmentSettings:
    """The same environment with `seed` added to that of every pool, so that a run's seed decides which problems it meets."""

    def moved(pool: TaskPool) -> TaskPool:
        update: dict[str, object] = {"seed": (pool.seed + seed) % (MAX_SEED + 1)}
        if isinstance(pool, MixturePool):
            update["sources"] = tuple(moved(source) for source in pool.sources)
        return pool.model_copy(update=update)

    return settings.model_copy(update={"task_pool": moved(settings.task_pool)})


def duplicates(key: str, names: Iterable[str]) -> Iterator[Conflict]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield Conflict(f"{key}.{index}.name", "is used before; names must be unique")
        seen.add(name)
