"""The command that adds an extra can be run as it is printed: nmoe is not on PyPI, and a wheel has no sources beside it."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from nmoe.extras import how_to_install

ROOT = Path(__file__).parents[1]


def test_the_packages_of_an_extra_are_installed() -> None:
    assert how_to_install("report") == "pip install 'matplotlib>=3.9'"
    assert how_to_install("wandb", "trackio", "wandb") == "pip install 'wandb>=0.31' 'trackio>=0.43'"
    assert how_to_install("lm-eval") == "pip install lm-eval==0.4.13"


def test_sources_that_were_never_installed_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", nothing)
    assert how_to_install("wandb", "trackio") == f"pip install -e '{ROOT}[wandb,trackio]'"


def test_no_advice_asks_pypi_for_nmoe() -> None:
    """A path stands before the name, as in README: `pip install "./nmoe[report]"`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    advised = 0
    for file in (*pages, *(ROOT / "nmoe").rglob("*.py")):
        if file.suffix in (".md", ".py", ".toml", ".ipynb"):
            for before, names in re.findall(r"install [^\n]*?(.)nmoe\[([\w,-]+)\]", file.read_text()):
                assert before == "/", file
                assert set(names.split(",")) <= set(extras), file
                advised += 1
    assert advised >= 7
