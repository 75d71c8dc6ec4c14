"""The printed reference is the committed one, and says of each command which keys it has."""

from pathlib import Path

from nmoe.config.commands import COMMANDS
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.reference import reference
from nmoe.config.schema import paths_of, sections_of

PAGE = Path(__file__).parents[2] / "docs/reference/configuration.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text() == reference(), "run: python -m nmoe.config.reference > docs/reference/configuration.md"


def section(page: str, heading: str) -> str:
    """The part of the page between this heading and the next of its level."""
    return page.partition(f"\n{heading}\n")[2].partition(f"\n{heading.split()[0]} ")[0]


def test_every_key_of_every_command_is_there() -> None:
    page = reference()
    for command, schema in COMMANDS.items():
        listed = section(page, f"### `nmoe {command}`")
        keys = {path[-1] for path in paths_of(schema) if "environment" not in path and len(path) > 1}
        for key in keys - {"shape", "sources"}:
            shown = f"`{key}`" in listed or f"`{key} = " in listed or f".{key}]`" in listed
            assert shown, (command, key)
    for name, known in EnvironmentSettings.model_fields.items():
        if not sections_of(known.annotation) and name != "rewards":
            assert f"| `{name}` |" in section(page, "## Environment"), name


def test_a_command_lists_only_its_own_keys_with_its_own_defaults() -> None:
    page = reference()
    sft, rl = section(page, "### `nmoe sft`"), section(page, "### `nmoe rl train`")
    assert "`learning_rate = 1e-5`" in sft
    assert "`share_prefixes`" in sft
    assert "**`path`**" in sft
    assert "critic" not in sft
    assert "[`[critic]`](#critic)" in rl
    assert "| `[environment]` | an [environment](#environment), or its `path` |" in rl
    assert "`share_prefixes`" not in section(page, "### `nmoe dpo`")


def test_each_kind_of_a_table_has_a_heading_of_its_own() -> None:
    page = reference()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == len(set(headings))
    assert '| `kl_in` | `"loss"`, `"reward"` | `"loss"` |' in section(page, "### `[algorithm]`")
    assert "| `template` | string | none |" in section(page, '### `[[rewards]]` `type = "judge"`')
    assert "| `weight` | number | required |" in section(page, "### `[[task_pool.sources]]`")
