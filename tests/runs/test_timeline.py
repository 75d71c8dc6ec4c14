"""The time line of an asynchronous run: bars as long as the seconds that they stand for."""

from __future__ import annotations

import re

import pytest

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
    drawn = timeline(ROWS)
    found = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)".*?<title>(.*?)</title>', drawn)
    scale = (560 - 62 - 10) / 10
    bars = [((float(x) - 62) / scale, int(y), float(width) / scale, said) for x, y, width, said in found]
    trainer = [(begin, width) for begin, y, width, _ in bars if y == 26]
    assert trainer == [pytest.approx(one, abs=1e-3) for one in [(0, 3), (3, 1), (4, 0.5), (5, 1), (6, 2), (8, 1)]]
    # Until step 1 had its groups the engines were busy; of the 3 seconds from then to those of step 2 they were idle for a quarter.
    engines = [(begin, width) for begin, y, width, _ in bars if y == 54]
    assert engines == [pytest.approx(one, abs=1e-3) for one in [(0, 3), (3, 0), (3, 2.25), (5.25, 0.75)]]
    assert bars[0][3] == "step 1 waits for groups: 3.00 s"
    assert ">10.0 s<" in drawn


def test_a_synchronous_run_has_none() -> None:
    assert timeline([{"step": 1, "time_step_s": 2.0, "time_rollout_s": 1.0}]) == ""
    assert timeline([]) == ""
