"""Running engine servers that keep the weights that they have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from nmoe.config.tables.rollout import fault_of_urls
from nmoe.engine.api import Request
from nmoe.engine.remote.fleet import DEADLINE_S, Fleet, Slot
from nmoe.engine.remote.process import KEY, RunningServer
from nmoe.engine.remote.server import PROBED, Probe, Served, ServerLostError
from nmoe.errors import UserError
from nmoe.model.checkpoint import fingerprint
from nmoe.model.policy import config_of
from nmoe.types import Sample

# Seconds of a server's silence for each token of a request: other requests' answers break it, but samples of one request may wait
# for each other.
_TOKEN_S = 5.0


class ServedFleet(Fleet):
    """Servers that keep the weights that they have, the same on all of them. A fenced one, restarted if need be, is opened once it
    samples as it did at first."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Takes what `Fleet` takes."""
        super().__init__(*arguments, **settings)
        self._known: dict[int, tuple[Served, Probe]] = {}  # what each server was opened with

    async def _admit(self, slot: Slot) -> None:
        served, probe = await slot.server.served(DEADLINE_S + self._token_s * PROBED)
        if served.vocab_size not in (None, self._model.vocab_size):
            raise ServerLostError(
                f"{slot.server.name} has another model: its vocabulary has {served.vocab_size:,} tokens, and the checkpoint's "
                f"{self._model.vocab_size:,}"
            )
        first, first_probe = self._known.get(0, (served, probe))
        if served != first:
            raise ServerLostError(
                f"{slot.server.name} serves {served}; {self._slots[0].server.name} began with {first}: these are not the same"
            )
        if probe.is_of_other_weights(first_probe):
            raise ServerLostError(
                f"{slot.server.name} has other weights than those with which {self._slots[0].server.name} began, under the same "
                "name and version: one token gives other samples or log-probabilities"
            )
        # A healed server may round differently; results that carry the first digest in their name go on under it.
        self._known.setdefault(slot.index, (served, probe))
        slot.version = served.version
        await self._open_slot(slot)

    async def _restore(self, slot: Slot) -> None:
        await self._admit(slot)

    async def _sample(self, slot: Slot, request: Request, attempt: int) -> list[Sample]:
        asked = slot.server.generate(request, slot.version, attempt, None)
        samples = await slot.silence.broken_by(asked, DEADLINE_S + self._token_s * request.sampling.max_new_tokens)
        if any(
            sample.finish_reason == "abort" for sample in samples
        ):  # an evaluation would count them as wrong answers
            raise ServerLostError(f"{slot.server.name} was made to abort request {request.request_id!r}")
        return samples

    async def update_weights(self, source: Any, version: int) -> NoReturn:
        raise RuntimeError("nothing is published to servers that keep their weights")

    def served(self) -> list[Served]:
        """Returns what each server has served since it was opened."""
        return [served for served, _ in self._known.values()]


@contextmanager
def served_engine(
    urls: Sequence[str], checkpoint: Path, note: Callable[[str], None], named: str = ""
) -> Iterator[ServedFleet]:
    """Opens running servers as one engine that nothing is published to, and notes what they serve. `checkpoint` has the tokenizer
    and the configuration of their model; its weights are read only to note that a server has others. Raises UserError for
    servers that cannot be used."""
    if (problem := fault_of_urls(urls)) is not None:
        raise UserError(problem)
    servers, key = [RunningServer(url) for url in urls], os.environ.get(KEY, "")
    with ServedFleet(servers, config_of(checkpoint), token_s=_TOKEN_S, key=key, named=named, note=note) as fleet:
        for url, served in zip(urls, fleet.served(), strict=True):
            note(f"{url}: {served}")
        if served.engine == "nmoe" and served.version == 0:
            with suppress(UserError):  # without weights there is nothing to compare
                if fingerprint(checkpoint) != served.model:
                    note(f"{checkpoint} has other weights than they serve; only its tokenizer and format are used")
        yield fleet
