"""Gold answers are graded once when a run starts: those that fail are named, those that passed are remembered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import nmoe.envs.golds as golds_module
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.envs.environment import Environment
from nmoe.envs.golds import SAMPLE, Passed, check_golds
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tools.builtin import sandbox_limits
from nmoe.errors import InfrastructureError, UserError
from nmoe.sandbox.api import SandboxSetupError
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Problem, Verdict


@pytest.fixture(autouse=True)
def golds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMOE_GOLDS", str(tmp_path / "golds"))
    return tmp_path / "golds"


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The golds that a grader was asked about, which calls "wrong" wrong and loses "lost"."""
    asked: list[str] = []

    async def verify(problem: Problem, attempt: Attempt) -> Verdict:
        asked.append(attempt.answer)
        if "lost" in attempt.answer:
            return Verdict("error", 0.0, "tests", "the sandbox was lost")
        return Verdict.of("wrong" not in attempt.answer, "exact", "as scripted")

    monkeypatch.setattr(TASKS["file_search"], "verify", verify)
    return asked


def environment(tmp_path: Path, tokenizer: Tokenizer, answers: list[str], **keys: Any) -> Environment:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"question": "Which?", "answer": answer}) + "\n" for answer in answers))
    pool = {"type": "jsonl", "path": str(path), "task_type": "file_search", **keys}
    settings = parse({"env_id": "e", "task_pool": pool}, EnvironmentSettings, Locator(Place("test")))
    return Environment.from_settings(settings, tokenizer)


def test_every_gold_is_graded_once_and_remembered_by_its_content(
    tmp_path: Path, tokenizer: Tokenizer, graded: list[str]
) -> None:
    check_golds(environment(tmp_path, tokenizer, ["a", "b", "c"]), None, print)
    assert sorted(graded) == ["a", "b", "c"]
    # Another pool, in which one of them is new.
    check_golds(environment(tmp_path, tokenizer, ["d", "c", "b"]), None, print)
    assert sorted(graded) == ["a", "b", "c", "d"]


def test_what_decides_a_verdict_is_part_of_what_is_remembered(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sympy, another Python, and for code another sandbox: the golds are graded again."""
    text, code = (Problem("p", kind, "?", "1", "p", {"record": 0}) for kind in ("math", "mbpp"))
    key = golds_module._key
    before = key(text, ""), key(code, "landlock")
    assert (key(text, ""), key(code, "landlock")) == before
    assert key(text, "bubblewrap") == before[0]
    assert key(code, "bubblewrap") != before[1]
    for module, name, value in [
        (sys, "version", "3.99"),
        (golds_module, "version", lambda name: "99" if name == "sympy" else "1"),
        (golds_module, "_PACKAGES", golds_module._PACKAGES[:-1]),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            golds_module._graders.cache_clear()
            assert key(text, "") != before[0]
    golds_module._graders.cache_clear()
    assert golds_module._PACKAGES[-1].__name__ == "nmoe.sandbox"


def test_those_that_fail_are_named_and_graded_again_the_next_time(
    tmp_path: Path, tokenizer: Tokenizer, graded: list[str]
) -> None:
    demo = environment(tmp_path, tokenizer, ["a", "wrong 1", "b", "wrong 2"])
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            check_golds(demo, None, print)
        assert str(caught.value) == (
            '2 of 4 gold answers are not graded correct; correct or drop their records, or set check_gold = "off" to train on '
            "them as they are:\ne/1 (record 1, from 0): as scripted\ne/3 (record 3, from 0): as scripted"
        )
    # Twice each time, for a late program may be in time alone.
    assert [graded.count(gold) for gold in ("a", "b", "wrong 1", "wrong 2")] == [1, 1, 4, 4]


def test_a_lost_grader_is_no_wrong_gold(tmp_path: Path, tokenizer: Tokenizer, graded: list[str]) -> None:
    with pytest.raises(InfrastructureError, match="the gold answer of e/1 could not be graded: the sandbox was lost"):
        check_golds(environment(tmp_path, tokenizer, ["a", "lost"]), None, print)


def test_a_sample_or_none(tmp_path: Path, tokenizer: Tokenizer, graded: list[str]) -> None:
    answers = [f"answer {n}" for n in range(3 * SAMPLE)]
    check_golds(environment(tmp_path, tokenizer, answers, check_gold="off"), None, print)
    assert graded == []
    check_golds(environment(tmp_path, tokenizer, answers, check_gold="sample"), None, print)
    assert len(graded) == len(set(graded)) == SAMPLE
    # The same ones whenever: nothing is left to grade.
    check_golds(environment(tmp_path, tokenizer, answers, check_gold="sample"), None, print)
    assert len(graded) == SAMPLE
    check_golds(environment(tmp_path, tokenizer, answers), None, print)
    assert sorted(graded) == sorted(answers)


def test_golds_of_every_source_of_a_mixture(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """By the graders that there are: a fraction that is not in the answer's form is graded, a generated source has no record."""
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "Half of it?", "answer": r"\frac12"}) + "\n")
    sources = [
        {"type": "generated", "task_type": "sort", "name": "sort", "weight": 1.0},
        {"type": "jsonl", "path": str(path), "task_type": "math", "name": "math", "weight": 1.0},
    ]
    pool = {"type": "mixture", "sources": sources}
    settings = parse({"env_id": "e", "task_pool": pool}, EnvironmentSettings, Locator(Place("test")))
    check_golds(Environment.from_settings(settings, tokenizer), None, print)
    assert len((tmp_path / "golds" / "math.txt").read_text().split()) == 1


HUMANEVAL = Path(__file__).parents[3] / "shared/eval_data/human_eval.jsonl"


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="the copy of HumanEval beside the repository is not there")
def test_canonical_solutions_of_humaneval_pass(tokenizer: Tokenizer) -> None:
    """The first 16 of them; `nmoe env check` goes through all 164 (docs/guides/environments.md)."""
    pool = {"type": "jsonl", "path": str(HUMANEVAL), "task_type": "humaneval", "max_examples": 16}
    settings = parse({"env_id": "e", "task_pool": pool}, EnvironmentSettings, Locator(Place("test")))
    demo = Environment.from_settings(settings, tokenizer)
    try:
        sandboxes = Sandboxes(SandboxSettings(level="landlock", warm=0), sandbox_limits(demo.budget))
    except SandboxSetupError as error:
        pytest.skip(f"the landlock level cannot be had here: {error}")
    check_golds(demo, sandboxes, print)
    passed = Passed(sandboxes)
    assert all(passed.has(demo.pool.order.at(position)) for position in range(16))
