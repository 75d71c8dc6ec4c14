"""Fenced blocks in an answer: found as Markdown has them, in time linear in the answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.envs.tasks.code_edit import _blocks, _changes
from nmoe.grading.code.extract import after, code_of, fenced_blocks

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
