"""Settings written as TOML come back equal."""

import tomllib

import pytest

from nmoe.config.base import Array, Section
from nmoe.config.toml import to_toml, toml_value


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
