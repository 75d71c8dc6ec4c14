"""Writes the request classes of an SGLang wheel, with their fields, and its options, as JSON: what the tests' SGLang takes.

pip download --no-deps sglang==0.5.23
python scripts/sglang_fields.py sglang-0.5.23-*.whl > tests/engine/sglang_fields.json
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

ROUTES = {
    "/generate": "GenerateReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
}
SOURCE = (
    "sglang/srt/managers/io_struct.py",
    "sglang/srt/entrypoints/http_server.py",
    "sglang/srt/sampling/sampling_params.py",
)
OPTIONS = "sglang/srt/arg_groups/fields/"


def classes_of(source: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def fields_of(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Returns a class's fields with the texts of their types; those of its bases come first."""
    found: dict[str, str] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= fields_of(base.id, classes)
    body = [node for node in classes[name].body if isinstance(node, ast.AnnAssign)]
    return found | {ast.unparse(node.target): ast.unparse(node.annotation) for node in body}


def main() -> None:
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as files:
        requests, routes, sampling = (files.read(name).decode() for name in SOURCE)
        options = {
            field
            for name in files.namelist()
            if name.startswith(OPTIONS) and name.endswith(".py")
            for group in (classes_of(files.read(name).decode()),)
            for one in group
            for field in fields_of(one, group)
        }
    for route, name in ROUTES.items():
        at = routes.index(f'"{route}"')
        if name not in routes[at : at + 400]:
            sys.exit(f"{wheel.name}: {route} takes no {name} any more")
    classes = classes_of(requests)
    # Fields below this line are the server's own, and no caller sets them.
    public = sampling[: sampling.index("    # --- Internal fields")]
    found = {name: fields_of(name, classes) for name in ROUTES.values()}
    found["SamplingParams"] = fields_of("SamplingParams", classes_of(public))
    made = {"version": wheel.name.split("-")[1], "routes": ROUTES, "classes": found}
    print(json.dumps(made | {"options": " ".join(sorted(options))}, indent=1))


if __name__ == "__main__":
    main()
