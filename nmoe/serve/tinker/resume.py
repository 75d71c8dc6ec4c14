"""Goes on where a server of the same base was when it ended: its clients ask again, and find what they were promised.

A model is read as it was kept, and the requests since then run again that changed it. Where one ends otherwise than it did
before, the model is lost, and its requests fail with the reason. Other models go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import defaultdict
from collections.abc import Sequence

from nmoe.errors import DivergenceError
from nmoe.serve.tinker.futures import Result, ServerEndsError, content_of
from nmoe.serve.tinker.journal import FORGOTTEN, UNLOAD, Row
from nmoe.serve.tinker.models import TrainedModel
from nmoe.serve.tinker.order import Order
from nmoe.serve.tinker.samplers import Held, Sampler
from nmoe.serve.tinker.service import Service
from nmoe.serve.tinker.sessions import Run, Session
from nmoe.serve.tinker.store import now
from nmoe.serve.tinker.weights import Shape, shape_of


def resume(service: Service) -> None:
    """Takes up the sessions of the journal, on the event loop. Requests without a result begin again, once their model is as it
    was."""
    of_file, others = dict[str, Sampler](), set[str]()
    for session_id, key, about in service.journal.sessions():
        if key != service.key:
            checkpoint, _, numbers = key.partition(" ")
            if checkpoint == service.base.fingerprint:
                others.add(numbers)
            continue
        session = service.sessions.all[session_id] = Session(session_id, about)
        in_flight = dict[str, Sampler]()
        for sampler_id, model_id, *columns in service.journal.samplers(session_id):
            sampler = _sampler(service, of_file, *columns)
            if sampler is not None:
                service.sessions.add_sampler(session, sampler_id, sampler)
                if model_id is not None:
                    in_flight[model_id] = sampler
        models = service.journal.models(session_id)
        of_model = defaultdict[str, list[Row]](list)
        for row in service.journal.requests(session_id):
            of_model[row.model_id].append(row)
        for model_id, rows in of_model.items():
            _resume_model(service, session, model_id, rows, models.get(model_id), in_flight.get(model_id))
    for numbers in sorted(others):
        print(
            f"{service.store.root}: there are clients whose models train with {numbers}; they wait for a server of these, and "
            f"this one has {service.base.numbers}",
            file=sys.stderr,
        )


def _sampler(
    service: Service,
    of_file: dict[str, Sampler],
    rank: int | None,
    attention: int,
    mlp: int,
    file: str | None,
    path: str | None,
) -> Sampler | None:
    """Returns a sampler; None if its values are lost. Those whose values lie in one file are one."""
    if file is None or rank is None:
        return Sampler()
    if file not in of_file:
        whole = service.journal.directory / file
        if not whole.exists():
            return None
        of_file[file] = Sampler(Shape(rank, bool(attention), bool(mlp)), Held(whole), path)
    return of_file[file]


def _resume_model(
    service: Service,
    session: Session,
    model_id: str,
    rows: Sequence[Row],
    kept: tuple[str, int] | None,
    in_flight: Sampler | None,
) -> None:
    over = [one for one in rows if one.media is not None]
    waiting = [one for one in rows if one.media is None]
    for one in over:
        if one.media is not None and one.media != FORGOTTEN:
            outcome = service.journal.outcome(one.request_id)
            service.futures.put_back(one.request_id, session.session_id, one.digest, outcome, one.media)
    if any(one.seq_id == UNLOAD for one in over):
        return
    if over:  # the first of them made the model, or could not
        first = max(one.next or 0 for one in over)
        first = min([first, *(one.seq_id for one in waiting)])
        order = Order(first, over=[one.seq_id for one in over if one.seq_id >= first])
        run = Run(model_id, session.session_id, order, last_request=now(), in_flight=in_flight)
        service.sessions.add_run(session, run)
        if kept is not None:
            name, seq_id = kept
            run.kept = service.journal.directory / name
            run.directories.add(run.kept)
            again = [one for one in over if one.seq_id > seq_id and one.body_bytes]
            run.unkept = {one.seq_id: one.body_bytes for one in again}
            run.restoring = asyncio.get_running_loop().create_task(_restore(service, run, again))
    for one in waiting:
        try:
            service.begin_again(one)
        except Exception as error:  # such as saved weights to load that have been removed meanwhile
            service.refuse(one, session.session_id, error)


async def _restore(service: Service, run: Run, again: Sequence[Row]) -> None:
    """Reads a model as it was kept, and runs the requests since then again that changed it. Where one cannot, the model is lost."""

    def read() -> None:
        assert run.kept is not None, "a model that was made was kept"
        run.shape = shape_of(run.kept)
        run.trained = TrainedModel(service.base, run.shape, run.kept, optimizer=True)

    try:
        await service.between_steps(lambda: service.timed(run, "read", read))
        for row in again:
            body = await service.journal.body_of(row.request_id)
            await service.between_steps(lambda row=row, body=body: _repeat(service, run, row, body))  # type: ignore[misc]
    except ServerEndsError:
        raise
    except Exception as error:
        run.trained, run.lost = (
            None,
            f"it could not be taken up after the server had ended: {str(error) or type(error).__name__}",
        )
        print(f"model {run.model_id}: {run.lost}", file=sys.stderr, flush=True)


def _repeat(service: Service, run: Run, row: Row, body: bytes) -> None:
    """Runs a request again, on the engine's thread. Raises ValueError if it ends otherwise than it did before."""
    result: Result | None
    try:
        result = service.timed(run, row.kind, service.act_of(run, row.kind, body))
    except DivergenceError:
        result = None
    before = "diverged" if row.diverged else "succeeded"
    if (result is None) != row.diverged:
        raise ValueError(f"request {row.seq_id} {before}, and does not when it runs again")
    # Fast numerics may differ in the last bits.
    if (
        result is not None
        and service.base.numerics == "exact"
        and hashlib.sha256(content_of(result)).digest() != row.sum
    ):
        raise ValueError(f"request {row.seq_id} has another result when it runs again")
