"""Draws more problems of sources that are solved less: what is solved already yields groups whose rewards are all alike.

A problem of source s is taken with probability max(0.1, (1 - r_s) / max_s' (1 - r_s')), where r_s is an exponential average of the
share of its samples that were right. Prioritised by learning potential as in Schaul et al. 2016 (arXiv:1511.05952), over sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nmoe.envs.pools.order import stable_hash
from nmoe.envs.pools.pool import Drawn
from nmoe.types import Group

LEAST = 0.1
# Of the average, what a step keeps.
DECAY = 0.7


class Focus:
    """Holds the rates by source, which belong in a checkpoint. Whether a problem is taken is a pure function of rates, seed and
    position."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.rates: dict[str, float] = {}

    def observe(self, groups: Sequence[Group]) -> None:
        """Takes in a step's groups, whether they are trained on or not."""
        outcomes: dict[str, list[float]] = {}
        for group in groups:
            found = outcomes.setdefault(group.problem.source, [])
            found += [trajectory.grade.extras["correctness"] for trajectory in group.trainable]
        for source, values in outcomes.items():
            if values:
                now = sum(values) / len(values)
                self.rates[source] = DECAY * self.rates.get(source, now) + (1 - DECAY) * now

    def share(self, source: str) -> float:
        """The probability that a problem of this source is taken; 1 where nothing is known of it."""
        open_ = {name: 1 - rate for name, rate in self.rates.items()}
        most = max(open_.values(), default=0.0)
        if source not in open_ or most == 0:
            return 1.0
        return max(LEAST, open_[source] / most)

    def admits(self, drawn: Drawn) -> bool:
        """Whether this problem is taken."""
        coin = stable_hash("focus", self._seed, drawn.position) / 2**64
        return coin < self.share(drawn.problem.source)

    def metrics(self) -> Mapping[str, float]:
        """`focus/NAME`: the share of each source's problems that the next step takes."""
        return {f"focus/{source}": self.share(source) for source in sorted(self.rates)}
