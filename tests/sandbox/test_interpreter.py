"""The interpreter inside a sandbox, wherever it lies: it runs, and what lies beside it is not there."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import LIMITS

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox import interpreter, sandboxes
from nmoe.sandbox.api import Result, SandboxSetupError
from nmoe.sandbox.interpreter import Interpreter, beside, interpreter_of
from nmoe.sandbox.sandboxes import Sandboxes

REAL = os.path.realpath(sys.executable)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home directory with a secret. Not below /tmp, where a sandbox has its own files."""
    directory = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="nmoe-home-"))
    directory.chmod(0o755)
    (directory / ".ssh").mkdir()
    (directory / ".ssh/id_rsa").write_text("PRIVATE")
    yield directory
    shutil.rmtree(directory)


def link(home: Path) -> Path:
    """~/bin/python, which leads to an interpreter elsewhere by way of another link."""
    (home / "bin").mkdir()
    (home / "bin/secret.sh").write_text("PRIVATE")
    (home / "bin/python3").symlink_to(REAL)
    (home / "bin/python").symlink_to("python3")
    return home / "bin/python"


def environment(home: Path) -> Path:
    """A virtual environment that is the home directory itself."""
    site = home / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    (site / "only_here.py").write_text("x = 42\n")
    (home / "pyvenv.cfg").write_text(f"home = {os.path.dirname(REAL)}\n")
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(REAL)
    return home / "bin/python"


@pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("make", [link, environment])
def test_nothing_beside_the_interpreter_is_seen(home: Path, level: str, make: object) -> None:
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed (apt-get install bubblewrap)")
    python = make(home)  # type: ignore[operator]
    settings = SandboxSettings(level=level, python=str(python), warm=0)  # type: ignore[arg-type]
    own = ["bin"] if make is link else ["bin", "lib", "pyvenv.cfg"]
    bin_ = ["python", "python3"] if make is link else ["python"]
    code = (
        "import os, sys\n"
        f"print(sorted(os.listdir({str(home)!r})), sorted(os.listdir({str(home / 'bin')!r})))\n"
        f"print(open({str(home / '.ssh/id_rsa')!r}).read())\n"
    )

    async def look() -> tuple[Result, Result, Result]:
        opened = Sandboxes(settings, LIMITS)
        async with await opened.open() as sandbox:
            found = await sandbox.python(code), await sandbox.python("import only_here; print(only_here.x)")
            shell = await sandbox.bash("python -c 'print(6 * 7)'")
        await opened.close()
        return *found, shell

    seen, imported, shell = asyncio.run(look())
    assert seen.stdout.decode() == f"{own} {bin_}\n"
    assert b"FileNotFoundError" in seen.stderr
    assert imported.stdout == (b"42\n" if make is environment else b"")
    assert shell.stdout == b"42\n"


def test_the_probe_sees_what_lies_beside_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: the whole directory above `bin`."""
    settings = SandboxSettings(level="landlock", python=str(link(home)), warm=0)
    own = interpreter_of(settings)
    around = {directory: names for directory, names in beside(own).items() if directory.startswith(str(home))}
    assert around == {str(home): ["bin"], str(home / "bin"): ["python", "python3"]}
    shown = Interpreter(own.python, [*own.visible, str(home)], [], own.site, own.directories)
    monkeypatch.setattr(sandboxes, "interpreter_of", lambda _: shown)
    monkeypatch.setattr("nmoe.sandbox.probe.beside", lambda _: around)
    with pytest.raises(SandboxSetupError, match="what got through: seeing what lies beside the interpreter"):
        Sandboxes(settings, LIMITS)


def test_an_installation_is_shown_by_its_own_parts(tmp_path: Path) -> None:
    for name in ("opt/lib/python3.11/os.py", "opt/share/doc", "opt/bin/python3.11", "opt/.netrc"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
    opt = tmp_path / "opt"
    found = interpreter_of(SandboxSettings(python=str(opt / "bin/python3.11"), visible=(str(tmp_path / "opt/share"),)))
    assert found.visible == sorted(map(str, (opt / "bin", opt / "lib", opt / "share")))
    assert (found.links, found.site, found.directories) == ([], [], [str(opt / "bin")])
    assert beside(found) == {str(opt): ["bin", "lib", "share"]}


def test_the_systems_own_interpreter_needs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.os, "access", lambda *_: True)
    monkeypatch.setattr(interpreter.os.path, "islink", lambda _: False)
    monkeypatch.setattr(interpreter.os.path, "realpath", lambda path: path)
    for python in ("/usr/bin/python3", "/bin/python3", "/usr/local/bin/python3"):
        found = interpreter_of(SandboxSettings(python=python))
        assert (found.visible, found.links, beside(found)) == ([], [], {})
