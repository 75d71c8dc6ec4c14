"""Copies of the Hugging Face hub's datasets, kept on this machine under their names.

They lie below $NMOE_DATASETS, or below ~/.cache/nmoe/datasets (in $XDG_CACHE_HOME, where that is set), as `openai/gsm8k/`; every
reader looks there before it asks the hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from nmoe.data.hub import why_not_asked
from nmoe.errors import StorageError, UserError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def kept_datasets() -> Path:
    """The directory of all copies."""
    if kept := os.environ.get("NMOE_DATASETS"):
        return Path(kept)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmoe" / "datasets"


def is_hub_name(name: str) -> bool:
    """Whether a dataset on the hub could have this name: `openai/gsm8k`, or without an owner `gsm8k`."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".")


def download(name: str, files: Sequence[str] = (), revision: str | None = None) -> Path:
    """Fetches a dataset's repository, or the files of it that match, and returns the directory of the copy.

    What is interrupted goes on when it is called again; until all is there, no reader takes it for the dataset. Raises UserError
    for a name that is none and where the hub does not give it.
    """
    from huggingface_hub import snapshot_download

    if not is_hub_name(name):
        raise UserError(f"{name}: not the name of a dataset on the hub, such as openai/gsm8k")
    if (why := why_not_asked()) is not None:
        raise UserError(not_given(name, why))
    directory = kept_datasets() / name
    partial = directory.with_name(directory.name + ".partial")
    source = partial if partial.exists() or not directory.exists() else directory
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=list(files) or None, local_dir=source
        )
        if not any(path.is_file() for path in source.rglob("*") if ".cache" not in path.relative_to(source).parts):
            raise UserError(f"{name}: no file on the hub matches {', '.join(map(repr, files)) or 'anything'}")
        if source == partial:
            partial.rename(directory)
    except UserError:
        raise
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise StorageError(f"{directory}: cannot be written: {error.strerror}") from error
        raise UserError(not_given(name, error)) from error
    except Exception as error:  # the hub's client raises many kinds
        raise UserError(not_given(name, error)) from error
    return directory


def how_to_fetch(name: str) -> str:
    """What to do about a dataset that is not there and that the hub does not give."""
    return (
        f"fetch it where there is a network with `nmoe data download {name}`, and put the copy below {kept_datasets()} (or "
        "$NMOE_DATASETS)"
    )


def not_given(name: str, error: object) -> str:
    """A message: the hub did not give a dataset, with the first line of the error, and what to do."""
    why = (str(error).strip() or repr(error)).splitlines()[0]
    return f"dataset {name!r}: the Hugging Face hub did not give it: {why}; {how_to_fetch(name)}"
