"""What running engine servers say of themselves."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence

from nmoe.engine.remote.process import KEY
from nmoe.errors import UserError


def described(urls: Sequence[str]) -> tuple[list[str], bool]:
    """Returns a line for each server, and whether all of them answer. Raises UserError for an address that is no URL."""
    lines, all_answer = [], True
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
        try:
            lines.append(f"{url}  {_line(opener, url.rstrip('/'))}")
        except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
            reason = "wrong key; set NMOE_ENGINE_KEY" if getattr(error, "code", 0) in (401, 403) else str(error)
            lines.append(f"{url}  no answer: {reason}")
            all_answer = False
    return lines, all_answer


def _line(opener: urllib.request.OpenerDirector, url: str) -> str:
    def get(path: str) -> bytes:
        headers = {"Authorization": f"Bearer {os.environ.get(KEY, '')}"}
        with opener.open(urllib.request.Request(url + path, headers=headers), timeout=10) as reply:
            body: bytes = reply.read()
            return body

    try:
        info = json.loads(get("/nmoe/info"))
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        get("/health")
        return "healthy, and not nmoe's server: it says no more"
    stats = info["stats"]
    state = f"weights unusable: {info['unusable']}" if info["unusable"] else "paused" if info["paused"] else "serves"
    return (
        f"{state}, version {info['weight_version']}, {stats['running']} running and {stats['waiting']} waiting sequences, "
        f"{stats['generated_tokens']:,} tokens sampled; model {info['fingerprint'][:12]}, vocabulary {info['vocab_size']:,}, "
        f"context {info['context_tokens']:,}, {info['precision']}, {info['numerics']} numerics"
    )
