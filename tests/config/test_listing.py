"""Lists of configurations, and the printed reference of keys."""

from __future__ import annotations

import re
import tomllib
from importlib import invalidate_caches
from pathlib import Path

import pytest

from nmoe.config.commands import COMMANDS, PretrainConfig, RLConfig, RunConfig, SFTConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.listing import list_configurations, show_configuration, show_environment
from nmoe.config.loader import load, load_preparation, load_run
from nmoe.config.packaged import CONFIGS, ENVIRONMENTS, PIPELINES, PREPARATIONS, find_pipeline
from nmoe.config.pipeline import PipelineSettings
from nmoe.config.reference import reference
from nmoe.config.schema import paths_of, sections_of
from nmoe.errors import UserError

# What no command of its own runs.
BY_NAME: dict[str, type[RunConfig]] = {
    "speedrun_base": PretrainConfig,
    "speedrun_midtraining": PretrainConfig,
    "speedrun_sft": SFTConfig,
    "selfplay_roles": SFTConfig,
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_it_loads_as_what_its_command_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head = path.read_text().partition("[")[0]
    commands = re.findall(rf"(?:nmoe|nmoe\.rl) ([a-z ]+?) {path.stem}\b", head)
    schema = BY_NAME.get(path.stem) or COMMANDS[commands[-1]]
    config = load_run(path, schema)
    assert config.model.path or config.model.shape


def test_configurations_with_what_runs_them() -> None:
    head, *rows = list_configurations()
    names, froms, texts = (head.index(title) for title in ("COMMAND", "FROM", "DESCRIPTION"))
    table = {row[:names].strip(): (row[names:froms].strip(), row[texts:]) for row in rows}
    assert set(table) == {path.stem for kept in (CONFIGS, PREPARATIONS, PIPELINES) for path in kept.glob("*.toml")}
    assert table["numina"][0] == "nmoe data prepare numina"
    assert table["nanochat_d20"][0] == "nmoe speedrun nanochat_d20"
    assert show_configuration("nanochat_d20") == (PIPELINES / "nanochat_d20.toml").read_text()
    assert show_configuration("numina") == (PREPARATIONS / "numina.toml").read_text()
    assert table["sort_grpo"] == (
        "nmoe rl train sort_grpo",
        "GRPO on one skill: the speedrun's base, which sorts poorly, learns to sort digits",
    )
    assert table["sort_distillation"][0] == "nmoe rl train sort_distillation"
    for name, (command, text) in table.items():
        assert text
        if command != "-":
            verb = command.removeprefix("nmoe ").removesuffix(f" {name}")
            if verb == "data prepare":
                assert load_preparation(PREPARATIONS / f"{name}.toml")
            elif verb == "speedrun":
                assert load(find_pipeline(name), PipelineSettings).stage
            else:
                assert load_run(CONFIGS / f"{name}.toml", COMMANDS[verb])
    # What only another command runs: the speedrun, and a benchmark.
    assert {name for name, (command, _) in table.items() if command == "-"} == {
        "selfplay_roles", "speedrun_base", "speedrun_midtraining", "speedrun_sft",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["speedrun", "sort_grpo", "code_fix"])
def test_a_shown_configuration_is_the_packaged_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)
    # A shell makes the file that output goes to before the command runs.
    Path(f"{name}.toml").touch()
    text = show_configuration(f"{name}.toml")
    assert text.startswith((CONFIGS / f"{name}.toml").read_text().partition("\n[")[0]), "with its comments"
    Path("mine.toml").write_text(text)
    mine = load_run(Path("mine.toml"), RLConfig)
    assert mine == load_run(CONFIGS / f"{name}.toml", RLConfig)
    assert len(recwarn) == 0


def test_a_shown_environment_is_the_packaged_one() -> None:
    assert show_environment("skills") == (ENVIRONMENTS / "skills.toml").read_text()


def test_those_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, info = tmp_path / "site/mine", tmp_path / "site/mine-3.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 3\n")
    (info / "entry_points.txt").write_text(
        '[nmoe.configs]\nlong = mine:long.toml\nbinary = mine:binary.toml\nlost = mine:lost.toml\n'
        "[nmoe.environments]\nnear = mine:near.toml\nown = mine:own.toml\n"
    )  # fmt: skip
    (package / "near.toml").write_text('env_id = "near"\n')
    pool = '[task_pool]\ntype = "jsonl"\npath = "problems.jsonl"\ntask_type = "code_edit"\n'
    (package / "own.toml").write_text(f'env_id = "own"\n{pool}')
    (package / "problems.jsonl").touch()
    (package / "unnamed.toml").write_text('env_id = "unnamed"\n')
    run = '# Learns it all. Slowly.\n#   nmoe rl train long\n[environment]\npath = "{}"\n'
    (package / "long.toml").write_text(run.format("near.toml"))
    (package / "binary.toml").write_bytes(b"\xff")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    invalidate_caches()
    rows = [" ".join(row.split()) for row in list_configurations() if "mine 3" in row]
    assert rows[0].startswith(f"binary - mine 3 cannot be used: {package}/binary.toml: cannot be read: ")
    assert rows[1] == "long nmoe rl train long mine 3 Learns it all"
    assert rows[2].startswith(
        "lost - mine 3 cannot be used: the entry point 'mine:lost.toml' leads to no configuration"
    )
    assert tomllib.loads(show_environment("own"))["task_pool"]["path"] == f"{package}/problems.jsonl"
    assert tomllib.loads(show_configuration("long"))["environment"] == {"path": "near"}
    (package / "long.toml").write_text(run.format("unnamed.toml"))
    assert tomllib.loads(show_configuration("long"))["environment"] == {"path": f"{package}/unnamed.toml"}


def test_only_what_is_packaged_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('env_id = "mine"\n')
    with pytest.raises(
        UserError, match=r"^there is no packaged environment 'mine\.toml' \(`nmoe env list` shows them\)$"
    ):
        show_environment("mine.toml")
    with pytest.raises(
        UserError, match=r"^there is no packaged configuration 'sort_grop' \(.*\); did you mean 'sort_grpo'\?$"
    ):
        show_configuration("sort_grop")


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
