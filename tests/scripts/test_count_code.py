"""What scripts/count_code.py counts as code, and which imports and circles it sees."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from count_code import Imports, circles, code_lines, count, imports, tracked

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
