"""Messages: values shown in one line of limited length, and the command that adds an extra."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from nmoe.errors import cut, shown
from nmoe.extras import how_to_install


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_is_one_line_of_limited_length() -> None:
    assert shown("a  b\nc") == "'a  b\\nc'"
    assert shown(np.array([[1, 2], [3, 4]])) == "array([[1, 2], [3, 4]])"
    assert shown("x" * 78) == f"'{'x' * 78}'"
    assert shown("x" * 79) == f"'{'x' * 76}..."
    assert shown("x" * 9, characters=10) == "'xxxxxx..."
    assert shown(Unshown()) == "what cannot be shown (RuntimeError)"


def test_a_long_text_ends_in_dots() -> None:
    assert (cut("abcdef", 6), cut("abcdefg", 6)) == ("abcdef", "abc...")


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
    """A path stands before the name, as in docs/guides/operations.md: `pip install "./nmoe[report]"`."""
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
