"""Whether the Hugging Face hub is asked: not where HF_HUB_OFFLINE is set, and not where it cannot be reached."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

_CONNECT_S = 3.0
_ASK_AGAIN_S = 60.0
_unreachable: dict[str, tuple[float, str]] = {}  # when an address was tried in vain, and why


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Lets the hub's clients in the block read their caches alone where the hub cannot be reached; gives the reason, or None.

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
    """Why the hub is not asked: `HF_HUB_OFFLINE is set`, or as `unreachable` says; None if it is."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable()


def unreachable() -> str | None:
    """Why the hub takes no connection, `huggingface.co cannot be reached (Name or service not known)`, or None if it does. It is
    tried anew after a minute. A proxy is not tried: it may know more."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if parts.hostname is None or not getproxies().keys().isdisjoint({parts.scheme, "all"}):
        return None
    try:
        named_port = parts.port
    except ValueError:
        return f"HF_ENDPOINT = {constants.ENDPOINT} names no valid port; a port is 1 to 65535"
    port = named_port or (443 if parts.scheme == "https" else 80)
    place = parts.hostname if named_port is None else f"{parts.hostname}:{port}"
    tried, why = _unreachable.get(place, (-_ASK_AGAIN_S, ""))
    if time.monotonic() - tried < _ASK_AGAIN_S:
        return why
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_S).close()
    except OSError as error:
        why = f"{place} cannot be reached ({error.strerror or error})"
        _unreachable[place] = time.monotonic(), why
        return why
    return None
