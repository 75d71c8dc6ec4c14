"""Sessions of clients, with the models that they train and the samplers that they use."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.models import TrainedModel
from nmoe.serve.tinker.order import Order
from nmoe.serve.tinker.samplers import Sampler
from nmoe.serve.tinker.weights import Shape

# The SDK sends a heartbeat every 10 s.
_SILENT_S = 600.0
# After its last request a client can ask for so long why its session ended.
_REMEMBERED_S = 3600.0


@dataclass(eq=False)
class Run:
    """A model that a client trains. `trained` is there once it has been made, and, after a kill, `restoring` is done, unless it is
    `lost` for a reason. Once `ended` nothing is done any more.

    It lies in `kept`, one of its `directories`, as it was some requests ago, which have taken `since_s` seconds; to write it took
    `keeping_s`. `unkept` has the sizes of the requests since then by their sequence ids."""

    model_id: str
    session_id: str
    order: Order
    shape: Shape | None = None
    trained: TrainedModel | None = None
    in_flight: Sampler | None = None
    last_request: str = ""
    restoring: asyncio.Task[None] | None = None
    lost: str | None = None
    ended: bool = False
    kept: Path | None = None
    directories: set[Path] = field(default_factory=set)
    unkept: dict[int, int] = field(default_factory=dict)
    since_s: float = 0.0
    keeping_s: float = 0.0

    def model(self) -> TrainedModel:
        """Raises TinkerError for a model that could not be made, or is lost."""
        if self.lost is not None:
            raise TinkerError(
                f"model {self.model_id}: is lost: {self.lost}; make another from saved weights", 500, "server"
            )
        if self.trained is None:
            raise TinkerError(f"model {self.model_id}: was not made; create_model has the reason")
        return self.trained

    def sampler(self, in_flight: bool) -> Sampler:
        """Returns a new sampler, or the one that all in-flight saves of this model share."""
        assert self.shape is not None, "a model that has values has a shape"
        new = Sampler(replace(self.shape, seed=0))
        if not in_flight:
            return new
        self.in_flight = self.in_flight or new
        return self.in_flight


@dataclass(eq=False)
class Session:
    """One client's program. It was heard at the time `seen`, and the journal has `noted`. `finished` is the reason that it gave at
    its end."""

    session_id: str
    about: Mapping[str, Any]
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    seen: float = field(default_factory=time.monotonic)
    noted: float = field(default_factory=time.monotonic)
    finished: str | None = None


class Sessions:
    """All sessions, models and samplers by their ids. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self.all: dict[str, Session] = {}
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, Sampler] = {}

    def begin(self, about: Mapping[str, Any]) -> Session:
        session = Session(secrets.token_hex(16), about)
        self.all[session.session_id] = session
        return session

    def live(self, session_id: str) -> Session:
        """Returns a session that runs. Raises TinkerError, 404 for an unknown one and 410 for one that has ended."""
        if (session := self.all.get(session_id)) is None:
            raise TinkerError(f"there is no session {session_id!r}", 404)
        if session.finished is not None:
            raise TinkerError(f"session {session_id} has ended: {session.finished}", 410)
        session.seen = time.monotonic()
        return session

    def run(self, model_id: str) -> Run:
        """Raises TinkerError (404) for a model that there is not, or no longer."""
        if (run := self.runs.get(model_id)) is None:
            raise TinkerError(f"there is no model {model_id!r} in training", 404)
        return run

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises TinkerError (404) for a sampler that there is not, or no longer."""
        if (sampler := self.samplers.get(sampler_id)) is None:
            raise TinkerError(f"there is no sampler {sampler_id!r}", 404)
        return sampler

    def add_run(self, session: Session, run: Run) -> None:
        if run.model_id not in session.models:
            session.models.append(run.model_id)
        self.runs[run.model_id] = run

    def add_sampler(self, session: Session, sampler_id: str, sampler: Sampler) -> None:
        if sampler_id not in self.samplers:
            session.samplers.append(sampler_id)
            self.samplers[sampler_id] = sampler

    def end(self, session: Session, reason: str) -> None:
        """Ends a session and frees its models and samplers; the first reason counts."""
        if session.finished is None:
            session.finished = reason
            for model_id in session.models:
                self.runs.pop(model_id, None)
            for sampler_id in session.samplers:
                self.samplers.pop(sampler_id, None)

    def forget(self) -> None:
        """Drops the sessions that ended long ago."""
        before = time.monotonic() - _REMEMBERED_S
        for session in [one for one in self.all.values() if one.finished is not None and one.seen < before]:
            del self.all[session.session_id]

    def silent(self) -> list[Session]:
        """Returns the running sessions whose clients have not been heard for so long that they must be dead."""
        before = time.monotonic() - _SILENT_S
        return [one for one in self.all.values() if one.finished is None and one.seen < before]
