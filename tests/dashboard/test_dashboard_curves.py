"""Smoothed curves, bands over seeds and the lanes of asynchronous runs: the values that were recorded, as the page shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_driver import Dashboard, Server, serving
from playwright.sync_api import Locator, expect

from nmoe.dashboard.curves import Metrics, band
from nmoe.dashboard.export import export

Look = Callable[..., Dashboard]
STEPS = 2000
BESIDE = {"time_learn_s": 1.0, "time_sync_s": 0.5, "time_step_s": 4.0}


def make(path: Path, rows: list[dict[str, Any]], seed: int = 0, rate: float = 0.1) -> None:
    path.mkdir()
    (path / "config.toml").write_text(
        f'[run]\nname = "{path.name}"\nseed = {seed}\nsteps = 9\n[optimizer]\nrate = {rate}\n'
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A run whose values alternate, three seeds of one recipe, one run of another, and a run that samples beside its training."""
    directory = tmp_path_factory.mktemp("curves")
    make(directory / "long", [{"step": step, "loss": float(step % 2)} for step in range(1, STEPS + 1)])
    for seed, more in enumerate((0, 1, 5)):
        steps = range(1, 21 if seed else 31)
        make(directory / f"seed{seed}", [{"step": step, "reward_mean": step + more} for step in steps], seed, 0.2)
    make(directory / "other", [{"step": step, "reward_mean": 2.0} for step in range(1, 21)], 7, 0.3)
    # The trainer waits 1 s of 4 in the first hundred steps, and 3 s in the others, in which the engines are never idle.
    waits = [(1.0, 0.5) if step <= 100 else (2.0, 0.0) for step in range(1, 201)]
    make(
        directory / "beside",
        [
            {"step": step, "trainer_wait_s": wait, "engine_idle_share": idle, **BESIDE}
            for step, (wait, idle) in enumerate(waits, 1)
        ],
    )
    with serving(directory) as server:
        yield server


def test_means_are_of_all_values_and_not_of_the_extremes_that_are_sent(server: Server) -> None:
    reply = server.ask("curves", runs="long", names="loss", points=100, smooth=20)["runs"]["long"]
    _, raw = reply["curves"]["loss"]
    steps, means = reply["smooth"]["loss"]
    assert len(raw) == 101
    assert set(raw) == {0.0, 1.0}
    assert len(steps) <= 101
    assert {mean for step, mean in zip(steps, means, strict=True) if step >= 20} == {0.5}
    assert means[0] == 1.0
    # By cursor, a mean reaches back to values that were sent before.
    later = server.ask("curves", runs="long", names="loss", smooth=3, since="0:1996")["runs"]["long"]
    assert later["smooth"]["loss"] == [[1997, 1998, 1999, 2000], pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3])]


def test_a_band_is_the_median_and_the_range_at_common_steps() -> None:
    one, other, third = ([1, 2, 3], [1.0, 5.0, 9.0]), ([1, 2, 3, 4], [2.0, 4.0, 8.0, 1.0]), ([2, 3], [0.0, 7.0])
    assert band([one, other, third], 10) == ([2, 3], [4.0, 8.0], [0.0, 7.0], [5.0, 9.0])
    assert band([one, other], 2) == ([2, 3], [3.0, 8.5], [1.0, 8.0], [5.0, 9.0])
    assert band([one, ([], [])], 10) == ([], [], [], [])


def test_a_band_by_cursor_has_the_same_means_and_reads_the_new_steps_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"runs": "seed0\nseed1\nseed2", "names": "reward_mean", "smooth": 5}
    every, firsts, smoothed = server.ask("bands", **asked)["bands"]["reward_mean"], list[int](), Metrics.smoothed

    def noted(self: Metrics, name: str, first: int, points: int, window: int) -> Any:
        firsts.append(first)
        return smoothed(self, name, first, points, window)

    monkeypatch.setattr(Metrics, "smoothed", noted)
    later = server.ask("bands", after=17, **asked)["bands"]["reward_mean"]
    assert later == [column[17:] for column in every] == [[18, 19, 20], [17, 18, 19], [16, 17, 18], [21, 22, 23]]
    assert firsts == [17, 17, 17]


@pytest.mark.parametrize("odd", [1e18, math.inf, math.nan])
def test_means_after_an_odd_value_are_right_whole_and_by_cursor(tmp_path: Path, odd: float) -> None:
    make(tmp_path / "odd", [{"step": step, "loss": odd if step == 5 else 0.01} for step in range(1, 15)])
    metrics = Metrics(tmp_path / "odd")
    metrics.read()
    assert metrics.smoothed("loss", 0, 100, 5)[1][-3:] == [0.01] * 3
    for first in range(1, 14):
        by_cursor, whole = (metrics.smoothed("loss", at, 100, 5) for at in (first, 0))
        new = [row for row, step in enumerate(whole[0]) if step > first]
        assert by_cursor == tuple([column[row] for row in new] for column in whole)


