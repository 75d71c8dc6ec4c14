"""The documentation: files and links exist, tutorials' files load, and blocks of code of the guides run as printed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_environment, load_run
from nmoe.envs.check import check_environment
from nmoe.envs.environment import Environment
from nmoe.statistics import binomial_interval
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
# Entries of the log keep the names of their day.
CURRENT = [page for page in PAGES if page.name not in ("decisions.md", "CHANGELOG.md")]


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    roots = "nmoe|tests|benchmarks|scripts|examples"
    named = set(re.findall(rf"`((?:{roots})/[\w./-]+\.\w+)`", page.read_text()))
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_without_their_folder_exist(page: Path) -> None:
    files = {
        path.name
        for folder in ("nmoe", "tests", "benchmarks", "scripts", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    files.add("conf.py")  # a solution's, in the guide to sandboxes
    assert sorted(set(re.findall(r"`(\w+\.py)`", page.read_text())) - files) == []


def test_pages_that_the_code_names_exist() -> None:
    files = [path for folder in ("nmoe", "scripts", ".ci") for path in (ROOT / folder).rglob("*")]
    named = {
        (page, path.name)
        for path in files
        if path.is_file() and path.suffix in (".py", ".toml", ".sh", "")
        # Those of github.com/openai/harmony, which has a docs/ of its own.
        for page in re.findall(r"docs/[a-z_/]+\.md", path.read_text().replace("(docs/format.md", ""))
    }
    assert len(named) > 10
    assert [(page, where) for page, where in named if not (ROOT / page).exists()] == []


def test_what_the_pages_import_exists() -> None:
    found = 0
    for page in CURRENT:
        text = page.read_text()
        pairs = re.findall(r"^ *from (nmoe[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
        pairs += re.findall(r"`(nmoe(?:\.[a-z_0-9]+)+)[.:]([A-Z]\w+)", text)
        for module, names in pairs:
            # They need SkyRL, lm-eval, inspect-ai and verifiers, which are not installed; tests/grading/adapters, tests/eval and
            # tests/adapters test them.
            if module.endswith(("skyrl", "lm_eval_model", "inspect_model", "verifiers_v0", "verifiers_v1")):
                continue
            for name in names.split(", "):
                assert hasattr(importlib.import_module(module), name), f"{page.name}: {module}.{name}"
                found += 1
    assert found > 8


def test_links_of_the_pages_outside_the_book_lead_somewhere() -> None:
    """`mkdocs build --strict` checks those inside it."""
    for page in ROOT.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_files_of_the_tutorials_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = []
    for page in sorted((ROOT / "docs/tutorials").glob("*.md")):
        for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            if first := re.match(r"# (\w+\.toml)\n", block):
                Path(first[1]).write_text(block)
                loaded.append(first[1])
            elif first := re.match(r"# appended to (\w+\.toml)\n", block):
                with Path(first[1]).open("a") as file:
                    file.write(block)
    assert len(loaded) == 5
    for name in loaded:
        if "[run]" in Path(name).read_text():
            assert load_run(Path(name), RLConfig).run.steps > 0
        else:
            assert load_environment(Path(name)).env_id == name.removesuffix(".toml")


def test_the_messages_of_the_page_of_errors_are_those_of_the_code() -> None:
    # Adjacent literals are one text.
    code = "\n".join(path.read_text() for path in (ROOT / "nmoe").rglob("*.py"))
    messages = re.sub(r'"\s*\n\s*f?"', "", code)
    quoted = re.findall(r"^\| `(.+?)` \| ", (ROOT / "docs/guides/errors.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 20
    assert [text for text in quoted if text not in messages] == []


# documented: nmoe env check parts.toml
def test_the_environment_made_of_parts_passes_its_check(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```toml\n(.*?)^```$",
        (ROOT / "docs/guides/environment_parts.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (tmp_path / "parts.toml").write_text(block)
    lines = list(check_environment(tmp_path / "parts.toml", None))
    assert any("right answer" in line and "correctness 1," in line for line in lines)
    assert any("wrong answer" in line and "correctness 0," in line for line in lines)


GUIDES = Path(__file__).parents[2] / "docs/guides"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_guide_to_the_library_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "library_guide"}
    parts = blocks((GUIDES / "library.md").read_text(), "python")
    assert len(parts) == 9
    for part in parts:
        exec(compile(part, "library.md", "exec"), names)
    assert "did you mean 'learning_rate'" in capsys.readouterr().out
    assert len(names["answers"]) == 4, "samples of a loaded model"
    assert set(map(len, names["lengths"])) == {4}, "one request for each group"
    assert [run.name for run in sorted((tmp_path / "runs").iterdir())][:2] == ["Boxes", "Greater"]


def test_the_reference_figures_of_gpt_oss_have_their_intervals_and_an_environment(tmp_path: Path) -> None:
    page = (GUIDES / "gpt_oss.md").read_text()
    rows = re.findall(r"\| (\d+), ([\d.]+)% \| .* \| ([\d.]+)% to ([\d.]+)% \|$", page, re.MULTILINE)
    for right, *percents in rows:
        interval = binomial_interval(int(right), 18)
        assert [f"{100 * value:.1f}" for value in (int(right) / 18, interval.low, interval.high)] == percents
    assert [row[0] for row in rows] == ["5", "9", "8"]
    (block,) = blocks(page, "toml")
    (tmp_path / "aime_18.toml").write_text(block)
    found = load_environment(tmp_path / "aime_18.toml")
    asked = load_run(Path("gpt_oss_20b"), RLConfig).eval[2].environment
    assert asked is not None
    assert (found.extraction, found.reasoning_effort) == (asked.extraction, asked.reasoning_effort)
    assert found.system == asked.system_by_format.harmony


def test_the_live_environment_is_opened_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (GUIDES / "environments.md").read_text().partition("## Live environments")[2]
    Path("countdown.py").write_text(blocks(page, "python")[0])
    Path("countdown.toml").write_text(blocks(page, "toml")[0])
    report = "\n".join(check_environment(Path("countdown.toml"), None))
    assert "opened with the seed 0, it asks 'Count down from 5.'" in report
    assert report.endswith("ok")


def test_the_environment_of_skyrl_gym_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "ecosystem.md").read_text().partition("## skyrl-gym")[2]
    Path("train.jsonl").write_text(blocks(page, "json")[0].replace("\n", " "))
    Path("gym.toml").write_text(blocks(page, "toml")[0])
    settings = load_environment(Path("gym.toml"))
    environment = Environment.from_settings(settings, Tokenizer.train((), SMALLEST_VOCABULARY))
    assert environment.pool.order.at(0).question == "Ann has 3 boxes of 6 eggs. How many eggs?"


def test_the_environment_of_programs_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "ecosystem.md").read_text().partition("## Agents as programs")[2]
    Path("train.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    Path("agent.toml").write_text(blocks(page, "toml")[0])
    environment = Environment.from_settings(
        load_environment(Path("agent.toml")), Tokenizer.train((), SMALLEST_VOCABULARY)
    )
    assert environment.command == ("python", "agent.py")


def test_a_task_of_ones_own_is_named_in_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (GUIDES / "environments.md").read_text().partition("## Tasks of your own")[2]
    Path("my_tasks.py").write_text(blocks(page, "python")[0])
    Path("shout.toml").write_text(blocks(page, "toml")[0])
    environment = Environment.from_settings(
        load_environment(Path("shout.toml")), Tokenizer.train((), SMALLEST_VOCABULARY)
    )
    questions = {problem.question for problem in environment.pool.take(2)}
    assert questions == {f"Write {word} in capital letters." for word in ("expert", "router")}
