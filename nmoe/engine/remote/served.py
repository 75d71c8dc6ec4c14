"""Running engine servers that keep the weights that they have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nmoe.config.tables.rollout import fault_of_urls
from nmoe.engine.remote.fleet import Fleet
from nmoe.engine.remote.process import KEY, RunningServer
from nmoe.errors import UserError
from nmoe.model.checkpoint import fingerprint
from nmoe.model.policy import config_of

# Seconds of a server's silence for each token of a request: other requests' answers break it, but samples of one request may wait
# for each other.
_TOKEN_S = 5.0


@contextmanager
def served_engine(
    urls: Sequence[str], checkpoint: Path, note: Callable[[str], None], named: str = ""
) -> Iterator[Fleet]:
    """Opens running servers as one engine that nothing is published to, and notes what they serve. `checkpoint` has the tokenizer
    and the configuration of their model; its weights are read only to note that a server has others. Raises UserError for
    servers that cannot be used."""
    if (problem := fault_of_urls(urls)) is not None:
        raise UserError(problem)
    servers, key = [RunningServer(url) for url in urls], os.environ.get(KEY, "")
    with Fleet(servers, None, config_of(checkpoint), None, token_s=_TOKEN_S, key=key, named=named, note=note) as fleet:
        for url, served in zip(urls, fleet.served(), strict=True):
            note(f"{url}: {served}")
        if served.engine == "nmoe" and served.version == 0:
            with suppress(UserError):  # without weights there is nothing to compare
                if fingerprint(checkpoint) != served.model:
                    note(f"{checkpoint} has other weights than they serve; only its tokenizer and format are used")
        yield fleet
