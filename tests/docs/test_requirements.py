"""The page of requirements: its numbers are complete, its evidence exists, and it is what its file generates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from requirements_page import PAGE, faults, has_command, has_page, has_test, page, read, settings, slug

Change = Callable[[list[dict[str, Any]]], object]


def test_all_evidence_is_there_and_no_number_is_missing() -> None:
    assert list(faults(read())) == []


# documented: python scripts/requirements_page.py
def test_the_page_is_what_its_file_generates() -> None:
    assert PAGE.read_text() == page(read()), "run: python scripts/requirements_page.py"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines.pop(0), ["1: missing"]),
        (lambda lines: lines.append(lines[1]), ["2: 2 times"]),
        (lambda lines: lines[0].update(number=255), ["1: missing", "255: no line of the documents"]),
        (lambda lines: lines[0].update(state="nearly"), ["1: state 'nearly' is none of done, open, blocked, refused"]),
        (lambda lines: lines[0].update(source="rumour"), ["1: no document 'rumour'"]),
        (lambda lines: lines[0].update(tests=[], commands=[], files=[]), ["1: done without evidence"]),
        (lambda lines: lines[0].update(state="open", note=""), ["1: open without a reason"]),
        (lambda lines: lines[0].update(evidence=[]), ["1: unknown keys ['evidence']"]),
        (
            lambda lines: lines[0].update(
                tests=["tests/rl/test_ppo.py::test_gone"],
                commands=["nmoe rl train gone"],
                settings=["algorithm.gone"],
                files=["nmoe/gone.py"],
                pages=["gone.md"],
            ),
            [
                "1: test 'tests/rl/test_ppo.py::test_gone' is gone",
                "1: command 'nmoe rl train gone' is gone",
                "1: setting 'algorithm.gone' is gone",
                "1: file 'nmoe/gone.py' is gone",
                "1: page 'gone.md' is gone",
            ],
        ),
    ],
)
def test_each_fault_is_named(change: Change, expected: list[str]) -> None:
    content = deepcopy(read())
    change(content["topics"][0]["lines"])
    assert list(faults(content)) == expected


@pytest.mark.parametrize(
    ("command", "there"),
    [
        ("nmoe rl train sort_grpo --run.steps=3", True),
        ("nmoe rl train sort_grpo --run.stepps=3", False),
        ("nmoe rl", False),
        ("nmoe eval runs/speedrun/base skills --format-check", True),
        ("nmoe eval RUN --form-check", False),
        ("nmoe gone", False),
        ("python -m nmoe.rl verifier verifier --prm_source=prm800k", True),
        ("torchrun --nproc_per_node=8 -m nmoe.rl tests-dist", True),
        ("torchrun --nproc_per_node=8 -m nmoe.rl gone", False),
        ("./speedrun.sh --scratch", True),
        ("python scripts/gone.py", False),
    ],
)
def test_a_command_needs_its_verb_its_options_and_its_names(command: str, there: bool) -> None:
    assert has_command(command) == there


def test_tests_are_found_in_files_and_classes_alone() -> None:
    assert has_test("tests/docs/test_requirements.py::test_each_fault_is_named")
    assert has_test("tests/text/test_harmony.py::TestRoundTrip::test_content_forges_nothing")
    assert not has_test("tests/text/test_harmony.py::test_content_forges_nothing")
    assert not has_test("tests/docs/test_gone.py::test_each_fault_is_named")
    assert not has_test("tests/docs/test_requirements.py::has_test")


def test_settings_and_headings_are_the_references() -> None:
    assert {"algorithm.clip_low", "eval.drops", "task_pool.problem_field", "env_id"} <= settings()
    assert slug("4. Throughput and scale, on `GPUs`") == "4-throughput-and-scale-on-gpus"
    assert has_page("scale.md#missing")
    assert not has_page("scale.md#gone")
