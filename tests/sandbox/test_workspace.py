"""Workspaces: files that a trajectory starts with, what a bootstrap leaves, what is collected, and protected files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from wheels import write_wheel

from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.problems import ConfigError
from nmoe.config.tables.rollout import WorkspaceSettings
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.sandbox.api import Limits, Result
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.sandbox.workspaces.prepare import Prepared, Workspaces
from nmoe.sandbox.workspaces.sources import MOST_KEPT, WorkspaceError
from nmoe.sandbox.workspaces.store import MARKER, collect, lock, workspaces_root
from nmoe.types import INFRASTRUCTURE, Problem, Verdict

Open = Callable[..., Workspaces]

DAY = 86400.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMOE_WORKSPACES", str(tmp_path / "workspaces"))
    return workspaces_root()


@pytest.fixture
def workspaces() -> Iterator[Open]:
    """Makes the workspaces of an environment "fix" with these settings."""
    made = []

    def workspaces(**settings: Any) -> Workspaces:
        one = Workspaces("fix", parse(settings, WorkspaceSettings, Locator(Place("test"))), "no sandbox at all")
        made.append(one)
        return one

    yield workspaces
    for one in made:
        one.close()


def problem(**metadata: str) -> Problem:
    return Problem("fix/0", "sort", "?", "1", "fix", metadata)


def prepare(workspaces: Workspaces, **metadata: str) -> Prepared:
    return asyncio.run(workspaces.prepare(problem(**metadata)))


def files(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): path.read_text() for path in sorted(tree.rglob("*")) if path.is_file()}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    (directory / "src").mkdir(parents=True)
    (directory / "src/main.py").write_text("print(1)\n")
    (directory / "run.sh").write_text("echo\n")
    (directory / "run.sh").chmod(0o755)
    (directory / "link").symlink_to("src/main.py")
    return directory


def git(directory: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": "/dev/null"}
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.fixture
def repository(project: Path) -> tuple[Path, str, str]:
    """A clone whose second commit mends what the first has, and the two commits."""
    (project / ".gitattributes").write_text("tests export-ignore\n")
    (project / "tests").mkdir()
    (project / "tests/test_main.py").write_text("assert True\n")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "base")
    base = git(project, "rev-parse", "HEAD")
    (project / "src/main.py").write_text("print(2)\n")
    git(project, "commit", "-qam", "the solution")
    target = git(project, "rev-parse", "HEAD")
    (project / "src/main.py").write_text("not committed\n")
    return project, base, target


# --- what a workspace holds --------------------------------------------------------------------------------------------


def test_a_directory(workspaces: Open, project: Path, root: Path) -> None:
    (project / ".git").mkdir()
    (project / ".git/secret").write_text("the history")
    prepared = prepare(workspaces(directory=str(project)))
    assert files(prepared.tree) == {"link": "print(1)\n", "run.sh": "echo\n", "src/main.py": "print(1)\n"}
    assert os.readlink(prepared.tree / "link") == "src/main.py"
    assert (prepared.tree / "run.sh").stat().st_mode & 0o100
    provenance = prepared.provenance
    assert json.loads((prepared.tree.parent / MARKER).read_text()).items() <= provenance.items()
    assert provenance["source"] == "directory"
    assert provenance["directory"] == str(project)
    assert provenance["sandbox"] == "no sandbox at all"
    assert provenance["bootstrap"] == {"mode": "none", "command": [], "exit_code": 0, "wall_s": 0.0, "output": ""}
    assert provenance["policy"] == {"keep": "never", "max_age_days": 14.0, "max_disk_mb": 10240}
    # The same files are the same workspace, wherever they lie; other files are another.
    assert prepare(workspaces(directory=str(project))).tree == prepared.tree
    moved = project.with_name("moved")
    project.rename(moved)
    again = prepare(workspaces(directory=str(moved)))
    assert (again.tree, again.provenance["directory"]) == (prepared.tree, str(moved))
    for change in (
        lambda: (moved / "run.sh").chmod(0o644),
        lambda: (moved / "new").touch(),
        lambda: (moved / "link").unlink(),
    ):
        change()
        other = prepare(workspaces(directory=str(moved))).tree
        assert other != prepared.tree
        prepared = Prepared(other, {})
    assert not [path for path in root.iterdir() if not path.name.startswith("prepared-")]


def test_a_commit(workspaces: Open, repository: tuple[Path, str, str]) -> None:
    clone, base, target = repository
    settings = {"repository": str(clone), "base_commit": base[:10], "target_commit": "HEAD"}
    prepared = prepare(workspaces(**settings))
    assert files(prepared.tree) == {
        ".gitattributes": "tests export-ignore\n",
        "link": "print(1)\n",
        "run.sh": "echo\n",
        "src/main.py": "print(1)\n",
        "tests/test_main.py": "assert True\n",
    }
    assert not (prepared.tree / ".git").exists()
    names = ("source", "repository", "base_commit", "target_commit", "content")
    content = git(clone, "rev-parse", f"{base}^{{tree}}")
    assert [prepared.provenance[name] for name in names] == ["repository", str(clone), base, target, content]
    # The clone is as it was: neither its files nor its index were touched.
    assert git(clone, "status", "--porcelain") == "M src/main.py"
    # A problem's record says where it starts.
    other = workspaces(repository=str(clone))
    assert files(prepare(other, base_commit=target).tree)["src/main.py"] == "print(2)\n"
    assert prepare(other, base_commit=base).provenance["target_commit"] is None
    assert prepare(other, base_commit=base).tree == prepared.tree


def test_one_preparation_serves_all_who_wait(workspaces: Open, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = Workspaces._make
    monkeypatch.setattr(Workspaces, "_make", lambda *arguments: (made.append(1), time.sleep(0.1), make(*arguments)))
    one = workspaces(directory=str(project))

    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(one.prepare(problem())) for _ in range(20)]
        await asyncio.sleep(0.02)
        tasks[0].cancel()  # the first one's end is not the others'
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, *trees = asyncio.run(ask())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert len({prepared.tree for prepared in trees}) == len(made) == 1
    assert prepare(one).tree == trees[0].tree  # in another event loop too


def test_what_can_not_be_prepared(workspaces: Open, repository: tuple[Path, str, str], tmp_path: Path) -> None:
    clone, base, _ = repository
    assert WorkspaceError.failure == "workspace_failed"
    assert WorkspaceError.failure in INFRASTRUCTURE
    for settings, message in [
        (
            {"directory": str(tmp_path / "nowhere")},
            r"nowhere: no such directory; \[workspace\] directory names the files",
        ),
        ({"repository": str(tmp_path / "nowhere"), "base_commit": base}, "nowhere: no such directory"),
        ({"repository": str(tmp_path), "base_commit": base}, "not a git repository"),
        ({"repository": str(clone), "base_commit": "0" * 40}, r"git rev-parse .*0{40}\^\{commit\}: no such commit"),
        ({"repository": str(clone), "base_commit": "--all"}, r"\^\{commit\}: no such commit"),
        ({"repository": str(clone), "base_commit": base, "target_commit": "nope"}, r"nope\^\{commit\}: no such commit"),
        ({"repository": str(clone)}, r"problem fix/0: no base_commit in its record, and none in \[workspace\]"),
    ]:
        with pytest.raises(WorkspaceError, match=message):
            prepare(workspaces(**settings))
    os.mkfifo(clone / "pipe")
    with pytest.raises(WorkspaceError, match=r"pipe: neither file, directory nor link"):
        prepare(workspaces(directory=str(clone)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs either directory or repository"),
        ({"directory": "a", "repository": "b"}, "needs either directory or repository"),
        ({"directory": "a", "base_commit": "c"}, "base_commit.*a directory has no commits"),
        ({"directory": "a", "keep": "sometimes"}, 'keep = "sometimes": must be one of "never", "failed", "always"'),
        ({"directory": "a", "max_age_days": 0}, "max_age_days = 0: must be more than 0"),
    ],
)
def test_settings_that_can_not_be(settings: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(dict(settings), WorkspaceSettings, Locator(Place("test")))


# --- the bootstrap -----------------------------------------------------------------------------------------------------

BACKEND = """
import zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    name = "mine-1.0-py3-none-any.whl"
    open("written-beside-the-sources", "w")
    with zipfile.ZipFile(directory + "/" + name, "w") as wheel:
        wheel.write("src/main.py", "mine.py")
        wheel.writestr("mine-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: mine\\nVersion: 1.0\\n")
        wheel.writestr("mine-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("mine-1.0.dist-info/RECORD", "")
    return name
"""


def test_requirements(workspaces: Open, project: Path) -> None:
    write_wheel(project / "tiny-1.0-py3-none-any.whl")
    (project / "requirements.txt").write_text("./tiny-1.0-py3-none-any.whl\n")
    prepared = prepare(workspaces(directory=str(project), bootstrap="requirements"))
    assert (prepared.tree / ".packages/tiny.py").read_text() == "VALUE = 42\n"
    outcome = prepared.provenance["bootstrap"]
    assert outcome["exit_code"] == 0
    assert outcome["wall_s"] > 0
    assert outcome["command"] == [
        *("python", "-m", "pip", "install", "--quiet", "--target", ".packages", "-r", "requirements.txt")
    ]
    assert prepare(workspaces(directory=str(project))).tree != prepared.tree


def test_pip(workspaces: Open, project: Path) -> None:
    (project / "backend.py").write_text(BACKEND)
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "mine"\nversion = "1.0"\n'
    )
    prepared = prepare(workspaces(directory=str(project), bootstrap="pip"))
    assert (prepared.tree / ".packages/mine.py").read_text() == "print(1)\n"
    assert not (prepared.tree / "written-beside-the-sources").exists()


def test_a_bootstrap_that_fails_is_kept_to_be_seen_and_tried_once(
    workspaces: Open, project: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "requirements.txt").write_text("./absent-1.0-py3-none-any.whl\n")
    one = workspaces(directory=str(project), bootstrap="requirements")
    with pytest.raises(
        WorkspaceError, match=r"pip install .* ended with 1: .*absent-1\.0.*\(all of it in .*failed-"
    ) as first:
        prepare(one)
    with pytest.raises(WorkspaceError) as second:
        prepare(one)
    assert second.value is first.value
    (kept,) = root.iterdir()
    record = json.loads((kept / MARKER).read_text())
    assert record["bootstrap"]["exit_code"] == 1
    assert "absent-1.0" in record["bootstrap"]["output"]
    with pytest.raises(WorkspaceError, match=r"ended with 124: not done after bootstrap_wall_s = 0\.01"):
        prepare(workspaces(directory=str(project), bootstrap="requirements", bootstrap_wall_s=0.01))
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(WorkspaceError, match="ended with 127: uv: command not found; install it"):
        prepare(workspaces(directory=str(project), bootstrap="uv"))


# --- what is kept, and how long ----------------------------------------------------------------------------------------


class Left:
    """A sandbox whose workspace holds what a policy left, links that lead outside included."""

    def __init__(self, result: Result | None = None) -> None:
        self.result = result

    async def run(self, argv: Sequence[str], *, limits: Limits, **_: Any) -> Result:
        assert argv == ["tar", "-cf", "-", "-C", "/workspace", "."]
        assert limits.output_kb == 2 * 1024 * 64
        if self.result is not None:
            return self.result
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, content in (("./answer.txt", b"42"), ("../outside.txt", b"no")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            link = tarfile.TarInfo("./link")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
        return Result("ok", 0, out.getvalue(), b"", 0.1)


@pytest.mark.parametrize(
    ("keep", "failed", "kept"),
    [("never", True, False), ("failed", True, True), ("failed", False, False), ("always", False, True)],
)
def test_keep(workspaces: Open, project: Path, root: Path, keep: str, failed: bool, kept: bool) -> None:
    one = workspaces(directory=str(project), keep=keep)
    prepared = prepare(one)
    path = asyncio.run(one.save(Left(), prepared, "run/3:fix 0", failed=failed, limits=Limits()))  # type: ignore[arg-type]
    assert (path is not None) == kept
    assert len(list(root.iterdir())) == 1 + kept
    if path is not None:
        assert path.name.startswith("kept-run_3_fix_0-")
        assert files(path / "tree") == {"answer.txt": "42"}
        assert not (path / "tree/link").is_symlink()
        record = json.loads((path / MARKER).read_text())
        assert (record["kind"], record["name"], record["failed"]) == ("kept", "run/3:fix 0", failed)
        assert record["content"] == prepared.provenance["content"]


def test_what_can_not_be_kept_is_said(workspaces: Open, project: Path, root: Path) -> None:
    one = workspaces(directory=str(project), keep="always")
    prepared = prepare(one)
    lost = Left(Result("timeout", None, b"", b"", 10.0))
    with pytest.raises(WorkspaceError, match="the workspace of x cannot be kept: timeout"):
        asyncio.run(one.save(lost, prepared, "x", failed=True, limits=Limits()))  # type: ignore[arg-type]
    assert len(list(root.iterdir())) == 1


def archive(*members: tuple[str, bytes | None]) -> Result:
    """What tar says of files by their contents, and of directories by None."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = (tarfile.DIRTYPE, 0) if content is None else (tarfile.REGTYPE, len(content))
            tar.addfile(member, None if content is None else io.BytesIO(content))
    return Result("ok", 0, out.getvalue(), b"", 0.1)


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (archive(*(("/".join(["d" * 100] * depth), None) for depth in range(1, 61))), "File name too long"),
        (archive(("n" * 300, b"x")), "File name too long"),
        (archive(("a", b"x"), ("a/b", b"x")), "Not a directory|File exists"),
        (
            archive(*((f"{number}", b"") for number in range(MOST_KEPT + 1))),
            f"{MOST_KEPT + 1} files and directories, too many",
        ),
        (Result("ok", 0, b"no archive" * 100, b"", 0.1), "cannot be read"),
    ],
    ids=["deep", "long name", "a file as a directory", "many files", "no archive"],
)
def test_what_a_policy_left_never_raises_anything_else(
    workspaces: Open, project: Path, root: Path, left: Result, reason: str
) -> None:
    one = workspaces(directory=str(project), keep="always")
    prepared = prepare(one)
    with pytest.raises(WorkspaceError, match=reason):
        asyncio.run(one.save(Left(left), prepared, "x", failed=True, limits=Limits()))  # type: ignore[arg-type]
    assert len(list(root.iterdir())) == 1, "no half of it stays"


