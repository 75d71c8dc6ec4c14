"""Runs that were made, and a tab at a server of them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Tab
from browser import browser as browser
from dashboard_driver import Dashboard
from playwright.sync_api import Browser

from nmoe.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from made_runs import TEXTS, TOUR, make_run


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer.train(TEXTS, 320)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: Tokenizer) -> Path:
    """The runs of the tour."""
    directory = tmp_path_factory.mktemp("runs")
    for one in TOUR:
        make_run(directory, one, tiny)
    return directory


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy of the tour's runs, to be harmed."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Tab]:
    context = browser.new_context()
    context.set_default_timeout(30_000)
    yield Tab(context)
    context.close()


@pytest.fixture
def look(tab: Tab) -> Iterator[Callable[..., Dashboard]]:
    def look(url: str, at: str = "", **how: Any) -> Dashboard:
        return Dashboard(tab.visit(url, at=at, **how))

    yield look
    tab.leave()
