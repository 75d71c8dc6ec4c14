"""Reading an answer: text matches, fenced blocks, and the list of failures."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.tables.pools import CsvPool, JsonlPool
from nmoe.envs.pools import build_pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.code_edit import _blocks, _changes
from nmoe.errors import UserError
from nmoe.grading.code.extract import after, code_of, fenced_blocks
from nmoe.types import FAILURES, INFRASTRUCTURE, Problem


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("Paris", "paris.", True),
        ("New York", " new\n york ", True),
        ("New York", "newyork", False),
        ("Paris", "It is Paris", False),
        ("1/2", "0.5", False),
        ("ﬁve", "FIVE", True),
        ("U.S.", "u.s", True),
        ("", "", False),
    ],
)
def test_text_is_compared_as_text(gold: str, answer: str, right: bool) -> None:
    task, problem = TASKS["text_match"], Problem("p/0", "text_match", "?", gold, "p")
    if not gold:
        with pytest.raises(UserError, match="nothing is left of the gold answer ''"):
            task.check_gold(problem)
        return
    task.check_gold(problem)
    verdict = asyncio.run(task.verify(problem, Attempt(answer)))
    assert verdict.outcome == ("correct" if right else "incorrect")


def test_a_csv_is_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "capitals.csv"
    path.write_text('question,answer\n"Capital of France, in one word?",Paris\nCapital of Peru?,Lima\n')
    pool = build_pool("capitals", CsvPool(type="csv", path=str(path), task_type="text_match"))
    assert {(one.question, one.gold) for one in pool.take(2)} == {
        ("Capital of France, in one word?", "Paris"),
        ("Capital of Peru?", "Lima"),
    }


def test_a_csv_as_jsonl_is_called_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "capitals.csv"
    path.write_text("question,answer\nCapital of Peru?,Lima\n")
    with pytest.raises(UserError, match=r'capitals\.csv: a csv file, and jsonl is wanted here; write type = "csv"'):
        build_pool("capitals", JsonlPool(type="jsonl", path=str(path), task_type="text_match"))


def test_records_without_an_answer_are_told_of_open_problems(tmp_path: Path) -> None:
    path = tmp_path / "essays.jsonl"
    path.write_text('{"question": "Write about rain."}\n')
    with pytest.raises(
        UserError, match='set answer_field to one of them, or task_type = "open" where no answer is the'
    ):
        build_pool("essays", JsonlPool(type="jsonl", path=str(path), task_type="text_match"))


# The same by a regular expression, which takes quadratic time.
FENCE = re.compile(r"^(`{3,}|~{3,})[^\n`]*\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
LINES = ("```", "````", "```py", "``` x y", "a", "", "``", "```  ", "x```", "~~~", "~~~ z", "`", "```a`")


@given(st.lists(st.sampled_from(LINES), max_size=9).map("\n".join))
def test_blocks_are_those_of_markdown(text: str) -> None:
    blocks = list(fenced_blocks(text))
    assert [code for _, code in blocks] == [match[2] for match in FENCE.finditer(text)]
    assert code_of(text) == (blocks[-1][1] if blocks else text)


def test_infos_and_files() -> None:
    text = "I changed\n```python a/b.py\nx = 1\n```\nand\n~~~~ c.md\n```\nin it\n```\n~~~~\n```\nno name\n```\n``` d.py\nopen"
    assert [info for info, _ in fenced_blocks(text)] == ["python a/b.py", "c.md", ""]
    assert _changes(text) == {"a/b.py": b"x = 1\n", "c.md": b"```\nin it\n```\n"}


@given(
    st.dictionaries(st.sampled_from(["a.py", "b/c.md"]), st.lists(st.sampled_from(LINES), max_size=5).map("\n".join))
)
def test_an_answer_says_what_it_changes(files: dict[str, str]) -> None:
    wanted = {path: text.rstrip("\n") + "\n" for path, text in files.items()}
    assert _changes(_blocks(files)) == {path: text.encode() for path, text in wanted.items()}


@pytest.mark.parametrize("read", [code_of, _changes])
@pytest.mark.parametrize(
    "line", ["```python\n", "```" + "a" * 97 + "\n", "~~~\n```\n", "`" * 100 + "\n", "```x.py\n```\n"]
)
def test_twice_the_answer_takes_twice_the_time(read: Callable[[str], object], line: str) -> None:
    def seconds(size: int) -> float:
        text = line * (size // len(line))
        took = []
        for _ in range(3):
            began = time.process_time()
            read(text)
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(200_000) < 4 * seconds(100_000) + 0.02
    assert seconds(200_000) < 1.0


def test_code_with_future_imports_runs_after_a_start() -> None:
    program = after(
        "from math import sqrt\nx = 4", '"""Doc."""\nfrom __future__ import annotations\ny: Unknown = sqrt(x)'
    )
    found: dict[str, object] = {}
    exec(program, found)
    assert (found["x"], found["y"]) == (4, 2.0)


def test_the_names() -> None:
    names = (
        "ok parse_error truncated timeout budget_exceeded tool_error unknown_tool output_limit disk_full sandbox_denied "
        "sandbox_setup_failed workspace_failed command_not_found out_of_memory nonzero_exit grader_error engine_error "
        "environment_error internal_error"
    )
    assert tuple(names.split()) == FAILURES
    assert set(FAILURES) > INFRASTRUCTURE


def test_what_the_policy_caused_is_not_masked() -> None:
    assert not INFRASTRUCTURE & {"ok", "parse_error", "truncated", "timeout", "budget_exceeded", "nonzero_exit"}
