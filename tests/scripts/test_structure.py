"""Scripts that count: code and import circles (count_code.py), files of a step (trace_step.py), phrases (phrases.py)."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from count_code import Imports, circles, code_lines, count, imports, tracked
from phrases import PHRASES, WORDS, Phrase, added_lines, prose, risen
from trace_step import Tracer, report

SOURCE = '''"""A module.

Of three lines."""

# A comment.
LIMIT = 3  # code with a comment
"""What LIMIT is."""


def double(
    x: int,
) -> str:
    """Doubles."""
    text = """a string
    of two lines"""
    return text * x
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert code_lines(SOURCE) == 1 + 3 + 2 + 1


def test_imports_at_once_and_later() -> None:
    known = {"nmoe.a", "nmoe.b", "nmoe.b.c", "nmoe.d", "nmoe.e", "nmoe.f"}
    source = (
        "import json\nimport nmoe.a\nfrom nmoe.b import c, something\n"
        "if TYPE_CHECKING:\n    from nmoe.d import D\n"
        "class K:\n    from .e import x\n    def f(self):\n        from nmoe import f\n        import nmoe.a"
    )
    assert imports("nmoe.x", source, known) == Imports(
        frozenset({"nmoe.a", "nmoe.b", "nmoe.b.c", "nmoe.e"}), frozenset({"nmoe.d", "nmoe.f"})
    )
    assert imports("nmoe.b", "from . import c\nfrom .c import z", known, is_package=True).at_once == {"nmoe.b.c"}


def test_circles_are_the_components_of_more_than_one_module() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set[str]()}
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_a_tree_is_counted_by_room(tmp_path: Path) -> None:
    room = tmp_path / "nmoe" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text("")
    (room / "long.py").write_text("from nmoe.room.short import y\n" + "x = 1\n" * 450)
    (room / "short.py").write_text("y = 1\n\n\ndef f():\n    from nmoe.room.long import x\n")
    (tmp_path / "nmoe" / "top.py").write_text("z = 1\n" * 40)
    (room / "words.txt").write_text("one")
    (tmp_path / "README.md").write_text("nmoe")
    code = count(tmp_path)
    assert code.rooms == {"room": 454, "top.py": 40}
    assert (code.modules, code.files, code.tracked) == (3, 5, 6)
    assert (code.long, code.short) == ({"nmoe/room/long.py": 451}, {"nmoe/room/short.py": 5})
    assert (code.circles, code.late_circles) == ([], [["nmoe.room.long", "nmoe.room.short"]])


def test_of_a_repository_the_files_that_git_would_add_are_counted(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in (".gitignore", "kept.py", "gone.py", "new.py", "ignored.log"):
        (tmp_path / name).write_text("*.log\n")
    subprocess.run(["git", "add", "kept.py", "gone.py"], cwd=tmp_path, check=True)
    (tmp_path / "gone.py").unlink()
    assert sorted(map(str, tracked(tmp_path))) == [".gitignore", "kept.py", "new.py"]


FILES = {
    "rl/train.py": "def _step(rest, publishes):\n    rest['sample']()\n    if publishes:\n        rest['publish']()\n"
    "    rest['save']()",
    "pool.py": "def sample():\n    return [draw() for _ in range(2)]\ndef draw():\n    return 1",
    "learner/learner.py": "def publish():\n    receive()\ndef receive():\n    pass",
    "save.py": "def save():\n    pass",
    "setup.py": "def setup():\n    pass",
}


def test_the_first_step_that_publishes_is_seen_up_to_its_publish(tmp_path: Path) -> None:
    functions: dict[str, Callable[..., None]] = {}
    for name, source in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
        exec(compile(source, str(file), "exec"), functions)
    tracer = Tracer(tmp_path)
    sys.setprofile(tracer)
    try:
        functions["setup"]()
        functions["_step"](functions, False)
        assert not tracer.done
        functions["_step"](functions, True)
        functions["setup"]()
    finally:
        sys.setprofile(None)
    assert tracer.done
    assert list(tracer.files) == ["rl/train.py", "pool.py", "learner/learner.py"]
    assert tracer.hand_overs == {
        ("rl/train.py", "pool.py"): "sample",
        ("rl/train.py", "learner/learner.py"): "publish",
    }
    assert next(report(["rl/a.py", "rl/b.py", "c.py"], [])) == (
        "3 files of nmoe/ run for one prompt of a GRPO step: 2 in rl, 1 in c.py"
    )


def positions(phrase: Phrase, text: str) -> list[str]:
    return [text[start:].split("\n")[0] for start in phrase.matches(text)]


def test_an_expression_is_found_across_lines_and_comment_signs() -> None:
    phrase = Phrase("those of", "", "")
    text = "Those of a\nthose\n    of b\n# those\n# of c\nthoseof thus those often"
    assert positions(phrase, text) == ["Those of a", "those", "those"]


def test_an_allowed_expression_around_it_is_not_counted() -> None:
    phrase = Phrase("places?", "", "", allow=("in places?",))
    assert positions(phrase, "a place,\nin\nplace of\nold_place") == ["place,", "place"]


def test_every_bad_example_has_its_expression_and_no_good_one_has_any() -> None:
    every = (*PHRASES, *WORDS)
    assert [phrase.expression for phrase in every if not [*phrase.matches(phrase.bad)]] == []
    assert [phrase.good for phrase in every if any([*other.matches(phrase.good)] for other in every)] == []


def test_only_an_expression_that_occurs_more_often_is_refused() -> None:
    before = {"those of": {"nmoe": 3, "docs": 2}, "that of": {"nmoe": 1, "docs": 1}}
    now = {"those of": {"nmoe": 2, "docs": 3}, "that of": {"nmoe": 1, "docs": 0}, "told": {"nmoe": 9, "docs": 9}}
    assert risen(before, now) == [("those of", "docs")]


def test_the_added_lines_of_a_patch() -> None:
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,3 @@ f\n@@ -9 +10 @@\n--- a/y.py\n+++ b/y.py\n@@ -4,2 +3,0 @@\n"
    assert added_lines(patch) == {"x.py": {1, 2, 3, 10}, "y.py": set()}


def test_names_of_tests_that_a_page_quotes_are_no_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`tests/x/test_y.py::test_it_is_told` says it.\nIt is told.\n")
    (told,) = (word for word in WORDS if "told" in word.expression)
    assert [prose(page).count("\n", 0, start) for start in told.matches(prose(page))] == [1]
    assert len(prose(page)) == len(page.read_text())