def test_a_full_disk_is_a_workspace_that_is_not_kept(
    workspaces: Open, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = workspaces(directory=str(project), keep="always")
    prepared = prepare(one)
    monkeypatch.setattr("nmoe.sandbox.workspaces.prepare.extract", full)
    with pytest.raises(WorkspaceError, match="No space left on device"):
        asyncio.run(one.save(Left(), prepared, "x", failed=True, limits=Limits()))  # type: ignore[arg-type]


def test_copying_delays_nobody_else(workspaces: Open, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop turns while two workspaces are copied, one after the other."""
    at_once = most = 0

    def slow(_: bytes, tree: Path) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.2)
        tree.mkdir()
        at_once -= 1

    one = workspaces(directory=str(project), keep="always")
    prepared = prepare(one)
    monkeypatch.setattr("nmoe.sandbox.workspaces.prepare.extract", slow)

    async def turns() -> int:
        saving = asyncio.gather(
            *(one.save(Left(), prepared, name, failed=True, limits=Limits()) for name in "ab")  # type: ignore[arg-type]
        )
        count = 0
        while not saving.done():
            count += 1
            await asyncio.sleep(0.01)
        await saving
        return count

    for _ in range(2):  # each batch of rollouts has an event loop of its own
        assert asyncio.run(turns()) > 2  # about 40 on an idle machine, 9 where it gets a sixteenth
    assert most == 1


def make(root: Path, name: str, mb: float = 1.0, days: float = 0.0, env_id: str = "fix", **policy: float) -> Path:
    """A workspace last used so many days before the day 1000."""
    path = root / name
    (path / "tree").mkdir(parents=True)
    (path / "tree/data").write_bytes(bytes(int(mb * 2**20)))
    policies = {"keep": "never", "max_age_days": 10.0, "max_disk_mb": 100} | policy
    (path / MARKER).write_text(json.dumps({"nmoe_workspace": 1, "env_id": env_id, "policy": policies}))
    used = (1000 - days) * DAY
    os.utime(path / MARKER, (used, used))
    return path


def test_collection(root: Path) -> None:
    old = make(root, "prepared-old", days=11)
    young = make(root, "prepared-young", days=9)
    half = make(root, ".making-x")
    held = make(root, "kept-held", days=30)
    newest = make(root, "prepared-newest", 6, 1, "large", max_disk_mb=10)
    beyond = make(root, "kept-beyond", 6, 2, "large", max_disk_mb=10)
    small = make(root, "kept-small", 3, 3, "large", max_disk_mb=10)
    stranger = root / "prepared-stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("all of my work")
    (root / "prepared-broken").mkdir()
    (root / "prepared-broken" / MARKER).write_text("{}")
    elsewhere = make(root.parent / "elsewhere", "prepared-linked", days=100)
    (root / "prepared-linked").symlink_to(elsewhere)
    descriptor = lock(held, fcntl.LOCK_SH)
    try:
        before = {path: path.stat().st_mtime for path in root.rglob("*")}
        planned = list(collect(root, dry_run=True, now=1000 * DAY))
        assert {path for path in before if path.name != ".lock"} == {
            path for path in root.rglob("*") if path.name != ".lock"
        }
        done = list(collect(root, dry_run=False, now=1000 * DAY))
    finally:
        os.close(descriptor)
    assert [line.replace("would remove ", "removed      ").replace("would free", "freed") for line in planned] == done
    assert sorted(done[:-1]) == [
        "in use        kept-held: 1.0 MB, last used 30.0 days ago, more than max_age_days = 10",
        f"left alone    prepared-broken: no {MARKER} in it, so nmoe did not make it",
        f"left alone    prepared-linked: no {MARKER} in it, so nmoe did not make it",
        f"left alone    prepared-stranger: no {MARKER} in it, so nmoe did not make it",
        "removed       .making-x: 1.0 MB, never finished",
        "removed       kept-beyond: 6.0 MB, beyond max_disk_mb = 10 of environment 'large'",
        "removed       prepared-old: 1.0 MB, last used 11.0 days ago, more than max_age_days = 10",
    ]
    assert done[-1] == f"{root}: freed 8.0 MB, 11.0 MB stay"
    assert [path.exists() for path in (old, half, beyond)] == [False] * 3
    assert all(path.exists() for path in (young, held, newest, small, stranger / "thesis.txt", elsewhere / "tree/data"))


def test_what_is_in_use_is_not_collected(workspaces: Open, project: Path, root: Path) -> None:
    one = workspaces(directory=str(project))
    tree = prepare(one).tree
    later = time.time() + 100 * DAY
    assert next(collect(root, dry_run=False, now=later)).startswith("in use ")
    assert tree.exists()
    one.close()
    assert next(collect(root, dry_run=False, now=later)).startswith("removed ")
    assert list(root.iterdir()) == []
    assert files(prepare(workspaces(directory=str(project))).tree)["src/main.py"] == "print(1)\n"


def test_nothing_to_collect(root: Path) -> None:
    assert list(collect(root, dry_run=False)) == [f"{root}: freed 0.0 MB, 0.0 MB stay"]
    assert not root.exists()


RECORD = {
    "problem": "Make `most` in stats.py say the limit of conf.py.",
    "files": {
        "stats.py": "def most():\n    return -1\n",
        "conf.py": "LIMIT = 5\n\ndef twice(number):\n    return 2 * number\n",
        "checks/limits.py": (
            "import json\nfrom stats import most\n\ndef holds():\n"
            "    return most() == json.load(open('data/limits.json'))['most']\n"
        ),
        "checks/other.py": "NAME = 'other'\n",
        "data/limits.json": '{"most": 5}',
    },
    "tests": {
        "test_hidden.py": (
            "import conf, checks.limits\nfrom checks import other\nfrom stats import most\n\n"
            "def test_most():\n    assert most() == conf.LIMIT\n    assert conf.twice(most()) == 10\n\n"
            "def test_holds():\n    assert checks.limits.holds() is True\n    assert other.NAME == 'other'\n"
        )
    },
    "solution": {"stats.py": "from conf import LIMIT\n\ndef most():\n    return LIMIT\n"},
    "protected": ["conf.py", "checks/limits.py", "data/limits.json"],
}
SOLUTION = RECORD["solution"]["stats.py"]  # type: ignore[index]
LIMITS_0 = "echo 'LIMIT = 0\ntwice = lambda number: 10'"
HOLDS = "def holds():\n    return True\n"


def verdict_on(graders: Sandboxes, loop: asyncio.Runner, script: str) -> Verdict:
    """The verdict on the workspace after a policy's script."""
    task = TASKS["code_edit"]
    read = task.read_record(RECORD)
    assert read is not None
    question, gold, metadata = read
    problem = Problem("demo/0", "code_edit", question, gold, "demo", metadata)
    task.check_gold(problem)

    async def worked() -> Verdict:
        async with await graders.open() as sandbox:
            for path, content in task.files(problem).items():
                await sandbox.write(path, content)
            result = await sandbox.bash(script)
            assert result.failure == "ok", result
            return await task.verify(problem, Attempt("done", sandbox, (), graders))

    return loop.run(worked())


def wrote(text: str, path: str = "stats.py") -> str:
    return f"cat > {path} << 'END'\n{text}END\n"


def test_a_right_solution_that_uses_them(graders: Sandboxes, loop: asyncio.Runner) -> None:
    verdict = verdict_on(graders, loop, wrote(SOLUTION))
    assert verdict.outcome == "correct", verdict


@pytest.mark.parametrize(
    "script",
    [
        f"mkdir conf; {LIMITS_0} > conf/__init__.py; sed -i s/-1/0/ stats.py",
        wrote("import conf\nconf.LIMIT = 0\nconf.twice = lambda n: 10\ndef most():\n    return 0\n"),
        wrote("import sys, types\nsys.modules['conf'] = types.SimpleNamespace(LIMIT=0)\ndef most():\n    return 0\n"),
        f"mkdir checks/limits; {wrote(HOLDS, 'checks/limits/__init__.py')} {wrote(HOLDS, 'checks/limits.py')}",
        "echo 'import checks.limits\nchecks.limits.holds = lambda: True' > checks/__init__.py",
    ],
    ids=["a package in the way", "changed when it runs", "replaced", "another check", "a package that replaces"],
)
def test_what_the_policy_makes_of_them_decides_nothing(graders: Sandboxes, loop: asyncio.Runner, script: str) -> None:
    verdict = verdict_on(graders, loop, script)
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict
