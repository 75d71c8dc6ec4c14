"""What a request may ask for of sampling. It is refused before it is queued, since a step serves everybody's requests at once."""

from __future__ import annotations

from nmoe.errors import UserError
from nmoe.types import Sampling

# Beyond these, logits divided in fp32 overflow or are all alike. Near the lower one the largest logit has all mass already.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
_MOST_INTEGER = 2**63 - 1


def check_sampling(request_id: str, settings: Sampling) -> None:
    """Raises UserError, naming the request, for settings that mean nothing or that no column of numbers could hold."""
    temperature, top_p, top_k = settings.temperature, settings.top_p, settings.top_k
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise UserError(
            f"request {request_id}: temperature = {temperature} must be 0 (greedy) or lie in {LEAST_TEMPERATURE:g}.."
            f"{MOST_TEMPERATURE:g}"
        )
    if not 0 < top_p <= 1:
        raise UserError(f"request {request_id}: top_p = {top_p} must lie in (0, 1]")
    if not 0 <= top_k <= _MOST_INTEGER:
        raise UserError(f"request {request_id}: top_k = {top_k} must be 0 (off) or a positive number of 63 bits")
    if bad := [stop_id for stop_id in settings.stop_ids if not 0 <= stop_id <= _MOST_INTEGER]:
        raise UserError(
            f"request {request_id}: stop_ids has {bad[0]}, which is no token id: they count from 0, in 63 bits"
        )
