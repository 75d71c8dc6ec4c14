"""A server of SGLang behind the calls that drive nmoe's server and vLLM.

This client is unproven: no SGLang has answered it. Its bodies are checked against the request classes of the wheel of 0.5.23, and
it reads replies as that source writes them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nmoe.engine.api import Request
from nmoe.engine.remote.server import CONTROL_S, EngineServer, ServerLostError, salt_of
from nmoe.engine.remote.wire import TORN, WireError, decode_choice, error_of
from nmoe.parsing import json_of
from nmoe.types import Sample

GENERATE = "/generate"
# What each call of control is here; those left out, which prepare an update, have nothing to do.
_CONTROL: Mapping[str, tuple[str, dict[str, Any]]] = {
    "/resume": ("/continue_generation", {}),
}


class SGLangServer(EngineServer):
    """The routes of one SGLang server."""

    _path, _size, _flushes = "", 0, True

    async def control(
        self, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None, size: int = 0
    ) -> None:
        if path == "/update_weights" and body is not None:
            self._path, self._size = body["update_info"]["path"], size
        elif path == "/finish_weight_update" and body is not None:
            # One call, so that no token falls between the weights and their version.
            update = {
                "model_path": self._path,
                "weight_version": body["weight_version"],
                "flush_cache": self._flushes,
            }
            await super().control("/update_weights_from_disk", update, size=self._size)
        elif path == "/pause":
            self._flushes = (params or {}).get("clear_cache") != "false"
            # Retracted requests are computed again by the new weights; the others keep their keys and values.
            await super().control("/pause_generation", {"mode": "retract" if self._flushes else "in_place"})
        elif path == "/reset_prefix_cache":
            # While requests run it refuses with 400, and goes on serving.
            status, reply = await self._call("/flush_cache", CONTROL_S, {})
            if status not in (200, 400):
                raise ServerLostError(f"{self.name}/flush_cache answered with status {status}: {error_of(reply)}")
        elif path in _CONTROL:
            await super().control(*_CONTROL[path])

    async def refuse_sleep(self) -> None:
        """Does nothing: SGLang has no route that says whether its memory is released."""

    async def info(self) -> None:
        status, reply = await self._call("/model_info", CONTROL_S)
        if status != 200 or b"weight_version" not in reply:
            raise ServerLostError(f"{self.name} is no SGLang server: status {status}: {error_of(reply)}")

    def _asked(self, request: Request, version: int | None) -> tuple[str, dict[str, Any]]:
        settings, count = request.sampling, request.samples
        truncated = settings.top_p < 1 or settings.top_k > 0 or settings.min_p > 0
        sampling = {
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k if settings.top_k > 0 else -1,
            "min_p": settings.min_p,
            "presence_penalty": settings.presence_penalty,
            "frequency_penalty": settings.frequency_penalty,
            "logit_bias": {str(token): value for token, value in settings.logit_bias} or None,
            "stop_token_ids": list(settings.stop_ids),
            "ignore_eos": True,
            "no_stop_trim": True,
        }
        # A batch instead of n: the samples of one request would share a seed.
        return GENERATE, {
            "rid": [f"{request.request_id}/{index}" for index in range(count)],
            "input_ids": [list(request.prompt_ids)] * count,
            "sampling_params": [
                sampling | {"sampling_seed": (settings.seed * 1_000_003 + index) % 2**31} for index in range(count)
            ],
            "return_logprob": True,
            "return_sampling_mask": truncated,
            "return_routed_experts": bool(self._model.moe_layers),
            "extra_key": salt_of(version),
            "stream": False,
        }

    def _answered(self, status: int, reply: bytes, request: Request) -> list[Sample]:
        if status != 200:
            raise WireError(f"request {request.request_id} was refused with status {status}: {error_of(reply)}", status)
        try:
            answers = json_of(reply)
            named = [answer["meta_info"]["id"] for answer in answers]
            if named != [f"{request.request_id}/{index}" for index in range(request.samples)]:
                raise ValueError(f"it has the samples {named}")
            return [self._sample(answer["output_ids"], answer["meta_info"], request) for answer in answers]
        except TORN as error:
            raise WireError(
                f"the reply to request {request.request_id} cannot be used: {type(error).__name__}: {error}"
            ) from None

    def _sample(self, token_ids: list[int], meta: dict[str, Any], request: Request) -> Sample:
        logprobs = meta["output_token_logprobs"]
        # Of a truncated distribution the first are of all tokens, and the others of the kept ones.
        kept = meta.get("output_token_sampling_mask")
        values = [one[0] for one in logprobs] if kept is None else meta["output_token_sampling_logprobs"]
        sample = decode_choice(
            {
                "token_ids": token_ids,
                "finish_reason": meta["finish_reason"]["type"],
                "logprobs": {
                    "content": [
                        {"token_id": one[1], "logprob": value} for one, value in zip(logprobs, values, strict=True)
                    ]
                },
                "weight_versions": meta["weight_versions"],
                "sampling_mask": kept,
            }
        )
        if (experts := meta.get("routed_experts")) is None:
            return sample
        shape = len(request.prompt_ids) + len(token_ids) - 1, len(self._model.moe_layers), self._model.experts_per_token
        routes = np.frombuffer(base64.b64decode(experts, validate=True), np.int32).reshape(shape)
        return replace(sample, routes=routes.astype(np.int16))
