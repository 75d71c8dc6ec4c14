"""Lines of keys and items in TOML texts, against hand-counted lines and against markers in random documents."""

import tomllib
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.config.locate import KeyPath, Locator, Place, locate

FILE = Path("configs/x.toml")


def lines(text: str) -> dict[KeyPath, int | None]:
    tomllib.loads(text)  # the scanner promises nothing about other texts
    return {path: place.line for path, place in locate(text, FILE).places.items()}


def test_tables_pairs_and_dotted_keys() -> None:
    text = """# a comment = 1
top = 1

[run]  # another
name = "a # b"
a.b . "c d".'e' = 2
[model.shape]
x = 1979-05-27 07:32:00
[model]
"""
    assert lines(text) == {
        ("top",): 2,
        ("run",): 4,
        ("run", "name"): 5,
        ("run", "a"): 6,
        ("run", "a", "b"): 6,
        ("run", "a", "b", "c d"): 6,
        ("run", "a", "b", "c d", "e"): 6,
        ("model", "shape"): 7,
        ("model", "shape", "x"): 8,
        ("model",): 9,
    }


def test_arrays_of_tables_and_what_lies_below_them() -> None:
    text = """[[a.b]]
x = 1
[a.b.sub]
y = 2
[[a.b.deep]]
[[a.b]]
[[a.b.deep]]
z = 3
"""
    assert lines(text) == {
        ("a",): 1,
        ("a", "b"): 1,
        ("a", "b", 0): 1,
        ("a", "b", 0, "x"): 2,
        ("a", "b", 0, "sub"): 3,
        ("a", "b", 0, "sub", "y"): 4,
        ("a", "b", 0, "deep"): 5,
        ("a", "b", 0, "deep", 0): 5,
        ("a", "b", 1): 6,
        ("a", "b", 1, "deep"): 7,
        ("a", "b", 1, "deep", 0): 7,
        ("a", "b", 1, "deep", 0, "z"): 8,
    }


def test_arrays_and_inline_tables_over_several_lines() -> None:
    text = """a = [ # [ one
  1, "],",
  {k = [2,
    3], m.n = '}'}, # }
]
b = {}
c = []
"""
    assert lines(text) == {
        ("a",): 1,
        ("a", 0): 2,
        ("a", 1): 2,
        ("a", 2): 3,
        ("a", 2, "k"): 3,
        ("a", 2, "k", 0): 3,
        ("a", 2, "k", 1): 4,
        ("a", 2, "m"): 4,
        ("a", 2, "m", "n"): 4,
        ("b",): 6,
        ("c",): 7,
    }


def test_multiline_strings_hide_what_looks_like_toml() -> None:
    text = '''a = """
[run]
\\""" x = 1
""" # the end
b = \'\'\'
y = 2
\\\'\'\'
c = """"quoted""""" # two quotes belong to the content
d = \'\'\'\'\'quoted\'\'\'\'
"e\\u0041\\"" = "\\""
f = 1'''
    assert lines(text) == {("a",): 1, ("b",): 5, ("c",): 8, ("d",): 9, ('eA"',): 10, ("f",): 11}


def test_windows_line_ends() -> None:
    assert lines("a = 1\r\n\r\n[t]\r\nb = [1,\r\n2]\r\n") == {
        ("a",): 1,
        ("t",): 3,
        ("t", "b"): 4,
        ("t", "b", 0): 4,
        ("t", "b", 1): 5,
    }


class Writer:
    """Writes a random TOML document in which every scalar holds a number that occurs nowhere else."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.next_marker = 1000

    def one_of(self, *options: str) -> str:
        return self.draw(st.sampled_from(options))

    def scalar(self) -> str:
        self.next_marker += 1
        mark = self.next_marker
        return self.one_of(
            f"{mark}",
            f'"{mark} # ] }} \\" ="',
            f"'{mark} \\'",
            f'"""{mark}\n[x]\ny = 1 \\\\"""',
            f"'''{mark}\n# '' ]\n'''",
        )

    def value(self, depth: int) -> str:
        kind = self.one_of("scalar", "array", "inline") if depth else "scalar"
        if kind == "scalar":
            return self.scalar()
        if kind == "array":
            gap = self.one_of("", " ", "\n", " # ] comment\n  ")
            items = [self.value(depth - 1) for _ in range(self.draw(st.integers(0, 3)))]
            return f"[{gap}" + f"{gap},{gap}".join(items) + self.one_of("", f",{gap}" if items else "") + f"{gap}]"
        pairs = [f"k{index}{self.one_of('', '.d')} = {self.value(depth - 1)}" for index in range(2)]
        return "{ " + ", ".join(pairs) + " }"

    def table(self, name: str, depth: int) -> str:
        pairs = [
            f"{self.one_of('v', 'w.x', 'y . z')}{index} = {self.value(2)}{self.one_of('', ' # = [')}\n"
            for index in range(self.draw(st.integers(0, 3)))
        ]
        text = "".join(pairs) + self.one_of("", "\n", "# [no.table]\n")
        for index in range(self.draw(st.integers(0, 2)) if depth else 0):
            key = self.one_of(f"t{index}", f'"q. {index}"', f"u.v{index}")
            key = f"{name}.{key}" if name else key
            if self.one_of("table", "array") == "table":
                text += f"[{key}]\n" + self.table(key, depth - 1)
            else:
                text += "".join(f"[[{key}]]\n" + self.table(key, depth - 1) for _ in range(2))
        return text


@st.composite
def documents(draw: st.DrawFn) -> str:
    return Writer(draw).table("", 2)


def scalars(value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    if isinstance(value, dict):
        return [found for key, below in value.items() for found in scalars(below, (*path, key))]
    if isinstance(value, list):
        return [found for index, below in enumerate(value) for found in scalars(below, (*path, index))]
    return [(path, value)]


@settings(deadline=None)
@given(documents())
def test_every_scalar_of_a_random_document_is_on_the_line_of_its_marker(text: str) -> None:
    locator = locate(text, FILE)
    found = scalars(tomllib.loads(text))
    for path, value in found:
        marker = str(value)[:4]
        assert locator.places[path].line == text[: text.index(marker)].count("\n") + 1
    known_ends = {path for path in locator.places if not any(other[:-1] == path for other in locator.places)}
    assert {path for path, _ in found} <= known_ends


def test_a_missing_key_has_the_place_of_the_nearest_table() -> None:
    locator = locate("[a]\nb = [1]\n", FILE)
    assert str(locator.place(("a", "b", 5))) == "configs/x.toml:2"
    assert str(locator.place(("a", "c", "d"))) == "configs/x.toml:1"
    assert str(locator.place(("z",))) == "configs/x.toml"


def test_below_and_adopt_move_a_file_into_another() -> None:
    outer = locate("[environment]\npath = 'env/y.toml'\n", FILE)
    outer.adopt(("environment",), locate("\nid = 1\n", Path("configs/env/y.toml")).below(("environment",)))
    place = outer.place(("environment", "id"))
    assert place == Place("configs/env/y.toml", line=2, root=1, directory=Path("configs/env"))
    assert str(outer.place(("environment", "path"))) == "configs/env/y.toml", "the old key is gone"


def test_adopt_takes_only_what_lies_at_and_below_the_path() -> None:
    over = Locator(Place("over"), {("a", "x"): Place("new"), ("b",): Place("other")})
    base = Locator(Place("base"), {("a",): Place("old"), ("a", "y"): Place("old"), ("b",): Place("kept")})
    base.adopt(("a",), over)
    assert base.places == {("a",): Place("over"), ("a", "x"): Place("new"), ("b",): Place("kept")}
