"""OpenAI's own schemas of replies, in `shared/openai` beside the repository."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

FILE = Path(__file__).parents[2] / "shared" / "openai" / "openapi.json"


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(FILE.read_text())
    return _without_nullable(document)


def _without_nullable(value: Any) -> Any:
    """Returns a schema with OpenAPI 3.0's `nullable`, which 3.1 does not have and OpenAI's file uses, as a second type."""
    if isinstance(value, list):
        return [_without_nullable(one) for one in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _without_nullable(one) for key, one in value.items()}
    return {"anyOf": [schema, {"type": "null"}]} if value.get("nullable") is True else schema


def check(name: str, reply: Any) -> None:
    """Fails if a reply is not as the schema of this name says."""
    if not FILE.exists():
        pytest.skip("OpenAI's schemas are not beside the repository")
    schema = {"$ref": f"#/components/schemas/{name}", "components": _document()["components"]}
    errors = [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(reply)]
    assert not errors, errors
