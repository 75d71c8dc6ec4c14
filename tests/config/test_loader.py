"""What a bad configuration is told: every problem in one error, each with its place, its value and the remedy."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from nmoe.config.base import Array, Conflict, FromFile, Section
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load, parse
from nmoe.config.locate import Locator, Place
from nmoe.config.packaged import find_environment
from nmoe.config.problems import ConfigError
from nmoe.config.tables.pools import CsvPool, GeneratedPool
from nmoe.errors import UserError


class Circle(Section):
    type: Literal["circle"]
    radius: float = Field(gt=0, description="in metres")


class Square(Section):
    type: Literal["square"]
    side: float = Field(gt=0)


class Range(Section):
    low: int = 0
    high: int = 9
    step: int = 1

    def conflicts(self) -> Iterator[Conflict]:
        if self.low > self.high:
            yield Conflict("low", f"is above high = {self.high}")
        if self.step == 0:
            yield Conflict("", "goes nowhere")


class Outer(Section):
    kind: Literal["fast", "slow"] = "fast"
    rate: float = Field(default=0.5, le=1)
    name: str = "x"
    on: bool = False
    pair: Annotated[tuple[int, int], Field(strict=False)] = (1, 2)
    range: Range = Range()
    shape: Circle | Square | None = Field(default=None, discriminator="type")
    shapes: Array[Annotated[Circle | Square, Field(discriminator="type")]] = ()


class Inner(Section):
    id: str = Field(description="its name")
    size: int = Field(default=1, ge=1)
    range: Range = Range()


class WithFile(Section):
    count: int = 1
    inner: Annotated[Inner | None, FromFile(find_environment)] = None
    table: Outer = Outer()

    def conflicts(self) -> Iterator[Conflict]:
        if self.inner is None:
            yield Conflict("inner", "there should be one")


Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file below the working directory, so that its name in messages is the one given here."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def problems(path: Path, schema: type[Section], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, schema, overrides)
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, UserError)
    lines = [str(problem) for problem in caught.value.problems]
    assert str(caught.value).splitlines()[-len(lines) :] == lines, "the message has one line per problem"
    return lines


def test_values_overrides_and_defaults(write: Write) -> None:
    path = write(
        "x.toml",
        'kind = "slow"\nrate = 1\n[shape]\ntype = "square"\nside = 2.0\n[[shapes]]\ntype = "circle"\nradius = 1\n',
    )
    settings = load(path, Outer, ["--name=new", "--pair=[3, 4]", "--range.high=5", "--range.high=7"])
    assert settings == Outer(
        kind="slow",
        rate=1.0,
        name="new",
        pair=(3, 4),
        range=Range(high=7),
        shape=Square(type="square", side=2.0),
        shapes=(Circle(type="circle", radius=1.0),),
    )
    assert isinstance(settings.rate, float)


def test_a_byte_order_mark_is_no_problem(write: Write) -> None:
    path = write("x.toml", "")
    path.write_bytes(b'\xef\xbb\xbfname = "y"')
    assert load(path, Outer).name == "y"


def test_every_problem_is_listed_with_its_line(write: Write) -> None:
    text = """kinds = "fast"
rate = "0.1"
name = 7
on = 1
pair = [1, 2.5]

[range]
low = 3.0
hgih = 3

[shape]
type = "circel"

[[shapes]]
type = "circle"
[[shapes]]
type = "square"
side = -1
radius = 2
[[shapes]]
side = 1

[elsewhere]
"""
    assert problems(write("configs/x.toml", text), Outer) == [
        "configs/x.toml:1: kinds = \"fast\": unknown key; did you mean 'kind'?",
        'configs/x.toml:2: rate = "0.1": expected a number, got a string',
        'configs/x.toml:3: name = 7: expected a string, got an integer; write "7"',
        "configs/x.toml:4: on = 1: expected true or false, got an integer; write true",
        "configs/x.toml:5: pair[1] = 2.5: expected an integer, got a number",
        "configs/x.toml:8: [range] low = 3.0: expected an integer, got a number; write 3",
        "configs/x.toml:9: [range] hgih = 3: unknown key; did you mean 'high'?",
        'configs/x.toml:12: [shape] type = "circel": must be one of "circle", "square"; did you mean \'circle\'?',
        "configs/x.toml:14: [shapes[0]] radius: required key is missing (in metres)",
        "configs/x.toml:18: [shapes[1]] side = -1: must be more than 0",
        "configs/x.toml:19: [shapes[1]] radius = 2: unknown key; did you mean [shape] radius?",
        'configs/x.toml:20: [shapes[2]] type: required key is missing; must be one of "circle", "square"',
        "configs/x.toml:23: [elsewhere]: unknown key; known here: kind, rate, name, on, pair, range, shape, shapes",
    ]


def test_wrong_kinds_of_value_name_what_was_expected(write: Write) -> None:
    text = 'kind = "slo"\nrate = nan\nrange = 3\npair = {a = 1}\nshape = []\non = 2024-01-01\n[name]\n'
    assert problems(write("x.toml", text), Outer) == [
        'x.toml:1: kind = "slo": must be one of "fast", "slow"; did you mean \'slow\'?',
        "x.toml:2: rate = nan: must be a finite number",
        "x.toml:3: range = 3: expected a table, got an integer",
        "x.toml:4: [pair]: expected an array, got a table",
        "x.toml:5: shape = []: expected a table, got an array",
        "x.toml:6: on = 2024-01-01: expected true or false, got a date or time",
        "x.toml:7: [name]: expected a string, got a table",
    ]


def test_booleans_are_not_numbers_and_bounds_are_named(write: Write) -> None:
    assert problems(write("x.toml", "rate = true\n[range]\nlow = false\n"), Outer) == [
        "x.toml:1: rate = true: expected a number, got a boolean",
        "x.toml:3: [range] low = false: expected an integer, got a boolean",
    ]
    assert problems(write("x.toml", "rate = 1.5"), Outer) == ["x.toml:1: rate = 1.5: must be at most 1"]


def test_long_values_are_cut(write: Write) -> None:
    (line,) = problems(write("x.toml", f'rate = "{"a" * 500}"'), Outer)
    assert line == f'x.toml:1: rate = "{"a" * 56}...: expected a number, got a string'


def test_all_conflicts_of_a_section_point_at_their_keys(write: Write) -> None:
    path = write("x.toml", "rate = 2\n[range]\nstep = 0\nlow = 12\n")
    assert problems(path, Outer) == [
        "x.toml:1: rate = 2: must be at most 1",
        "x.toml:2: [range]: goes nowhere",
        "x.toml:4: [range] low = 12: is above high = 9",
    ]


def test_a_missing_table_says_what_it_needs(write: Write) -> None:
    class Needs(Section):
        range: Range
        inner: Inner
        shape: Circle | Square = Field(discriminator="type")

    assert problems(write("x.toml", ""), Needs) == [
        "x.toml: [range]: required table is missing",
        "x.toml: [inner]: required table is missing; it needs id",
        "x.toml: [shape]: required table is missing; it needs type",
    ]


def test_overrides_are_named_by_their_own_text(write: Write) -> None:
    path = write("x.toml", "rate = 2\n")
    assert problems(
        path, Outer, "--rnage.low=1", "--range.hgih=1", "--high=3", "--range.low=x", "--name=7", "rate=1", "--on", "5"
    ) == [
        "x.toml:1: rate = 2: must be at most 1",
        "rate=1: not an override; did you mean --rate=1?",
        "--on: has no value; write --on=VALUE",
        "5: not an override; those are written --section.key=value",
        "--name=7: expected a string, got an integer; write --name='\"7\"'",
        "--range.low=x: expected an integer, got a string",
        "--range.hgih=1: unknown key; did you mean --range.high?",
        "--rnage.low=1: unknown key; did you mean --range.low?",
        "--high=3: unknown key; did you mean --range.high?",
    ]


def test_a_problem_inside_an_overridden_table_names_the_key(write: Write) -> None:
    assert problems(write("x.toml", ""), Outer, "--range={low=1, hgih=2}", "--shape={type='circle'}") == [
        "--range={low=1, hgih=2}: hgih = 2: unknown key; did you mean --range.high?",
        "--shape={type='circle'}: radius: required key is missing (in metres)",
    ]


def test_a_key_missing_from_a_section_that_only_an_override_opens(write: Write) -> None:
    assert problems(write("x.toml", "[inner]\nsize = 2\n"), WithFile, "--table.shape.type=circle") == [
        "x.toml: [table.shape] radius: required key is missing (in metres)",
        "x.toml:1: [inner] id: required key is missing (its name)",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[run\n", "x.toml:1:5: TOML syntax: Expected ']' at the end of a table declaration"),
        (b"a = 1\nb = \n", "x.toml:2:5: TOML syntax: Invalid value"),
        (b"a = [", "x.toml: TOML syntax: Invalid value (at end of document)"),
        (b"a = 1\na = 2\n", "x.toml:2:6: TOML syntax: Cannot overwrite a value"),
        (b"a = 1\nb = '\xff'\n", "x.toml:2: not UTF-8 text: invalid start byte"),
        (b"a = " + b"[" * 9000 + b"]" * 9000, "x.toml: TOML syntax: arrays or tables nested too deeply"),
    ],
)
def test_files_that_are_not_toml(write: Write, content: bytes, expected: str) -> None:
    path = write("x.toml", "")
    path.write_bytes(content)
    assert problems(path, Outer, "--x") == [expected, "--x: has no value; write --x=VALUE"]


def test_an_integer_of_too_many_digits(write: Write) -> None:
    (line,) = problems(write("x.toml", f"a = {'1' * 5000}"), Outer)
    assert line.startswith("x.toml: TOML syntax: Exceeds the limit")


def test_files_that_can_not_be_read(write: Write) -> None:
    assert problems(Path("nope.toml"), Outer) == ["nope.toml: no such file"]
    write("some/x.toml", "")
    assert problems(Path("some"), Outer) == ["some: is a directory, not a TOML file"]
    (line,) = problems(Path("some/x.toml/y.toml"), Outer)
    assert line.startswith("some/x.toml/y.toml: cannot be read: ")
    (line,) = problems(Path("a\0b"), Outer)
    assert "null" in line


def test_a_section_in_a_file_of_its_own(write: Write) -> None:
    write("env/inner.toml", 'id = "a"\nsize = 2\n[range]\nlow = 1\nhigh = 2\n')
    path = write("configs/x.toml", 'count = 2\n[inner]\npath = "../env/inner.toml"\nrange.high = 5\n')
    settings = load(path, WithFile, ["--inner.size=3"])
    assert settings == WithFile(count=2, inner=Inner(id="a", size=3, range=Range(low=1, high=5)))


def test_a_file_named_by_an_override_starts_from_the_working_directory(write: Write) -> None:
    write("env/inner.toml", 'id = "b"')
    path = write("configs/x.toml", "")
    assert load(path, WithFile, ["--inner.path=env/inner.toml"]).inner == Inner(id="b")


def test_problems_of_both_files_are_one_list(write: Write) -> None:
    write("configs/inner.toml", "size = 0\nidd = 'a'\n[range]\nlow = 'a'\nsize = 1\n")
    path = write("configs/x.toml", 'cuont = 2\n[inner]\npath = "inner.toml"\nsizes = 3\n')
    assert problems(path, WithFile, "--inner.range.high=x") == [
        "configs/x.toml:1: cuont = 2: unknown key; did you mean 'count'?",
        "configs/x.toml:4: [inner] sizes = 3: unknown key; did you mean 'size'?",
        "configs/inner.toml: id: required key is missing (its name)",
        "configs/inner.toml:1: size = 0: must be at least 1",
        "configs/inner.toml:2: idd = \"a\": unknown key; did you mean 'id'?",
        'configs/inner.toml:4: [range] low = "a": expected an integer, got a string',
        "configs/inner.toml:5: [range] size = 1: unknown key; did you mean size?",
        "--inner.range.high=x: expected an integer, got a string",
    ]


def test_an_unreadable_section_is_one_problem_and_hides_no_others(write: Write) -> None:
    path = write("configs/x.toml", "count = 'a'\n[inner]\npath = 'nope.toml'\n[table]\nrate = 7\n")
    assert problems(path, WithFile) == [
        'configs/x.toml:1: count = "a": expected an integer, got a string',
        "configs/x.toml:5: [table] rate = 7: must be at most 1",
        "configs/nope.toml: no such file (named at configs/x.toml:3)",
    ]
    path = write("configs/x.toml", "[inner]\npath = 'nope.toml'\n")
    assert problems(path, WithFile) == ["configs/nope.toml: no such file (named at configs/x.toml:2)"]
    path = write("configs/x.toml", "[inner]\npath = 3\n")
    assert problems(path, WithFile) == [
        "configs/x.toml:2: [inner] path = 3: expected the path of a TOML file, as a string"
    ]


def test_parse_names_its_source_and_leaves_the_data_alone(write: Write) -> None:
    write("inner.toml", 'id = "a"')
    data = {"count": 2, "inner": {"path": "inner.toml", "size": 4}}
    assert parse(data, WithFile, Locator(Place("meta.json"))) == WithFile(count=2, inner=Inner(id="a", size=4))
    assert data == {"count": 2, "inner": {"path": "inner.toml", "size": 4}}
    with pytest.raises(ConfigError, match=r"^meta.json: \[range\] low = \"a\": expected an integer, got a string$"):
        parse({"range": {"low": "a"}}, Outer, Locator(Place("meta.json")))
    with pytest.raises(ConfigError, match=r"^meta.json: \[shape\] side = 2: unknown key; did you mean 'size'\?$"):
        parse({"shape": {"side": 2, "id": "a"}}, _Nested, Locator(Place("meta.json")))


class _Nested(Section):
    shape: Inner


def test_a_task_pool_of_another_type_takes_the_place_of_the_files(tmp_path: Path) -> None:
    """Its keys are others: none of the file's would be known to it."""
    path = tmp_path / "x.toml"
    path.write_text(
        '[run]\nsteps = 1\n[model]\npath = "m"\n[environment]\nenv_id = "e"\n'
        '[environment.task_pool]\ntype = "generated"\ntask_type = "sort"\ndifficulty = [3, 3]\n'
    )
    whole = ['--environment.task_pool={type = "csv", path = "a.csv", task_type = "gsm8k"}']
    one_by_one = [f"--environment.task_pool.{pair}" for pair in ("type=csv", "path=a.csv", "task_type=gsm8k")]
    for overrides in (whole, one_by_one):
        pool = load(path, RLConfig, overrides).environment.task_pool
        assert pool == CsvPool(type="csv", path="a.csv", task_type="gsm8k")
    kept = load(path, RLConfig, ["--environment.task_pool.difficulty=[4, 4]"]).environment.task_pool
    assert kept == GeneratedPool(type="generated", task_type="sort", difficulty=(4, 4))
