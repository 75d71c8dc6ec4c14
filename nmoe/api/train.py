"""The functions `train_rl`, `train_sft`, `train_dpo` and `train_reward`: each trains a model in one call, as the command does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from nmoe.api.environments import Data, Env, Reward, environment_table, joined, read_config
from nmoe.api.given import checked_generate_fn, explained, model_path, refuse_contradiction, rows_of
from nmoe.config.commands import DPOConfig, RewardConfig, RLConfig, RunConfig, SFTConfig
from nmoe.config.loader import load_run_with
from nmoe.config.registry import names_of_one_call
from nmoe.cores import choose_threads, count_of_torch
from nmoe.engine.function import GenerateFunction
from nmoe.errors import UserError
from nmoe.model.idle_threads import IDLE
from nmoe.recipes.setup import BYTES
from nmoe.runs.directory import is_free
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import write_atomically

C = TypeVar("C", bound=RunConfig)

Model = str | Path | Mapping[str, Any]
Config = Mapping[str, Any] | str | Path

# Steps of a run whose length nothing says.
STEPS = 100


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: `TrainedRun(PosixPath("runs/records"))`. Functions with a `model` argument accept it.

        >>> import nmoe
        >>> run = nmoe.train_sft(checkpoint, data=[{"prompt": "2 + 2 =", "completion": " 4"}], config={"run.name": "four"})
        >>> run
        TrainedRun(path=PosixPath('runs/four'))
        >>> [row["step"] for row in run.metrics], run.checkpoint.name
        ([1], 'step_000001')

    `path` is the run's directory, with config.toml, metrics.jsonl, samples/ and checkpoints/.
    """

    path: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, as one dict per step; docs/reference/metrics.md lists their names."""
        return read_metrics(self.path)

    @property
    def checkpoint(self) -> Path:
        """The directory of the last checkpoint."""
        return resolve_checkpoint(self.path)

    def __fspath__(self) -> str:
        return str(self.path)


@explained
@names_of_one_call()
def train_rl(
    model: Model | None = None,
    env: Env | None = None,
    rewards: Sequence[Reward] = (),
    *,
    data: Data | None = None,
    tools: Sequence[Callable[..., Any] | str] = (),
    config: Config | None = None,
    generate_fn: GenerateFunction | None = None,
) -> TrainedRun:
    """Trains a model by reinforcement learning and returns the run.

        >>> import nmoe
        >>> def vowels(completions, **columns):
        ...     return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]
        >>> run = nmoe.train_rl(
        ...     {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        ...     env=[{"prompt": "aeiou"}],
        ...     rewards=[vowels],
        ...     config={"run.steps": 2, "sampling.max_new_tokens": 8, "batch.group_size": 4, "batch.prompts_per_step": 1},
        ... )
        >>> len(run.metrics)
        2

    `model` is a run, a checkpoint, a GGUF file or the name of a model on the Hugging Face hub; a dict is the `[model.shape]` of a
    new model over bytes, which begins with plain text (`format = "boxed"`). `env` is an environment's file or
    packaged name, a `Task` or `MultiTurnEnv` (class or instance), an `Environment`, the table of an environment as a
    dict, or records. Records are graded against their `answer`, as mathematics, and `rewards` are added to that grade;
    with `rewards` they need a `prompt` alone. `env={"task": "open"}` with `data` grades by `rewards` alone, with any
    fields. `data` has records to use in place of the environment's. Records are a list of dicts, a file, a generator, a
    `datasets.Dataset`, a table of Arrow or a DataFrame.

    `rewards` are functions with TRL's signature, or tables of `[[rewards]]` as dicts; `tools` are functions or names.
    Functions and objects are used as such, wherever they were defined. `generate_fn(request, engine)` samples in place of
    `engine.generate`, and returns the samples of a request: token ids, and log-probabilities under the distribution they
    were drawn from.

    `config` is a run's TOML file, or its tables as a dict, `{"optimizer": {"learning_rate": 1e-5}}` or
    `{"optimizer.learning_rate": 1e-5}`. Without `run.steps` and `run.episodes` there are 100 steps; without `run.name` the run
    is called after its environment, with a number if there is one of that name and `run.resume` does not ask to go on with it.

    Raises UserError, with every mistake there is, before anything starts.
    """
    from nmoe.rl.launch import train

    if generate_fn is not None:
        checked_generate_fn(generate_fn)
    file, tables = read_config(config)
    said = tables.pop("environment", None)
    if env is None:
        env = said
    elif said is not None:
        if isinstance(said, str) or "path" in said:
            named = said if isinstance(said, str) else said["path"]
            raise UserError(f"config: environment = {named!r}, and env names one as well; drop either")
        given = environment_table(env)
        refuse_contradiction(said, given, "environment", "env")
        env = joined(given, said)
    if (environment := environment_table(env, rewards, tools, data)) or file is None:
        tables["environment"] = environment
    if isinstance(model, Mapping) and "environment" in tables:
        # A new model has no format yet, and plain text asks for none.
        tables["environment"].setdefault("format", "boxed")
    name = str(tables.get("environment", {}).get("env_id", "rl"))
    if file is None and "episodes" not in (length := tables.setdefault("run", {})):
        length.setdefault("steps", STEPS)
    checked = _config(RLConfig, model, file, tables, "train_rl", name)
    with _torch_as_it_was():
        return TrainedRun(train(checked, generate_fn))


@explained
def train_sft(model: Model | None = None, data: Data | None = None, *, config: Config | None = None) -> TrainedRun:
    """Fine-tunes a model on examples for one epoch, or as long as `config` says, and returns the run.

        >>> import nmoe
        >>> run = nmoe.train_sft(
        ...     {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        ...     data=[{"prompt": "2 + 2 =", "completion": " 4"}] * 8,
        ...     config={"run.name": "sums"},
        ... )
        >>> run.metrics[0]["loss"] > 0
        True

    `data` is a file, a directory, a name on the hub, or a list of records: conversations, or prompts with completions, in
    TRL's formats (docs/guides/data.md). `model` and `config` have the meaning they have in `train_rl`.
    """
    from nmoe.recipes.sft import sft

    with _torch_as_it_was():
        return TrainedRun(sft(_on_records(SFTConfig, model, data, config, "sft")))


@explained
def train_dpo(model: Model | None = None, data: Data | None = None, *, config: Config | None = None) -> TrainedRun:
    """Trains a model on preference pairs by DPO for one epoch, or as long as `config` says, and returns the run.

        >>> import nmoe
        >>> run = nmoe.train_dpo(
        ...     {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        ...     data=[{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}] * 8,
        ...     config={"run.name": "pairs"},
        ... )
        >>> "loss" in run.metrics[0]
        True

    `data` holds records with `chosen` and `rejected`, with or without a `prompt`, in TRL's formats. The other arguments are as for
    `train_sft`.
    """
    from nmoe.recipes.dpo import dpo

    with _torch_as_it_was():
        return TrainedRun(dpo(_on_records(DPOConfig, model, data, config, "dpo")))


@explained
def train_reward(model: Model | None = None, data: Data | None = None, *, config: Config | None = None) -> TrainedRun:
    """Trains a reward model on preference pairs and returns the run, whose path `[[rewards]] type = "reward_model"` accepts.

        >>> import nmoe
        >>> run = nmoe.train_reward(
        ...     {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        ...     data=[{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}] * 8,
        ...     config={"run.name": "judge"},
        ... )
        >>> run.checkpoint.name
        'step_000001'

    `data` is as for `train_dpo`; the other arguments are as for `train_sft`.
    """
    from nmoe.recipes.reward_model import train_reward_model

    with _torch_as_it_was():
        return TrainedRun(train_reward_model(_on_records(RewardConfig, model, data, config, "reward")))


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Restores torch's settings after the `with` block, because a run changes them.

    They are the number of threads, the way in which idle threads wait, and deterministic algorithms.
    """
    deterministic: Any = torch.utils.deterministic
    threads, fills = torch.get_num_threads(), deterministic.fill_uninitialized_memory
    repeats, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        IDLE.restore()
        torch.use_deterministic_algorithms(repeats, warn_only=warns)
        deterministic.fill_uninitialized_memory = fills


def _on_records(schema: type[C], model: Model | None, data: Data | None, config: Config | None, verb: str) -> C:
    file, tables = read_config(config)
    run, records = tables.setdefault("run", {}), tables.setdefault("records", {})
    if data is not None:
        if other := [key for key in ("path", "sources") if key in records]:
            raise UserError(
                f"config: records.{other[0]} = {records[other[0]]!r}, and data names records as well; drop either"
            )
        path = data if isinstance(data, str | Path) else _written(data, Path(run.get("directory", "runs")))
        records["path"] = str(path)
    if file is None and "steps" not in run:
        records.setdefault("epochs", 1.0)
    return _config(schema, model, file, tables, f"train_{verb}", verb)


def _config(
    schema: type[C], model: Model | None, file: Path | None, tables: dict[str, Any], source: str, name: str
) -> C:
    """Returns a checked configuration that contains `model`. Raises the same errors as the commands.

    A run without a name gets an unused one, unless it comes from a file or resumes a run. If the configuration does not
    set the number of threads, a number that the program has set is kept.
    """
    from nmoe.preflight.preflight import refuse_to_start

    if model is not None:
        given = {"shape": _shape(model)} if isinstance(model, Mapping) else {"path": str(model_path(model))}
        said = tables.get("model", {})
        refuse_contradiction(said, given, "model", "model")
        over_bytes = {"tokenizer": BYTES} if isinstance(model, Mapping) else {}
        tables["model"] = {**over_bytes, **joined(said, given)}
    named = "name" in tables.get("run", {})
    config = load_run_with(file, schema, tables, source, name)
    free, number = config.run, 2
    while file is None and not named and not free.resume and not is_free(Path(free.directory) / free.name):
        free, number = free.model_copy(update={"name": f"{config.run.name}-{number}"}), number + 1
    # A program that gave torch a number of threads keeps it; what torch chose itself is left to `choose_threads`.
    own = torch.get_num_threads()
    if free.threads == 0 and own != choose_threads(0) and own != count_of_torch():
        free = free.model_copy(update={"threads": own})
    config = config.model_copy(update={"run": free})
    refuse_to_start(config)
    return config


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the dimensions of a new model.

    By default every head has separate keys and values, the heads divide the width equally, and a dense feed-forward
    layer is four times as wide.
    """
    shape, heads, width = dict(model), model.get("heads"), model.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        shape = {"kv_heads": heads, "head_dim": width // heads, **shape}
    if isinstance(width, int) and not shape.get("experts"):
        shape.setdefault("intermediate_size", 4 * width)
    return shape


def _written(data: Iterable[Mapping[str, Any]], directory: Path) -> Path:
    """Writes records to a file named by their content, so that a resumed run reads them again: `runs/data/0a1b2c3d4e5f.jsonl`."""
    lines = []
    for number, record in enumerate(rows_of(data, "data")):
        try:
            lines.append(json.dumps(record) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"record {number} of the data has no JSON form: {error}") from None
    text = "".join(lines)
    path = directory / "data" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    return path
