"""The pages of docs/reference that scripts/reference_pages.py writes: each is current, and has what the code has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import nmoe

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import reference_pages


# documented: python scripts/reference_pages.py
@pytest.mark.parametrize("name", ["configuration.md", "cli.md", "python.md"])
def test_the_page_is_current(name: str) -> None:
    page = (reference_pages.REFERENCE / name).read_text()
    assert page == reference_pages.pages()[name], "run: python scripts/reference_pages.py"


def test_the_page_of_commands_has_groups_options_and_choices() -> None:
    page = reference_pages.cli_page()
    assert "## `nmoe env check`" in page, "commands of groups"
    assert "| `--samples` | `8` |" in page, "options with their defaults"
    assert "| `--format auto\\|harmony\\|chat\\|text` |" in page, "choices"


def test_the_page_of_python_has_every_name_with_its_arguments_and_methods() -> None:
    page = reference_pages.python_page()
    for name in nmoe.__all__:
        assert page.count(f"\n## {name}\n") == 1
    assert "    temperature: float = 1.0,\n" in page.partition("## generate\n")[2]
    assert "### MultiTurnEnv.step\n" in page
    assert "\n    >>> short([" in page.partition("## reward\n")[2], "an example is a block of code"
