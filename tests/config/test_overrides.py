"""Overrides, and values as TOML."""

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.base import Array, Section
from nmoe.config.locate import locate
from nmoe.config.overrides import joined, lay_over, malformed, override_document, read_override, read_value
from nmoe.config.toml import to_toml, toml_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-6", 1e-6),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("2024-01-31", datetime.date(2024, 1, 31)),
        ('"7"', "7"),
        ("grpo", "grpo"),
        ("runs/a b", "runs/a b"),
        ("", ""),
        ("1 # no comment", "1 # no comment"),
        ("1, b = 2", "1, b = 2"),
        ("1}\nc = {d = 2", "1}\nc = {d = 2"),
        ("a=b", "a=b"),
        ("[" * 5000, "[" * 5000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_a_value_is_toml_or_else_a_string(text: str, value: Any) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


@given(
    st.recursive(
        st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda items: st.lists(items) | st.dictionaries(st.text(), items),
        max_leaves=8,
    )
)
def test_any_value_written_as_toml_is_read_back(value: Any) -> None:
    assert read_value(toml_value(value)) == value


def test_only_dashes_dots_and_an_equals_sign_make_an_override() -> None:
    assert read_override("--a.b-c.d=x=y") == (("a", "b-c", "d"), "x=y")
    assert read_override("--a=1") == (("a",), 1)
    bad = ["a.b=1", "-a.b=1", "--a.b", "--.b=1", "--a..b=1", "--=1", "7", ""]
    assert malformed([*bad, "--a.b="]) == bad


def test_overrides_replace_values_and_join_tables() -> None:
    text = "[a]\nx = 1\nl = [1, 2]\n[a.t]\ny = 2\n"
    data = {"a": {"x": 1, "l": [1, 2], "t": {"y": 2}}}
    where = locate(text, Path("f.toml"))
    for override in ("--a.l=[3]", "--a.t={z = 3}", "--n.m=4", "--a.l=[5]"):
        path_and_value = read_override(override)
        assert path_and_value is not None
        lay_over(data, where, *override_document(*path_and_value, override))
    assert data == {"a": {"x": 1, "l": [5], "t": {"y": 2, "z": 3}}, "n": {"m": 4}}
    places = {
        ("a", "x"): "f.toml:2",
        ("a", "l"): "--a.l=[5]",
        ("a", "l", 0): "--a.l=[5]",
        ("a", "t"): "f.toml:4",
        ("a", "t", "y"): "f.toml:5",
        ("a", "t", "z"): "--a.t={z = 3}",
        ("n", "m"): "--n.m=4",
        ("n",): "f.toml",
    }
    assert {path: str(where.place(path)) for path in places} == places


def test_a_value_may_follow_its_key() -> None:
    given = ["x.toml", "--run.seed", "3", "--a.b=1", "--optimizer.eps", "-1e-8", "--run.resume", "--mode", "step"]
    assert joined(given) == [
        "x.toml",
        "--run.seed=3",
        "--a.b=1",
        "--optimizer.eps=-1e-8",
        "--run.resume",
        "--mode",
        "step",
    ]
    assert joined(["--run.name", "a b", "--c.d"]) == ["--run.name=a b", "--c.d"]


class Leaf(Section):
    name: str
    weight: float = 1.0
    note: str | None = None


class Tree(Section):
    text: str = 'a "quoted" \\ line\nand \x7f \x00 é 🙂'
    rate: float = 1e-6
    big: float = 1e22
    on: bool = True
    pair: Array[int] = (1, 2)
    none: Array[Leaf] = ()
    leaf: Leaf = Leaf(name="a")
    leaves: Array[Leaf] = (Leaf(name="b", note="n"), Leaf(name="c"))
    count: int = 3


def test_the_text_of_a_small_tree() -> None:
    assert to_toml(Leaf(name="b", note="n")) == 'name = "b"\nweight = 1.0\nnote = "n"\n'
    assert to_toml(Tree(text="t")) == (
        'text = "t"\nrate = 1e-06\nbig = 1e+22\non = true\npair = [\n    1,\n    2,\n]\nnone = []\n'
        'leaves = [\n    { name = "b", weight = 1.0, note = "n" },\n    { name = "c", weight = 1.0 },\n]\ncount = 3\n'
        '\n[leaf]\nname = "a"\nweight = 1.0\n'
    )


def test_a_tree_reloads_to_an_equal_one() -> None:
    tree = Tree()
    assert Tree.model_validate(tomllib.loads(to_toml(tree))) == tree


def test_a_settings_object_of_tables_alone_starts_without_a_blank_line() -> None:
    class Root(Section):
        leaf: Leaf

    assert to_toml(Root(leaf=Leaf(name="a"))) == '[leaf]\nname = "a"\nweight = 1.0\n'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        ("a\tb", '"a\tb"'),
        ([1.5, "x"], '[1.5, "x"]'),
        ({"a b": 1, "c": []}, '{"a b" = 1, c = []}'),
        *((1e-6, "1e-6"), (2.5e-10, "2.5e-10"), (1e22, "1e22"), (0.0003, "0.0003"), (1_900_000_000, "1900000000")),
    ],
)
def test_values(value: object, text: str) -> None:
    assert toml_value(value) == text
