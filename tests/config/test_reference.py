"""The printed reference is the committed one, and names every key."""

from pathlib import Path

from nmoe.config.commands import COMMANDS
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.reference import reference
from nmoe.config.tables.model import ModelShape
from nmoe.config.tables.pools import HubSource

PAGE = Path(__file__).parents[2] / "docs/reference/configuration.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text() == reference(), "run: python -m nmoe.config.reference > docs/reference/configuration.md"


def test_every_key_of_every_section_is_there() -> None:
    page = reference()
    for name in {name for schema in COMMANDS.values() for name in schema.model_fields} - {"environment"}:
        assert f"## `[{name}]`" in page, name
    for section in (ModelShape, HubSource, EnvironmentSettings):
        for key, field in section.model_fields.items():
            if field.description and not any(
                word in key
                for word in ("pool", "rubric", "curriculum", "budget", "workspace", "tools", "rewards", "by_format")
            ):
                assert f"| `{key}` |" in page, key
    assert '| `kl_in` | `"loss"`, `"reward"` | `"loss"` |' in page
