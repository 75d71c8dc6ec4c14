"""Goes on where a server of the same base was when it ended: its clients ask again, and find what they were promised."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nmoe.errors import UserError
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.journal import FORGOTTEN, UNLOAD, Request
from nmoe.serve.tinker.models import Shape, TrainedModel, shape_of
from nmoe.serve.tinker.order import Order
from nmoe.serve.tinker.samplers import Held, Sampler
from nmoe.serve.tinker.service import Service
from nmoe.serve.tinker.sessions import Run, Session
from nmoe.serve.tinker.store import now


def resume(service: Service) -> None:
    """Takes up the sessions of the journal, on the event loop. Requests without a result begin again, once their model is as it
    was."""
    for session_id, about in service.journal.sessions(service.base.fingerprint):
        session = service.sessions.all[session_id] = Session(session_id, about)
        in_flight = dict[str, Sampler]()
        for sampler_id, model_id, *row in service.journal.samplers(session_id):
            sampler = _sampler(service, *row)
            if sampler is not None:
                service.sessions.add_sampler(session, sampler_id, sampler)
                if model_id is not None:
                    in_flight[model_id] = sampler
        models = service.journal.models(session_id)
        of_model = defaultdict[str, list[Request]](list)
        for request in service.journal.requests(session_id):
            of_model[request.model_id].append(request)
        for model_id, requests in of_model.items():
            _resume_model(service, session, model_id, requests, models.get(model_id), in_flight.get(model_id))


def _sampler(
    service: Service, rank: int | None, attention: int, mlp: int, file: str | None, path: str | None
) -> Sampler | None:
    """Returns a sampler; None if its values are lost. Those whose values lie in one file are one."""
    if file is None or rank is None:
        return Sampler()
    for known in service.sessions.samplers.values():
        if known.held is not None and known.held.file.name == file:
            return known
    whole = service.journal.directory / file
    return Sampler(Shape(rank, bool(attention), bool(mlp)), Held(whole), path) if whole.exists() else None


def _resume_model(
    service: Service,
    session: Session,
    model_id: str,
    requests: Sequence[Request],
    kept: tuple[str, int] | None,
    in_flight: Sampler | None,
) -> None:
    for one in requests:
        if one.media is not None and one.media != FORGOTTEN:
            outcome = one.outcome or b""
            service.futures.put_back(one.request_id, session.session_id, one.digest, outcome, one.media)
    over = [one for one in requests if one.media is not None]
    if any(one.seq_id == UNLOAD for one in over):
        return
    if over:  # the first of them made the model, or could not
        run = Run(model_id, session.session_id, Order(max(one.seq_id for one in over) + 1), last_request=now())
        run.in_flight = in_flight
        service.sessions.add_run(session, run)
        if kept is not None:
            directory, seq_id = service.journal.directory / kept[0], kept[1]
            run.kept, run.shape = directory, shape_of(directory)
            again = [one for one in over if one.seq_id > seq_id and one.body is not None]
            run.restoring = asyncio.get_running_loop().create_task(_restore(service, run, directory, again))
    for one in requests:
        if one.media is None:
            # Such as saved weights to load that have been removed meanwhile.
            with suppress(TinkerError, UserError):
                service.begin_again(one)


async def _restore(service: Service, run: Run, directory: Path, again: Sequence[Request]) -> None:
    """Reads a model as it was kept, and runs the requests since then again, whose results are there."""

    def read() -> None:
        assert run.shape is not None, "a model that was kept has a shape"
        run.trained = TrainedModel(service.base, run.shape, directory, optimizer=True)

    await service.engine.between_steps(read)
    for one in again:
        await service.engine.between_steps(lambda one=one: _repeat(service, run, one))  # type: ignore[misc]


def _repeat(service: Service, run: Run, request: Request) -> None:
    # A step that was refused is refused again. Every other failure is a new one, and the model would differ from before.
    with suppress(*((TinkerError, UserError) if request.kind == "optim_step" else ())):
        service.timed(run, request.kind, service.act_of(run, request.kind, request.body or b""))
