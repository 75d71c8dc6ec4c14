"""Environments and configurations by path, directory and name: what is found, without an import, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load, load_environment, load_run
from nmoe.config.packaged import (
    CONFIGS,
    ENVIRONMENTS,
    Packaged,
    find_configuration,
    find_environment,
    packaged_configurations,
    packaged_environments,
)
from nmoe.config.problems import ConfigError
from nmoe.config.tables.pools import MixturePool
from nmoe.errors import UserError

Install = Callable[..., Path]

ENVIRONMENT = 'env_id = "{}"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\n'


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package that would raise if it were imported, with its files and entry points."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(package: str, files: dict[str, str], entries: dict[str, str], group: str = "environments") -> Path:
        for name, text in {"__init__.py": "raise SystemExit('imported')", **files}.items():
            path = site / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        info = site / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[nmoe.{group}]", *lines]) + "\n")
        invalidate_caches()
        return site / package

    yield install
    assert "mine" not in sys.modules


def by_name(name: str) -> list[Packaged]:
    return [one for one in packaged_environments() if one.name == name]


def test_the_environments_that_nmoe_ships() -> None:
    assert find_environment("skills") == ENVIRONMENTS / "skills.toml"
    assert by_name("skills") == [Packaged("skills", "nmoe", ENVIRONMENTS / "skills.toml")]
    assert {one.name for one in packaged_environments() if one.package == "nmoe"} == {
        path.stem for path in ENVIRONMENTS.glob("*.toml")
    }
    assert load_environment(Path("skills")).env_id == "skills"


def test_entry_points_lead_to_files_without_an_import(install: Install) -> None:
    text = ENVIRONMENT.format("x")
    files = {"environment.toml": text, "sub/deep/environment.toml": text, "sub/digits.toml": text}
    entries = {
        "whole": "mine",
        "deep": "mine.sub.deep",
        "attribute": "mine:sub.deep",
        "file": "mine.sub:digits.toml",
        "no-file": "mine.sub:other.toml",
        "no-directory": "mine.nowhere",
        "no-package": "absent_package.x",
        "strange": "mine/sub",
    }
    package = install("mine", files, entries)
    found = {one.name: one for one in packaged_environments() if one.package == "mine 1.2"}
    assert {name: one.path for name, one in found.items()} == {
        "whole": package / "environment.toml",
        "deep": package / "sub/deep/environment.toml",
        "attribute": package / "sub/deep/environment.toml",
        "file": package / "sub/digits.toml",
        **dict.fromkeys(["no-file", "no-directory", "no-package", "strange"]),
    }
    assert {name: one.problem for name, one in found.items() if one.problem is not None} == {
        "no-file": f"the entry point 'mine.sub:other.toml' leads to no environment: there is no {package}/sub/other.toml",
        "no-directory": f"the entry point 'mine.nowhere' leads to no environment: there is no {package}/nowhere/environment.toml",
        "no-package": "the entry point 'absent_package.x' names the package 'absent_package', which is not there",
        "strange": "the entry point 'mine/sub' names nothing in a package; write package.directory or package:file.toml",
    }
    assert find_environment("file") == package / "sub/digits.toml"
    with pytest.raises(
        UserError, match=r"^environment 'no-directory' of the package mine 1\.2: the entry point 'mine\.now"
    ):
        find_environment("no-directory")


def test_what_a_name_means(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("mine", {"environment.toml": ENVIRONMENT.format("packaged")}, {"countdown": "mine"})
    with pytest.raises(UserError, match=r"^countdwn: no such file or directory, .* did you mean 'countdown'\?"):
        find_environment("countdwn")
    install("other", {"environment.toml": ENVIRONMENT.format("other")}, {"countdown": "other"})
    with pytest.raises(UserError, match=r"several packages offer .* 'countdown': mine 1\.2, other 1\.2; give the path"):
        find_environment("countdown")
    # What lies there comes before what is installed.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "countdown").mkdir()
    (tmp_path / "countdown/environment.toml").write_text(ENVIRONMENT.format("here"))
    assert load_environment(Path("countdown")).env_id == "here"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^empty/environment\.toml: no such file$"):
        load_environment(Path("empty"))
    with pytest.raises(ConfigError, match=r"^nowhere/at/all: no such file$"):
        load_environment(Path("nowhere/at/all"))


def test_a_configurations_name(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUN.format("sort")
    package = install("mine", {"runs/own.toml": run}, {"own": "mine.runs:own.toml", "lost": "mine.lost"}, "configs")
    monkeypatch.chdir(tmp_path)
    assert {one.name for one in packaged_configurations() if one.package == "nmoe"} == {
        path.stem for path in CONFIGS.glob("*.toml")
    }
    problem = f"the entry point 'mine.lost' leads to no configuration: there is no {package}/lost/config.toml"
    assert [one for one in packaged_configurations() if one.package != "nmoe"] == [
        Packaged("lost", "mine 1.2", None, problem),
        Packaged("own", "mine 1.2", package / "runs/own.toml"),
    ]
    assert find_configuration("own") == package / "runs/own.toml"
    # In the wrong folder a file's name must not train the packaged configuration.
    for missing in ("sort_grpo.toml", "configs/sort_grpo.toml", "nowhere/sort_grpo"):
        with pytest.raises(UserError) as refused:
            load_run(Path(missing), RLConfig)
        assert str(refused.value) == (
            f"{missing}: no such file; the packaged configuration of that name is written 'sort_grpo'"
        )
    with pytest.raises(UserError, match=r"^https://example\.com/x\.toml: a URL, not a file; fetch the configuration"):
        load_run(Path("https://example.com/x.toml"), RLConfig)
    loaded = load_run(Path("sort_grpo"), RLConfig)
    assert (loaded.run.name, loaded.run.steps, loaded.environment.env_id) == ("sort_grpo", 100, "sort")
    # A folder of the name does not hide it, a file does.
    (tmp_path / "sort_grpo").mkdir()
    assert find_configuration("sort_grpo") == CONFIGS / "sort_grpo.toml"
    (tmp_path / "sort_grpo.toml").write_text(run)
    assert find_configuration("sort_grpo.toml") == Path("sort_grpo.toml")
    assert load_run(Path("sort_grpo.toml"), RLConfig).run.steps == 2
    for wrong in ("sort_grop", "sort_grop.toml"):
        with pytest.raises(UserError, match=rf"^{wrong}: no such file.* did you mean 'sort_grpo'\?"):
            load_run(Path(wrong), RLConfig)
    with pytest.raises(
        UserError, match=r"^skills: .* packaged configuration of that name .*; there is a packaged environment of that"
    ):
        load_run(Path("skills"), RLConfig)
    with pytest.raises(
        UserError, match=r"^sort_ppo: .* packaged environment of that name .*; there is a packaged configuration of"
    ):
        find_environment("sort_ppo")
    with pytest.raises(ConfigError, match=r"^wholly-else\.toml: no such file$"):
        load_run(Path("wholly-else.toml"), RLConfig)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"^folder: is a directory, not a TOML file$"):
        load_run(Path("folder"), RLConfig)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("skills.toml", "skills"),
        ("../environments/skills.toml", "skills"),
        ("clone/skills", "skills"),
        ("environments/skills/environment.toml", "skills"),
        ("environments/mine.toml", None),
    ],
)
def test_a_path_is_never_a_packaged_environment(path: str, name: str | None, tmp_path: Path) -> None:
    if name is None:
        assert find_environment(path, tmp_path) == tmp_path / path
        return
    with pytest.raises(UserError) as refused:
        find_environment(path, tmp_path)
    assert str(refused.value) == (
        f"{tmp_path / path}: no such file; the packaged environment of that name is written {name!r}"
    )
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    assert find_environment(path, tmp_path) == tmp_path / path


RUN = '[run]\nsteps = 2\n[model]\npath = "base"\n[environment]\npath = "{}"\n'


def test_a_run_names_one_by_file_directory_or_name(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("mine", {"environment.toml": ENVIRONMENT.format("packaged")}, {"countdown": "mine"})
    (tmp_path / "configs/own").mkdir(parents=True)
    (tmp_path / "configs/own/environment.toml").write_text(ENVIRONMENT.format("directory"))
    (tmp_path / "configs/file.toml").write_text(ENVIRONMENT.format("file"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "configs/run.toml"
    for named, env_id in [("own", "directory"), ("file.toml", "file"), ("countdown", "packaged"), ("skills", "skills")]:
        path.write_text(RUN.format(named))
        assert load_run(path, RLConfig).environment.env_id == env_id
    assert load_run(path, RLConfig, ["--environment.path=configs/own"]).environment.env_id == "directory"
    path.write_text(RUN.format("countdwn"))
    with pytest.raises(ConfigError) as error:
        load_run(path, RLConfig)
    (problem,) = error.value.problems
    assert str(problem) == (
        f"{path}:6: {tmp_path}/configs/countdwn: no such file or directory, nor is there a packaged environment of that name "
        "(`nmoe env list` shows them); did you mean 'countdown'?"
    )


POOLS = """
env_id = "e"
[task_pool]
type = "mixture"
[[task_pool.sources]]
name = "lines"
weight = 1
type = "jsonl"
path = "data/lines.jsonl"
task_type = "sort"
[[task_pool.sources]]
name = "columns"
weight = 1
type = "parquet"
path = "/far/columns.parquet"
task_type = "sort"
[[task_pool.sources]]
name = "there"
weight = 1
type = "hf"
dataset = "data/kept"
task_type = "sort"
[[task_pool.sources]]
name = "hub"
weight = 1
type = "hf"
dataset = "openai/gsm8k"
task_type = "gsm8k"
"""


def paths(settings: EnvironmentSettings) -> list[str]:
    assert isinstance(settings.task_pool, MixturePool)
    return [getattr(source, "path", None) or getattr(source, "dataset", "") for source in settings.task_pool.sources]


def test_data_paths_start_from_the_environments_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/data/kept").mkdir(parents=True)
    (tmp_path / "own/environment.toml").write_text(POOLS)
    moved = ["own/data/lines.jsonl", "/far/columns.parquet", "own/data/kept", "openai/gsm8k"]
    assert paths(load_environment(Path("own"))) == moved
    assert paths(load(Path("own/environment.toml"), EnvironmentSettings)) == moved
    run = tmp_path / "own/run.toml"
    run.write_text(RUN.format("environment.toml"))
    from_run = load_run(Path("own/run.toml"), RLConfig)
    assert paths(from_run.environment) == moved
    # An override is written where the command runs.
    (tmp_path / "lone.toml").write_text(
        'env_id = "e"\n[task_pool]\ntype = "jsonl"\npath = "a.jsonl"\ntask_type = "sort"\n'
    )
    override = "--environment.task_pool.path=b.jsonl"
    assert load_run(run, RLConfig, ["--environment.path=lone.toml", override]).environment.task_pool.path == "b.jsonl"
    # In a run's own table paths start where the command runs, as all of a run's do.
    inline = RUN.partition("[environment]")[0] + POOLS.replace("env_id", "[environment]\nenv_id", 1).replace(
        "task_pool", "environment.task_pool"
    )
    run.write_text(inline)
    assert paths(load_run(run, RLConfig).environment)[0] == "data/lines.jsonl"
    monkeypatch.chdir(tmp_path / "own")
    assert paths(load_environment(Path("environment.toml"))) == [
        "data/lines.jsonl", "/far/columns.parquet", "data/kept", "openai/gsm8k",
    ]  # fmt: skip
