"""Reads the data of a training request: token ids with the inputs of the loss, and where the tokens come from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.messages import message
from nmoe.serve.tinker.tensors import MOST_COLUMNS, read_tensor

# Numbers of a pass's sparse tensors once they are dense: about as many as a body has room for.
_MOST_DENSE = 2**25


@dataclass(frozen=True)
class Span:
    """A run of tokens from one sampled sequence: of its prompt, or sampled."""

    sequence_id: str
    offset: int
    length: int
    sampled: bool


@dataclass(frozen=True)
class Datum:
    """One sequence to train on. `inputs` are of the loss, each with an entry for every token. The spans tile the tokens, and the
    targets; they are empty where the client sent none."""

    token_ids: NDArray[np.int32]
    inputs: Mapping[str, NDArray[Any]]
    spans: tuple[Span, ...] = ()
    target_spans: tuple[Span, ...] = ()

    @property
    def targets(self) -> NDArray[np.int64]:
        """The targets of each position, `[n, K]`."""
        found: NDArray[np.int64] = self.inputs["target_tokens"]
        return found if found.ndim == 2 else found[:, None]


@dataclass(frozen=True)
class PassRequest:
    """A request for a forward pass, and unless `forward_only` for the gradient."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool


def parsed(body: bytes) -> Any:
    """Returns the message in the body of `/forward_backward`. Raises TinkerError for another message."""
    try:
        return message("ForwardBackwardRequest").FromString(body)
    except Exception as error:  # protobuf's DecodeError, of the implementation in use
        raise TinkerError(f"the body is no ForwardBackwardRequest: {error}") from None


def read_pass(sent: Any, vocab_size: int, context_tokens: int) -> PassRequest:
    """Reads a ForwardBackwardRequest. Raises TinkerError for data that no model of this vocabulary and context takes."""
    if not sent.data:
        raise TinkerError("data: is empty")
    dense = sum(
        abs(math.prod(tensor.shape))
        for datum in sent.data
        for tensor in datum.loss_fn_inputs.values()
        if tensor.HasField("sparse_csr")
    )
    if dense > _MOST_DENSE:
        raise TinkerError(f"data: have {dense:,} numbers where sparse tensors are dense; at most {_MOST_DENSE:,}")
    settings: dict[str, float | str] = dict(sent.loss_fn_config)
    for name, value in sent.loss_fn_config_v2.items():
        settings[name] = value.text if value.HasField("text") else value.number
    data = tuple(_datum(one, f"data[{index}]", vocab_size, context_tokens) for index, one in enumerate(sent.data))
    return PassRequest(sent.model_id, sent.seq_id, data, sent.loss_fn, settings, sent.forward_only)


def _datum(sent: Any, where: str, vocab_size: int, context_tokens: int) -> Datum:
    parts = []
    for chunk in sent.model_input:
        if not chunk.HasField("encoded_text"):
            raise TinkerError(f"{where}.model_input: has a chunk that is no text, and the model reads text alone")
        if len(tokens := chunk.encoded_text.tokens) % 4:
            raise TinkerError(f"{where}.model_input: {len(tokens)} bytes are no token ids of four bytes each")
        parts.append(np.frombuffer(tokens, "<i4"))
    token_ids = np.concatenate(parts) if parts else np.zeros(0, "<i4")
    if not 0 < len(token_ids) <= context_tokens:
        raise TinkerError(f"{where}.model_input: has {len(token_ids)} tokens; the context is 1 to {context_tokens}")
    inputs = {
        name: read_tensor(tensor, f"{where}.loss_fn_inputs.{name}") for name, tensor in sent.loss_fn_inputs.items()
    }
    targets = inputs.get("target_tokens")
    if targets is None or targets.dtype.kind != "i" or targets.ndim not in (1, 2) or not targets.size:
        raise TinkerError(f"{where}.loss_fn_inputs.target_tokens: must be whole numbers, [tokens] or [tokens, K]")
    if targets.ndim == 2 and targets.shape[1] > MOST_COLUMNS:
        raise TinkerError(
            f"{where}.loss_fn_inputs.target_tokens: has {targets.shape[1]} targets a token; at most {MOST_COLUMNS}"
        )
    for name, array in inputs.items():
        if array.shape[:1] != token_ids.shape:
            raise TinkerError(
                f"{where}.loss_fn_inputs.{name}: has {array.shape[:1]} entries, and model_input {len(token_ids)} tokens"
            )
    for name, ids in (("model_input", token_ids), ("loss_fn_inputs.target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise TinkerError(f"{where}.{name}: token ids lie in 0..{vocab_size - 1}")
    spans = _spans(sent.model_input_spans, f"{where}.model_input_spans", len(token_ids))
    target_spans = _spans(sent.loss_fn_input_spans, f"{where}.loss_fn_input_spans", len(token_ids))
    return Datum(token_ids, inputs, spans, target_spans)


def _spans(sent: Iterable[Any], where: str, tokens: int) -> tuple[Span, ...]:
    spans = []
    for one in sent:
        sampled = one.HasField("sampled_tokens")
        span = one.sampled_tokens if sampled else one.prompt_tokens
        if span.length < 0 or span.offset < 0:
            raise TinkerError(f"{where}: offset {span.offset} and length {span.length} must be 0 or more")
        spans.append(Span(span.sequence_id, span.offset, span.length, sampled))
    if spans and (covered := sum(span.length for span in spans)) != tokens:
        raise TinkerError(f"{where}: cover {covered} positions of {tokens}")
    return tuple(spans)
