"""The check of a sample that nmoe's own engine did not make: a user's function's, or another process's.

A wrong length, id or log-probability would be trained on without an error, and only the learning curve would show it.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np

from nmoe.engine.api import Request
from nmoe.errors import shown
from nmoe.model.config import ModelConfig
from nmoe.types import FinishReason, Sample


def fault_of(sample: Any, request: Request, model: ModelConfig) -> str | None:
    """Returns the fault of a sample of this request to this model, as the end of a sentence; None for a correct sample."""
    if not isinstance(sample, Sample):
        return f"is {shown(sample)}, not a Sample"
    for name in ("token_ids", "logprobs", "versions"):
        if not isinstance(value := getattr(sample, name), list):
            return f"has {name} = {shown(value)}, not a list"
    count = len(sample.token_ids)
    if not 0 < count <= request.sampling.max_new_tokens:
        return f"has {count} tokens; between 1 and max_new_tokens = {request.sampling.max_new_tokens} were asked for"
    if len(sample.logprobs) != count or len(sample.versions) != count:
        return (
            f"has {count} tokens, {len(sample.logprobs)} log-probabilities and {len(sample.versions)} versions; "
            "each token has one of each"
        )
    if not _all_below(model.vocab_size, sample.token_ids):
        return f"has a token that is not a whole number from 0 to {model.vocab_size - 1}"
    if not all(isinstance(value, int | float) and math.isfinite(value) and value <= 1e-6 for value in sample.logprobs):
        return "has a log-probability that is not a finite number of at most 0"
    if not all(isinstance(version, int) for version in sample.versions):
        return "has a version that is not a whole number"
    if sample.finish_reason not in get_args(FinishReason):
        return f"has the finish reason {sample.finish_reason!r}, not one of {', '.join(get_args(FinishReason))}"
    kept = sample.kept_ids
    # The learner scores a token over the kept set of its position.
    if kept is not None and not (
        isinstance(kept, list)
        and len(kept) == count
        and all(isinstance(ids, list) and _all_below(model.vocab_size, ids) for ids in kept)
        and all(not ids or token in ids for token, ids in zip(sample.token_ids, kept, strict=True))
    ):
        return "has kept_ids that are not a list of tokens for each token, itself among them"
    shape = len(request.prompt_ids) + count - 1, len(model.moe_layers), model.experts_per_token
    if sample.routes is not None and not (
        isinstance(sample.routes, np.ndarray)
        and sample.routes.dtype.kind in "iu"
        and sample.routes.shape == shape
        and bool(((sample.routes >= 0) & (sample.routes < model.experts)).all())
    ):
        return f"has routes that are not experts' numbers in a NumPy array {list(shape)} [positions, layers, experts per token]"
    if (sample.finish_reason == "stop") != (sample.token_ids[-1] in request.sampling.stop_ids):
        return (
            f"has the finish reason {sample.finish_reason!r} and ends with token {sample.token_ids[-1]}; "
            "`stop` means a stop token"
        )
    return None


def _all_below(vocabulary: int, ids: list[Any]) -> bool:
    return all(isinstance(one, int) and 0 <= one < vocabulary for one in ids)
