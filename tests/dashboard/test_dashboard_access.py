"""Every view of the dashboard under axe-core, in both colour schemes and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from dashboard_driver import Dashboard, Server, serving
from playwright.sync_api import expect
from test_dashboard_curves import BESIDE, make

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
ONE = ("overview", "curves", "samples", "problems", "experts", "alerts", "time", "config", "step&step=60")
SEVERAL = ("overview", "curves", "alerts", "time", "config")


@pytest.fixture(scope="module")
def server(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    beside = tmp_path_factory.mktemp("more") / "beside"
    make(beside, [{"step": step, "trainer_wait_s": 1.0, "engine_idle_share": 0.5, **BESIDE} for step in range(1, 50)])
    with serving(made, beside) as server:
        yield server


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_axe_finds_nothing_serious(server: Server, look: Callable[..., Dashboard], scheme: str, width: int) -> None:
    seen = list[str]()

    found: dict[str, Any]

    def check(board: Dashboard, where: str) -> None:
        found: dict[str, Any] = board.page.evaluate("axe.run({resultTypes: ['violations']})")
        assert len(found["passes"]) > 10
        seen.extend(
            f"{where}: {one['id']}: {node['html'][:90]} {node['failureSummary'][-160:]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"][:3]
        )

    board = look(server.url, width=width, scheme=scheme)
    board.page.evaluate(AXE)
    board.at("list")
    check(board, "list")
    for runs, views in (("run=troubled", ONE), ("run=healthy&run=troubled", SEVERAL), ("run=beside", ("time",))):
        for view in views:
            board.page.evaluate("(hash) => { location.hash = hash; }", f"#/?{runs}&view={view}")
            board.at(view.partition("&")[0])
            check(board, f"{runs} {view}")
    board.page.evaluate("() => { location.hash = '#/?run=troubled&view=sample&step=100&line=0'; }")
    board.at("sample")
    board.page.locator(".token").nth(3).click()
    check(board, "sample")
    colours = board.page.get_by_label("Colour by")
    for name in colours.locator("option").evaluate_all("(all) => all.map((one) => one.value)"):
        colours.select_option(name)
        found = board.page.evaluate("axe.run('.tokens', {runOnly: ['color-contrast']})")
        seen.extend(f"{name}: {node['failureSummary'][-160:]}" for one in found["violations"] for node in one["nodes"])
    board.page.locator("#side-by-side").click()
    expect(board.page.locator(".side article")).to_have_count(4)
    check(board, "side by side")
    board.page.keyboard.press("?")
    check(board, "keys")
    assert seen == []
