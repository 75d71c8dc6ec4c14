"""The catalogue: one file for each family of checks, in the order in which they run."""

from nmoe.referee.checks import (
    aborts,
    concurrency,
    ends,
    lengths,
    logprobs,
    prefixes,
    publishes,
    seeds,
    tokens,
)
from nmoe.referee.court import Check

_FAMILIES = (tokens, logprobs, ends, seeds, prefixes, aborts, lengths, concurrency, publishes)

CATALOGUE: list[Check] = [check for family in _FAMILIES for check in family.CHECKS]
