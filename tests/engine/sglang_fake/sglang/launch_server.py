"""Stands in for `python -m sglang.launch_server`: nmoe's engine behind SGLang's routes.

Options, the fields of each body and their types are checked against those of the wheel, in `sglang_fields.json`; a body that has
another field is refused with status 400.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import json
import sys
import typing
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import UserError
from nmoe.model.families import family_of
from nmoe.model.families.base import filling
from nmoe.model.policy import load_policy
from nmoe.model.shards import open_tensors
from nmoe.types import Sample, Sampling

FIELDS = json.loads((Path(__file__).parents[2] / "sglang_fields.json").read_text())
# Types of SGLang's own are not there to be compared with.
KNOWN = defaultdict(lambda: Any, {name: getattr(typing, name) for name in typing.__all__} | vars(builtins))
KNOWN |= {"PlainValidator": lambda _: None, "validate_optional_list_i64_1d_2d": None}


def check(body: dict[str, Any], name: str) -> None:
    """Raises ValueError for a body that is no request of this class."""
    for key, value in body.items():
        if (said := FIELDS["classes"][name].get(key)) is None:
            raise ValueError(f"{name} has no field {key}")
        try:
            TypeAdapter(eval(said, {}, KNOWN)).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            raise ValueError(f"{name}.{key} is no {said}: {error}") from None


def options_of(arguments: list[str]) -> dict[str, str]:
    """Reads a command line. Ends the process where SGLang has no such option."""
    found: dict[str, str] = {}
    for argument in arguments:
        if argument.startswith("--"):
            if (named := argument[2:].replace("-", "_")) not in FIELDS["options"].split():
                sys.exit(f"sglang.launch_server: error: unrecognized arguments: {argument}")
            found[named] = ""
        else:
            found[named] = argument
    return found


class Server:
    def __init__(self, options: dict[str, str]) -> None:
        self.key, self.version = options["api_key"], "default"
        self.retracts = False  # whether running requests are computed again by new weights
        dtype = getattr(torch, options["dtype"])
        self.model, _ = load_policy(Path(options["model_path"]), dtype, torch.device("cpu"))
        self.model.requires_grad_(False).set_numerics("exact")
        self.engine = NativeEngine(self.model, int(options["max_running_requests"]))

    async def model_info(self, _: dict[str, Any]) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def generate(self, body: dict[str, Any]) -> Response:
        for one in body["sampling_params"]:
            check(one, "SamplingParams")
        rows = zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True)
        return JSONResponse(await asyncio.gather(*(self._sampled(body, *row) for row in rows)))

    async def _sampled(
        self, body: dict[str, Any], rid: str, prompt: list[int], asked: dict[str, Any]
    ) -> dict[str, Any]:
        sampling = Sampling(
            asked["max_new_tokens"],
            asked["temperature"],
            asked["top_p"],
            max(asked["top_k"], 0),
            min_p=asked["min_p"],
            seed=asked["sampling_seed"],
            stop_ids=tuple(asked["stop_token_ids"]),
        )
        (sample,) = await self.engine.generate(Request(tuple(prompt), 1, sampling, rid))
        spans, start = [], 0
        for version, tokens in groupby(sample.versions):
            stop = start + len(list(tokens))
            spans.append(
                {"version": "default" if self.version == "default" else str(version), "start": start, "end": stop}
            )
            start = stop
        return {
            "text": "",
            "output_ids": sample.token_ids,
            "meta_info": self._meta(body, rid, sample) | {"weight_versions": spans},
        }

    def _meta(self, body: dict[str, Any], rid: str, sample: Sample) -> dict[str, Any]:
        reason = {"type": sample.finish_reason}
        if sample.finish_reason == "stop":
            reason["matched"] = sample.token_ids[-1]
        pairs = list(zip(sample.logprobs, sample.token_ids, strict=True))
        found: dict[str, Any] = {"id": rid, "finish_reason": reason}
        if body["return_sampling_mask"]:
            # The log-probabilities among all tokens are lower than those among the kept ones.
            found["output_token_sampling_mask"] = sample.kept_ids
            found["output_token_sampling_logprobs"] = sample.logprobs
            pairs = [(logprob - 1.0, token) for logprob, token in pairs]
        found["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        if body["return_routed_experts"]:
            assert sample.routes is not None
            found["routed_experts"] = base64.b64encode(sample.routes.astype("int32").tobytes()).decode()
        return found

    async def update(self, body: dict[str, Any]) -> Response:
        buffers = [name for name, _ in self.model.named_buffers()]
        config, stored = self.model.config, open_tensors(Path(body["model_path"]))
        put = filling(self.model.state_dict(), family_of(config), config, stored, buffers)
        await self.engine.replace_weights(put, int(body["weight_version"]), recompute=self.retracts)
        self.version = body["weight_version"]
        return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})

    async def pause(self, body: dict[str, Any]) -> Response:
        self.retracts = body["mode"] == "retract"
        return await self.done(body)

    async def done(self, _: dict[str, Any]) -> Response:
        return JSONResponse({"status": "ok"})

    def app(self) -> Starlette:
        routes = {
            "/generate": self.generate,
            "/update_weights_from_disk": self.update,
            "/pause_generation": self.pause,
            "/continue_generation": self.done,
            "/flush_cache": self.done,
            "/model_info": self.model_info,
            "/health": self.done,
        }
        return Starlette(
            routes=[Route(path, self._guarded(path, act), methods=["GET", "POST"]) for path, act in routes.items()]
        )

    def _guarded(self, path: str, act: Any) -> Any:
        async def answer(asked: Asked) -> Response:
            if path != "/health" and asked.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            body = await asked.json() if asked.method == "POST" else {}
            try:
                if path in FIELDS["routes"]:
                    check(body, FIELDS["routes"][path])
                return await act(body)
            except (ValueError, UserError) as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)

        return answer


def main() -> None:
    options = options_of(sys.argv[1:])
    server = Server(options)
    settings = uvicorn.Config(server.app(), host=options["host"], port=int(options["port"]), log_level="warning")
    server.engine.run(uvicorn.Server(settings).serve())


if __name__ == "__main__":
    main()
