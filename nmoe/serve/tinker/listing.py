"""What there is: sessions, training runs and saved weights, as the REST client of the SDK lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as Asking
from starlette.responses import Response
from starlette.routing import Route

from nmoe.engine.server.http import body_of, json_reply
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import MOST_BYTES, Fields
from nmoe.serve.tinker.service import Service
from nmoe.serve.tinker.weights import Shape, shape_of

_PAGE = 100


def listing_routes(prefix: str, service: Service) -> list[Route]:
    listing = _Listing(service)
    return [
        Route(f"{prefix}/sessions", listing.sessions, methods=["GET"]),
        Route(f"{prefix}/sessions/{{session_id}}", listing.session, methods=["GET"]),
        Route(f"{prefix}/training_runs", listing.runs, methods=["GET"]),
        Route(f"{prefix}/training_runs/{{model_id}}", listing.run, methods=["GET"]),
        Route(f"{prefix}/training_runs/{{model_id}}/checkpoints", listing.of_run, methods=["GET"]),
        Route(f"{prefix}/training_runs/{{model_id}}/checkpoints/{{rest:path}}", listing.delete, methods=["DELETE"]),
        Route(f"{prefix}/checkpoints", listing.checkpoints, methods=["GET"]),
        Route(f"{prefix}/weights_info", listing.weights_info, methods=["POST"]),
    ]


class _Listing:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def sessions(self, asking: Asking) -> Response:
        found, _ = _page(asking, list(self._service.sessions.all))
        return json_reply({"sessions": found})

    async def session(self, asking: Asking) -> Response:
        session_id = asking.path_params["session_id"]
        if (session := self._service.sessions.all.get(session_id)) is None:
            raise TinkerError(f"there is no session {session_id!r}", 404)
        ids = {"training_run_ids": session.models, "sampler_ids": session.samplers}
        return json_reply({**ids, **session.about})

    async def runs(self, asking: Asking) -> Response:
        found, cursor = _page(asking, list(self._service.store.runs()))
        return json_reply({"training_runs": [self._run(*one) for one in found], "cursor": cursor})

    async def run(self, asking: Asking) -> Response:
        model_id = asking.path_params["model_id"]
        return json_reply(self._run(model_id, self._service.store.run(model_id)))

    def _run(self, model_id: str, record: dict[str, Any]) -> dict[str, Any]:
        saved = self._service.store.saved(model_id)
        last = {kind: next((one.described() for one in saved if one.kind == kind), None) for kind in _KINDS}
        live = self._service.sessions.runs.get(model_id)
        return {
            "training_run_id": model_id,
            "base_model": record["base_model"],
            "model_owner": "nmoe",
            **Shape(record["lora_rank"]).about,
            "last_request_time": record["time"] if live is None else live.last_request,
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": record.get("user_metadata"),
        }

    async def of_run(self, asking: Asking) -> Response:
        model_id = asking.path_params["model_id"]
        self._service.store.run(model_id)
        return json_reply({"checkpoints": [one.described() for one in self._service.store.saved(model_id)]})

    async def checkpoints(self, asking: Asking) -> Response:
        store = self._service.store
        found, cursor = _page(asking, [one for model_id, _ in store.runs() for one in store.saved(model_id)])
        return json_reply({"checkpoints": [one.described() for one in found], "cursor": cursor})

    async def delete(self, asking: Asking) -> Response:
        path = f"tinker://{asking.path_params['model_id']}/{asking.path_params['rest']}"
        self._service.store.delete(path)
        return Response(status_code=204)

    async def weights_info(self, asking: Asking) -> Response:
        fields = Fields(await body_of(asking, MOST_BYTES))
        saved = self._service.store.find(fields.text("tinker_path"))
        shape = shape_of(saved.directory)
        return json_reply(
            {
                "base_model": self._service.store.run(saved.model_id)["base_model"],
                **shape.about,
                "train_unembed": shape.whole,
                "train_mlp": shape.mlp,
                "train_attn": shape.attention,
            }
        )


_KINDS = ("weights", "sampler_weights")


def _page(asking: Asking, found: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """Returns the part that a client asks for by `offset` and `limit`, and the protocol's cursor."""
    try:
        offset, limit = (
            int(asking.query_params.get(name, default)) for name, default in (("offset", 0), ("limit", _PAGE))
        )
    except ValueError:
        raise TinkerError("offset and limit are whole numbers") from None
    offset, limit = max(0, offset), max(0, limit)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}