def pointed(chart: Locator, share: float) -> dict[str, str]:
    """The legend of a chart when its point at a share of the width is pointed at."""
    chart.scroll_into_view_if_needed()
    over = chart.locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    over.hover(position={"x": box["width"] * share, "y": box["height"] / 2})
    rows = chart.locator(".u-legend .u-series")
    return dict(row.split("\t") for row in rows.evaluate_all(_ROWS))


_ROWS = "(all) => all.map((one) => [...one.querySelectorAll('.u-label, .u-value')].map((cell) => cell.textContent).join('\\t'))"


def test_the_page_shows_means_of_all_values(server: Server, look: Look) -> None:
    board = look(server.url, at="#/?run=long&view=curves&metrics=loss")
    board.at("curves")
    board.page.get_by_label("Smoothing").select_option("mean over 20 steps")
    expect(board.at("curves").get_by_label("Smoothing")).to_have_value("20")
    assert pointed(board.main.locator("[data-chart=loss]"), 0.6)["long"] == "0.5"
    assert "smooth=20" in board.page.url


def test_seeds_of_one_recipe_are_a_median_in_its_range(server: Server, look: Look) -> None:
    chosen = "&".join(f"run={name}" for name in ("seed0", "seed1", "seed2", "other"))
    board = look(server.url, at=f"#/?{chosen}&view=curves&metrics=reward_mean")
    chart = board.at("curves").locator("[data-chart=reward_mean]")
    # The steps that all seeds have are 1 to 20; the middle of the axis is step 10 or 11.
    shown = pointed(chart, 0.5)
    step = int(shown.pop("step"))
    assert 9 <= step <= 12
    assert shown == {"median of 3 runs": f"{step + 1}", "highest": f"{step + 5}", "lowest": f"{step}", "other": "2"}
    said = 'The median of 3 runs is to step 20, where seed1 and seed2 ended; "each run" shows the others to step 30.'
    assert board.page.locator("#ends").inner_text().strip() == said
    board.page.get_by_label("Seeds of one recipe").select_option("each run")
    board.page.wait_for_function("location.href.includes('seeds=each')")
    expect(board.at("curves").get_by_label("Seeds of one recipe")).to_have_value("each")
    assert board.page.locator("#ends").inner_text() == ""
    shown = pointed(board.main.locator("[data-chart=reward_mean]"), 1 / 3)
    step = int(shown.pop("step"))
    assert shown == {"seed0": f"{step}", "seed1": f"{step + 1}", "seed2": f"{step + 5}", "other": "2"}


def test_who_waited_for_whom_is_shown_over_time(server: Server, look: Look) -> None:
    board = look(server.url, at="#/?run=beside&view=time")
    lanes = board.at("time").locator(".lanes")
    assert "steps 161 to 200" in lanes.locator("h3").first.inner_text()
    said = lanes.locator(".lane-said").all_inner_texts()
    assert said == [
        "trainer: waits for groups 80 s, trains 40 s, publishes 20 s",
        # The first interval begins with the first step, and the others with the groups of the step before.
        "engines: engines have requests 158 s, engines wait for requests 0 s",
    ]
    curve = lanes.locator("[data-chart='share of the time spent waiting']")
    early, late = (pointed(curve, share) for share in (0.25, 0.75))
    assert (early["trainer"], early["engines"]) == ("0.25", "0.5")
    assert (late["trainer"], late["engines"]) == ("0.5", "0")
    # A click shows the steps there: around step 50 the engines wait for half of the time.
    pointed(curve, 0.25)
    curve.locator(".u-over").click(position={"x": 60, "y": 20})
    board.page.wait_for_function("location.href.includes('at=')")
    lane = board.at("time").locator(".lane").first
    bars = lane.locator("span").evaluate_all("(all) => all.map((one) => one.title)")
    assert bars[0].endswith("waits for groups: 1 s")
    widths = lane.locator("span").evaluate_all(
        "(all) => all.slice(0, 3).map((one) => one.getBoundingClientRect().width)"
    )
    assert widths[1] == pytest.approx(widths[0], rel=0.05)
    assert widths[2] == pytest.approx(widths[0] / 2, rel=0.1)
    board.page.goto(f"{server.url}#/?run=long&view=time")
    assert board.at("time").locator(".lanes").count() == 0


def test_a_click_in_an_exported_page_asks_for_no_step_that_it_lacks(tmp_path: Path, look: Look) -> None:
    make(
        tmp_path / "beside",
        [{"step": step, "trainer_wait_s": 1.0, "engine_idle_share": 0.5, **BESIDE} for step in range(1, 201)],
    )
    board = look(export([tmp_path], tmp_path / "page.html").as_uri(), at="#/?run=beside&view=time")
    lanes = board.at("time").locator(".lanes")
    for _ in range(2):
        lanes.locator(".u-over").click(position={"x": 60, "y": 20})
    assert "at=" not in board.page.url
    assert "A click on the curves" not in lanes.inner_text()
    assert "steps 161 to 200" in lanes.locator("h3").first.inner_text()
