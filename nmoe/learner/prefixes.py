"""Which sequences of a batch begin alike: what they share need run only once (`Batch.prefixes`)."""

# Shapes: n inputs of a sequence.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_prefixes(inputs: Sequence[np.ndarray], shortest: int = 32) -> tuple[tuple[int, int], ...]:
    """The `prefixes` of a batch with these inputs, `[n]` each: sequences whose first `shortest` inputs are the same are a group,
    and share what all of it begins with. The last input of a sequence is never shared, so that each runs something of its own.

    `common_prefixes([[5, 6, 7, 8], [5, 6, 9], [4, 4]], shortest=2)` is `((0, 2), (0, 2), (2, 0))`.
    """
    first: dict[bytes, int] = {}
    groups = [
        first.setdefault(ids[:shortest].tobytes(), place) if len(ids) > shortest else place
        for place, ids in enumerate(inputs)
    ]
    shared = {group: len(inputs[group]) - 1 for group in groups}
    for ids, group in zip(inputs, groups, strict=True):
        leader = inputs[group]
        most = min(len(ids) - 1, shared[group])
        differs = np.flatnonzero(ids[:most] != leader[:most])
        shared[group] = int(differs[0]) if len(differs) else most
    alone = {group for group in shared if groups.count(group) == 1}
    return tuple((group, 0 if group in alone else shared[group]) for group in groups)
