"""The Hugging Face hub: tests whether it can be reached, and keeps local copies of its datasets.

The hub is not asked if HF_HUB_OFFLINE is set or if it cannot be reached. Copies are kept below $NMOE_DATASETS, or below
~/.cache/nmoe/datasets (or $XDG_CACHE_HOME), as `openai/gsm8k/`; every reader looks there before it asks the hub.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from nmoe.errors import StorageError, UserError

_CONNECT_S = 3.0
_ASK_AGAIN_S = 60.0
_unreachable: dict[str, tuple[float, str]] = {}  # when an address was tried in vain, and why


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Restricts the hub's clients to their caches within the `with` block if the hub cannot be reached; yields the reason, or None.

    Without a network they would try each file six times, for half a minute, with a line on the screen for each.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or (why := unreachable()) is None:
        yield None
        return
    modules = [constants, *(module for name in ("datasets.config",) if (module := sys.modules.get(name)))]
    for module in modules:
        module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield why
    finally:
        for module in modules:
            module.HF_HUB_OFFLINE = False  # type: ignore[attr-defined]


def why_not_asked() -> str | None:
    """Returns the reason not to ask the hub: `HF_HUB_OFFLINE is set`, or the reason from `unreachable`; None if it can be asked."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable()


def unreachable() -> str | None:
    """Tries to connect to the hub, and returns why that fails, `huggingface.co cannot be reached (Name or service not known)`, or
    None. A failure is remembered for a minute. With a proxy nothing is tried and None returned, because the proxy may reach the
    hub."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if parts.hostname is None or not getproxies().keys().isdisjoint({parts.scheme, "all"}):
        return None
    try:
        named_port = parts.port
    except ValueError:
        return f"HF_ENDPOINT = {constants.ENDPOINT} names no valid port; a port is 1 to 65535"
    port = named_port or (443 if parts.scheme == "https" else 80)
    address = parts.hostname if named_port is None else f"{parts.hostname}:{port}"
    tried, why = _unreachable.get(address, (-_ASK_AGAIN_S, ""))
    if time.monotonic() - tried < _ASK_AGAIN_S:
        return why
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_S).close()
    except OSError as error:
        why = f"{address} cannot be reached ({error.strerror or error})"
        _unreachable[address] = time.monotonic(), why
        return why
    return None


_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def kept_datasets() -> Path:
    """Returns the directory of all local copies of datasets."""
    if kept := os.environ.get("NMOE_DATASETS"):
        return Path(kept)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmoe" / "datasets"


def is_hub_name(name: str) -> bool:
    """Returns whether a dataset on the hub could have this name: `openai/gsm8k`, or without an owner `gsm8k`."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".")


def download(name: str, files: Sequence[str] = (), revision: str | None = None) -> Path:
    """Fetches a dataset's repository, or only the `files` (patterns) of it, and returns the directory of the copy.

    An interrupted download continues at the next call; no reader takes an unfinished copy for the dataset. Raises UserError for an
    impossible name and if the hub does not provide the dataset.
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
    """Returns the remedy in an error message for a dataset that has no local copy and that the hub does not provide."""
    return (
        f"fetch it where there is a network with `nmoe data download {name}`, and put the copy below {kept_datasets()} (or "
        "$NMOE_DATASETS)"
    )


def not_given(name: str, error: object) -> str:
    """Returns the error message for a dataset that the hub did not provide, with the first line of the error and a remedy."""
    why = (str(error).strip() or repr(error)).splitlines()[0]
    return f"dataset {name!r}: the Hugging Face hub did not give it: {why}; {how_to_fetch(name)}"
