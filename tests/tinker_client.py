"""A client of Tinker's protocol that needs nothing of its SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import httpx2
import numpy as np

from nmoe.serve.tinker.messages import FLOAT32, INT64, message


def tensor(values: Any) -> Any:
    array = np.asarray(values)
    whole = array.dtype.kind == "i"
    dense = array.astype("<i8" if whole else "<f4").tobytes()
    return message("Tensor")(dense=dense, dtype=INT64 if whole else FLOAT32, shape=array.shape)


def datum(token_ids: Sequence[int] | bytes, **inputs: Any) -> Any:
    """Returns a sequence to train on; its tokens as bytes are sent as they are."""
    made = message("Datum")()
    sent = token_ids if isinstance(token_ids, bytes) else np.asarray(token_ids, "<i4").tobytes()
    made.model_input.add().encoded_text.tokens = sent
    for name, values in inputs.items():
        made.loss_fn_inputs[name].CopyFrom(
            values if hasattr(values, "dtype") and hasattr(values, "dense") else tensor(values)
        )
    return made


def arrays(record: Any, name: str) -> list[np.ndarray]:
    """Returns the array of each datum from an ArrayRecord."""
    batched = record.fields[name]
    ends = np.frombuffer(batched.offsets, "<i8")
    values = np.frombuffer(batched.data, "<f4")
    parts = [values[a // 4 : b // 4] for a, b in pairwise(ends)]
    return [part.reshape(-1, *batched.trailing_shape) for part in parts]


@dataclass
class Tinker:
    """One session of a client."""

    http: httpx2.Client
    session_id: str = ""
    numbers: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        reply = self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
        self.session_id = reply["session_id"]

    def send(self, path: str, /, **body: Any) -> httpx2.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        reply = self.send(path, **body)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"
        return reply.json()

    def wait(self, promise: Mapping[str, Any], name: str = "") -> Any:
        """Returns the result of a future: JSON, or a message of this name."""
        while True:
            reply = self.send("retrieve_future", request_id=promise["request_id"])
            if reply.status_code != 408:
                break
        assert reply.status_code == 200, reply.text
        if reply.headers["content-type"] != "application/x-protobuf":
            return reply.json()
        return message(name).FromString(reply.content)

    def model(self, **lora: Any) -> Model:
        promise = self.post(
            "create_model",
            session_id=self.session_id,
            model_seq_id=next(self.numbers),
            base_model="tiny",
            lora_config={"rank": 4, "seed": 1, **lora},
        )
        return Model(self, self.wait(promise)["model_id"])

    def sample(self, sampling_session_id: str, prompt: Sequence[int], number: int = 0, **fields: Any) -> Any:
        params = {name: fields.pop(name) for name in ("max_tokens", "seed", "temperature", "stop") if name in fields}
        promise = self.post(
            "asample",
            sampling_session_id=sampling_session_id,
            seq_id=number,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params=params,
            **fields,
        )
        return self.wait(promise, "SampleResponse")


@dataclass
class Model:
    """A model in training."""

    client: Tinker
    model_id: str
    sent: int = 0

    def next(self) -> dict[str, Any]:
        self.sent += 1
        return {"model_id": self.model_id, "seq_id": self.sent}

    def send_pass(
        self, data: Sequence[Any], loss: str, seq_id: int, forward_only: bool = False, **settings: float
    ) -> Any:
        body = message("ForwardBackwardRequest")(
            model_id=self.model_id, seq_id=seq_id, data=data, loss_fn=loss, forward_only=forward_only
        )
        for name, value in settings.items():
            body.loss_fn_config_v2[name].number = value
        headers = {"content-type": "application/x-protobuf"}
        reply = self.client.http.post("/api/v1/forward_backward", content=body.SerializeToString(), headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def run(self, data: Sequence[Any], loss: str, forward_only: bool = False, **settings: float) -> Any:
        promise = self.send_pass(data, loss, self.next()["seq_id"], forward_only, **settings)
        return self.client.wait(promise, "ForwardBackwardOutput")

    def step(self, **params: float) -> dict[str, float]:
        reply = self.client.post("optim_step", **self.next(), adam_params={"learning_rate": 1e-2, **params})
        return self.client.wait(reply)["metrics"]

    def save(self, path: str, name: str, /, **fields: Any) -> dict[str, Any]:
        return self.client.wait(self.client.post(path, **self.next(), path=name, **fields))

    def sampler(self, kind: str = "snapshot") -> str:
        number = next(self.client.numbers)
        promise = self.client.post("save_weights_for_sampler", **self.next(), sampling_session_seq_id=number, kind=kind)
        return self.client.wait(promise)["sampling_session_id"]
