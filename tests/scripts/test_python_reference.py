"""docs/reference/python.md is what the docstrings say."""

from __future__ import annotations

import sys
from pathlib import Path

import nmoe

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import python_reference  # noqa: E402


# documented: python scripts/python_reference.py
def test_the_page_is_current() -> None:
    assert python_reference.PAGE.read_text() == python_reference.page(), "run: python scripts/python_reference.py"


def test_the_page_has_every_name_with_its_arguments_and_methods() -> None:
    page = python_reference.page()
    for name in nmoe.__all__:
        assert page.count(f"\n## {name}\n") == 1
    assert "    temperature: float = 1.0,\n" in page.partition("## generate\n")[2]
    assert "### MultiTurnEnv.step\n" in page
    assert "\n    >>> short([" in page.partition("## reward\n")[2], "an example is a block of code"
