"""The dashboard in Chromium: what it shows of runs that were made, that go on, and that are broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dashboard_driver import Dashboard, Server, serving
from playwright.sync_api import expect

Look = Callable[..., Dashboard]


@pytest.fixture(scope="module")
def server(made: Path) -> Iterator[Server]:
    with serving(made) as server:
        yield server


def test_the_list_leads_to_a_run_and_to_several(server: Server, look: Look) -> None:
    board = look(server.url)
    lines = board.at("list").locator("tbody tr").all_inner_texts()
    assert sorted(line.split()[0] for line in lines) == ["healthy", "troubled"]
    board.main.get_by_role("link", name="troubled").click()
    assert "layer 1: expert 5 gets no token, since step 40" in board.text("overview")
    board.page.keyboard.press("g")
    board.at("list")
    for name in ("healthy", "troubled"):
        board.main.get_by_label(f"Choose {name}").check()
    board.main.get_by_role("button", name="Show the chosen together").click()
    charts = board.at("curves").locator(".chart")
    names = charts.evaluate_all("(all) => all.map((one) => one.dataset.chart)")
    assert names[:3] == ["greedy_pass@1 on sums, 95% intervals", "reward_mean", "correctness"]
    assert "2 of " not in board.page.locator("#notice").inner_text()
    expect(charts.nth(1).locator("canvas")).to_have_count(1)
    assert len(charts.nth(1).locator(".last").inner_text().split(" · ")) == 2


def test_samples_are_filtered_and_a_token_shows_its_numbers(server: Server, look: Look) -> None:
    board = look(server.url, at="#/?run=troubled&view=samples")
    board.at("samples")
    board.page.locator("#filter-problem").fill("sums/1")
    board.page.locator("#filter-problem").press("Enter")
    expect(board.page.locator("#found tbody tr").first).to_contain_text("sums/1")
    assert {row.split("\t")[1] for row in board.page.locator("#found tbody tr").all_inner_texts()} == {"sums/1"}
    board.page.locator("#found tbody tr a").first.click()
    board.at("sample")
    assert board.page.locator("#answers-beside pre").nth(1).inner_text() == "11"
    tokens = board.page.locator(".token")
    expect(tokens).to_have_count(12)
    tokens.nth(3).hover()
    facts = board.page.locator("#token-facts").inner_text()
    for word in (
        "learner's log-probability",
        "advantage",
        "entropy",
        "expert",
        "weight version",
        "mismatch",
        "share of the gradient",
    ):
        assert word in facts
    board.page.get_by_label("Colour by").select_option("advantage")
    link = board.page.url
    board.page.reload()
    board.at("sample")
    assert board.page.get_by_label("Colour by").input_value() == "advantage"
    assert board.page.url == link
