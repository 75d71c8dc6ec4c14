"""Guards: how many groups may be under way beside the trainer, and which of them a step may train on.

    issue           ready            take          end
    ------> running ------> ready ----------> taken ----> trained, or void
               |              |
               +--------------+--------------------------> void

A group's age, when it is trained on, is the learner's version less the oldest version of any of its tokens. Two guards keep it at
most the staleness K of the run. At admission, at most K + 1 steps' worth of groups are outstanding, and another is issued when a
group has been trained on or is void, not when it has been sampled. At consumption, a step takes the oldest groups first. It does
not begin while a running group would be too old after it: that group is waited for, or void.

Groups that wait for a step grow old for nothing. So no more of them are outstanding than keep the learner busy. Besides a step's
own groups there is one step's worth at first. After each step that had to wait there is one more, up to K, and one fewer after
some steps that left a whole step's worth ready. With K = 8 always used, `sort_grpo` over two fast servers ended 10 points below the
synchronous run, after 50 steps and after 75.

`Guards` has no clock and no event loop, so that any order of events can be tried, and simulated.
"""

from __future__ import annotations

from typing import Literal

Overdue = Literal["wait", "drop"]
"""What becomes of a running group that would be too old after the next step."""

# Steps in a row that leave a whole step's worth ready before fewer are sampled ahead: at first, and at most. Each step that waits
# doubles their number, so that a run of which a step needs the room now and then seldom waits.
_PATIENCE, _LONGEST_PATIENCE = 4, 64


class Guards:
    """The outstanding groups of a run, with their versions. Raises RuntimeError or KeyError where a position is issued twice, or
    is not outstanding."""

    def __init__(self, staleness: int, groups: int, overdue: Overdue = "wait") -> None:
        """Lets a group be `staleness` versions old when a step trains on it. A step trains on so many `groups`, or more."""
        self._staleness, self._groups, self._overdue = staleness, groups, overdue
        self._ahead, self._waits = min(1, staleness), False
        self._spare, self._patience = 0, _PATIENCE
        self._running: dict[int, int] = {}  # position: version at its issue, which none of its tokens is older than
        self._ready: dict[int, int] = {}  # position: oldest version of its tokens
        self._taken: set[int] = set()

    @property
    def room(self) -> int:
        """The number of groups that may be issued now; negative where fewer are to be outstanding than are."""
        return (self._ahead + 1) * self._groups - self.running - self.ready_groups - len(self._taken)

    @property
    def ahead(self) -> int:
        """The number of later steps whose groups are sampled while a step trains, from 1 to the staleness."""
        return self._ahead

    @property
    def running(self) -> int:
        """The number of groups that are being sampled."""
        return len(self._running)

    @property
    def ready_groups(self) -> int:
        """The number of groups that wait for a step."""
        return len(self._ready)

    def issue(self, position: int, version: int) -> None:
        """Counts a group that is sampled from now on, by this version or later ones."""
        if position in self._running or position in self._ready or position in self._taken:
            raise RuntimeError(f"position {position} is outstanding, and issued again")
        self._running[position] = version

    def ready(self, position: int, oldest: int) -> None:
        """Counts a running group as ready to train on. `oldest` is the oldest version of its tokens."""
        issued = self._running.pop(position)
        if oldest < issued:
            raise RuntimeError(
                f"position {position} was issued at version {issued}, and has tokens of version {oldest}"
            )
        self._ready[position] = oldest

    def end(self, position: int) -> None:
        """Counts a group as trained on, or void."""
        if position in self._taken:
            self._taken.remove(position)
        elif self._ready.pop(position, None) is None:
            del self._running[position]

    def late(self, version: int) -> list[int]:
        """Returns the running groups that are to be void before a step at this version of the learner: where overdue groups are
        dropped, those that would be too old after it. Empty while too few groups are ready for a step."""
        if self._overdue == "wait" or len(self._ready) < self._groups:
            return []
        return [position for position, oldest in self._running.items() if self._too_old(oldest, version)]

    def take(self, version: int, least: int | None = None) -> list[int] | None:
        """Returns the groups for a step at this version of the learner, oldest first: as many as a step trains on, and all that
        would be too old after it. None while fewer than that (or than `least`) are ready, and while a running group would be too
        old after it."""
        if len(self._ready) < (self._groups if least is None else least):
            self._waits = True
            return None
        if any(self._too_old(oldest, version) for oldest in self._running.values()):
            return None
        order = sorted(self._ready, key=lambda position: (self._ready[position], position))
        taken = [p for i, p in enumerate(order) if i < self._groups or self._too_old(self._ready[p], version)]
        for position in taken:
            del self._ready[position]
        self._taken.update(taken)
        self._look_ahead()
        return taken

    def _look_ahead(self) -> None:
        """Chooses how many steps' groups are sampled ahead, by whether this one waited for any, and how many it leaves."""
        if self._waits:
            self._ahead = min(self._ahead + 1, self._staleness)
            self._spare, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)
        elif len(self._ready) < self._groups:
            self._spare = 0
        elif self._ahead > 1 and self._spare + 1 == self._patience:
            self._ahead, self._spare = self._ahead - 1, 0
        else:
            self._spare = min(self._spare + 1, self._patience - 1)
        self._waits = False

    def _too_old(self, oldest: int, version: int) -> bool:
        """Whether such a group would be too old at the step after one at this version."""
        return version + 1 - oldest > self._staleness
