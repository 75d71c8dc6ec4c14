"""What running engine servers say of themselves."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import get_args

from nmoe.config.tables.rollout import fault_of_urls
from nmoe.engine.remote.process import KEY
from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.types import Precision


def described(urls: Sequence[str]) -> tuple[list[str], bool]:
    """Returns a line for each server, and whether all of them answer. Raises UserError for an address that is no URL."""
    lines, all_answer = [], True
    if (problem := fault_of_urls(urls)) is not None:
        raise UserError(problem)
    for url in urls:
        try:
            lines.append(f"{url}  {_line(url.rstrip('/'))}")
        except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            reason = "wrong key; set NMOE_ENGINE_KEY" if getattr(error, "code", 0) in (401, 403) else str(error)
            lines.append(f"{url}  no answer: {reason}")
            all_answer = False
    return lines, all_answer


def precision_of(url: str) -> Precision | None:
    """Returns the precision of the weights that a server of nmoe's has; None for another server."""
    try:
        precision: Precision = json_of(_get(url.rstrip("/") + "/nmoe/info"))["precision"]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return None
    return precision if precision in get_args(Precision) else None


def _get(url: str) -> bytes:
    # A server on this machine is not behind the proxy that the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {os.environ.get(KEY, '')}"}
    with opener.open(urllib.request.Request(url, headers=headers), timeout=10) as reply:
        body: bytes = reply.read()
        return body


def _line(url: str) -> str:
    try:
        info = json.loads(_get(f"{url}/nmoe/info"))
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        _get(f"{url}/health")
        return "healthy, and not nmoe's server: it says no more"
    stats = info["stats"]
    state = f"weights unusable: {info['unusable']}" if info["unusable"] else "paused" if info["paused"] else "serves"
    return (
        f"{state}, version {info['weight_version']}, {stats['running']} running and {stats['waiting']} waiting sequences, "
        f"{stats['generated_tokens']:,} tokens sampled; model {info['fingerprint'][:12]}, vocabulary {info['vocab_size']:,}, "
        f"context {info['context_tokens']:,}, {info['precision']}, {info['numerics']} numerics"
    )
