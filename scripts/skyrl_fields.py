"""Writes the settings of a SkyRL wheel, each with its type, as JSON: what examples/skyrl/config.yaml may set.

pip download --no-deps --python-version 3.12 --only-binary=:all: skyrl==0.4.0
python scripts/skyrl_fields.py skyrl-0.4.0-*.whl > tests/examples/skyrl_fields.json
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = "skyrl/train/config/config.py"


def fields_of(name: str, classes: Mapping[str, ast.ClassDef]) -> dict[str, str]:
    """Returns a dataclass's fields with the texts of their types; those of its bases come first."""
    found: dict[str, str] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= fields_of(base.id, classes)
    body = [node for node in classes[name].body if isinstance(node, ast.AnnAssign)]
    return found | {ast.unparse(node.target): ast.unparse(node.annotation) for node in body}


def keys(name: str, classes: Mapping[str, ast.ClassDef], before: str = "") -> Iterator[tuple[str, str]]:
    """Yields the keys below a dataclass, as `trainer.policy.model.path`, each with its type."""
    for field, kind in fields_of(name, classes).items():
        inner = kind.removeprefix("Optional[").removesuffix("]")
        if inner in classes:
            yield from keys(inner, classes, f"{before}{field}.")
        else:
            yield f"{before}{field}", kind


def main() -> None:
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as files:
        source = files.read(SOURCE)
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    found = dict(keys("SkyRLTrainConfig", classes))
    made = {"version": wheel.name.split("-")[1], "sha256": hashlib.sha256(source).hexdigest(), "keys": found}
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
