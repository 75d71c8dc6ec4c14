"""The mistakes that scripts/mutants.py plants, and how it finds the place of one where code has moved."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from mutants import Mutation, functions, indexed, mutations, nearest_tests, place, planted, summary

SOURCE = '''
def shares(values: list[int]) -> list[float]:
    """Of the sum."""
    total = sum(values) + 1
    if total < 2:
        raise ValueError("nothing")
    return [value / total for value in values]

class Counter:
    def add(self, quiet: bool = False) -> None:
        self.count += 3
        self.count += 3
'''


def mistakes(source: str) -> set[tuple[str, str]]:
    found = (each for name, function in functions(ast.parse(source)) for each in mutations(name, function))
    return {(each.unit, each.mistake) for each in found}


def test_every_kind_of_mistake() -> None:
    assert mistakes(SOURCE) == {
        ("total = sum(values) + 1", "total = sum(values) - 1"),
        ("total = sum(values) + 1", "total = sum(values) + 2"),
        ("total < 2", "not (total < 2)"),
        ("total < 2", "total <= 2"),
        ("total < 2", "total < 3"),
        ("raise ValueError('nothing')", "pass"),
        ("return [value / total for value in values]", "return [value * total for value in values]"),
        ("self.count += 3", "pass"),
        ("self.count += 3", "self.count -= 3"),
        ("self.count += 3", "self.count += 4"),
    }


@pytest.mark.parametrize(("occurrence", "expected"), [(0, 7), (1, 7), (2, None)])
def test_a_mistake_is_planted_where_it_belongs(occurrence: int, expected: int | None) -> None:
    text = planted(SOURCE, "Counter.add", Mutation("Counter.add", "self.count += 3", occurrence, "self.count += 4"))
    if expected is None:
        assert text is None
        return
    assert text is not None
    lines = [line.strip() for line in text.splitlines() if "count" in line]
    assert lines == [f"self.count += {4 if place == occurrence else 3}" for place in range(2)]
    names: dict[str, type] = {}
    exec(text, names)
    counter = names["Counter"]()
    counter.count = 0
    counter.add()
    assert counter.count == expected


def test_a_condition_is_negated_in_place() -> None:
    text = planted(SOURCE, "shares", Mutation("shares", "total < 2", 0, "not (total < 2)"))
    assert text is not None
    assert "if not total < 2:" in text


def test_the_place_of_a_mistake_is_found_where_its_code_has_moved() -> None:
    mutation = Mutation("Pool.take", "free -= 1", 0, "free += 1")

    def found(**files: str) -> tuple[str, str] | None:
        return place(indexed({f"{name}.py": text for name, text in files.items()}), mutation, "old/blocks.py")

    method = "class {}:\n    def {}(self): free -= 1"
    assert found(a=method.format("Pool", "take")) == ("a.py", "Pool.take")
    other, same = method.format("Manager", "take"), method.format("Pool", "take")
    assert found(a=other, b=same) == ("b.py", "Pool.take")
    assert found(a=other, blocks=other) == ("blocks.py", "Manager.take")
    assert found(a=method.format("Pool", "claim")) == ("a.py", "Pool.claim")
    assert found(a=method.format("Pool", "claim"), b=method.format("Pool", "lose")) is None
    assert found(a="def take(): free -= 2") is None


def test_the_nearest_tests_come_first(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "engine"
    tests.mkdir(parents=True)
    (tests / "test_far.py").write_text("from nmoe.engine import core")
    (tests / "test_near.py").write_text("from nmoe.engine import blocks")
    (tests / "test_blocks.py").write_text("from nmoe.engine import blocks, core")
    (tmp_path / "tests" / "test_elsewhere.py").write_text("from nmoe.engine import blocks")
    files = [
        (Path("nmoe/engine/blocks.py"), "nmoe.engine.blocks", ""),
        (Path("nmoe/engine/core.py"), "nmoe.engine.core", "from nmoe.engine.blocks import Pool"),
        (Path("nmoe/engine/alone.py"), "nmoe.engine.alone", ""),
    ]
    assert nearest_tests(tmp_path, files) == {
        "nmoe/engine/blocks.py": ["tests/engine/test_blocks.py", "tests/engine/test_near.py"],
        "nmoe/engine/core.py": ["tests/engine/test_far.py", "tests/engine/test_blocks.py"],
        "nmoe/engine/alone.py": [],
    }


def test_only_mutants_that_every_commit_has_are_compared() -> None:
    ends = {"old": ["killed", "killed", "survived", "killed"], "new": ["killed", "gone", "survived", "survived"]}
    results = {commit: [{"end": end} for end in each] for commit, each in ends.items()}
    assert list(summary(results)) == ["old: 2 of 3 killed, 0 gone", "new: 1 of 3 killed, 1 gone"]
