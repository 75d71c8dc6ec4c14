"""The time line of an asynchronous run: bars as long as the seconds that they stand for."""

from __future__ import annotations

from typing import Any

from nmoe.runs.lanes import bars, waits
from nmoe.runs.timeline import timeline

ROWS = [
    {
        "step": 1,
        "trainer_wait_s": 3.0,
        "time_learn_s": 1.0,
        "time_sync_s": 0.5,
        "time_step_s": 5.0,
        "engine_idle_share": 0.0,
    },
    {
        "step": 2,
        "trainer_wait_s": 1.0,
        "time_learn_s": 2.0,
        "time_sync_s": 1.0,
        "time_step_s": 5.0,
        "engine_idle_share": 0.25,
    },
]


def test_bars_are_as_long_as_their_seconds() -> None:
    found = [(bar.begin, bar.end, bar.doing) for bar in bars(ROWS) if bar.lane == "trainer"]
    waits, trains, publishes = "waits for groups", "trains", "publishes"
    assert found == [
        *((0, 3, waits), (3, 4, trains), (4, 4.5, publishes)),
        *((5, 6, waits), (6, 8, trains), (8, 9, publishes)),
    ]
    # Until step 1 had its groups the engines were busy; of the 3 seconds from then to those of step 2 they were idle for a quarter.
    engines = [(bar.step, bar.begin, bar.end, bar.doing) for bar in bars(ROWS) if bar.lane == "engines"]
    busy, idle = "engines have requests", "engines wait for requests"
    assert engines == [(1, 0, 3, busy), (1, 3, 3, idle), (2, 3, 5.25, busy), (2, 5.25, 6, idle)]


def test_shares_of_the_time_spent_waiting() -> None:
    assert waits(ROWS, 1) == [
        {"step": 1, "trainer": 3 / 5, "engines": 0.0},
        {"step": 2, "trainer": 1 / 5, "engines": 0.25},
    ]
    assert waits(ROWS, 2) == [{"step": 2, "trainer": 4 / 10, "engines": 0.75 / 6}]


def test_they_are_drawn_in_two_lanes() -> None:
    drawn = timeline(ROWS)
    assert drawn is not None
    axes: Any = drawn.axes[0]
    assert axes.get_title(loc="left") == "Who waited for whom, steps 1 to 2"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["engines", "trainer"]
    spans = {
        (collection.get_label(), round(float(box.y0 + box.y1) / 2)): [
            (float(path.vertices[:, 0].min()), float(path.vertices[:, 0].max())) for path in collection.get_paths()
        ]
        for collection in axes.collections
        for box in [collection.get_paths()[0].get_extents()]
    }
    assert spans[("waits for groups", 1)] == [(0, 3), (5, 6)]
    assert spans[("engines wait for requests", 0)] == [(3, 3), (5.25, 6)]
    assert axes.get_xlim() == (0, 9)


def test_a_synchronous_run_has_none() -> None:
    assert bars([{"step": 1, "time_step_s": 2.0, "time_rollout_s": 1.0}]) == []
    assert timeline([{"step": 1, "time_step_s": 2.0, "time_rollout_s": 1.0}]) is None
    assert timeline([]) is None
