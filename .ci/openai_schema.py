"""Validates recorded replies of a server against OpenAI's own description of its API; .venv-clients has the package for it:

    .venv-clients/bin/python .ci/openai_schema.py OPENAPI_JSON RECORDS...

Every whole reply, chunk of a stream and refusal has to be what the description says. In two places OpenAI's own service leaves it,
and so may a server: the first token of an echoed prompt has no log-probability (null), and a completion's chunks before its last
have no reason for their end (null). Prints how many of each kind were checked; exits with 1 if one is wrong or none was checked.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

WHOLE = {
    "POST /v1/chat/completions": "CreateChatCompletionResponse",
    "POST /v1/completions": "CreateCompletionResponse",
    "GET /v1/models": "ListModelsResponse",
    "GET /v1/models/NAME": "Model",
}
CHUNK = {
    "POST /v1/chat/completions": "CreateChatCompletionStreamResponse",
    "POST /v1/completions": "CreateCompletionResponse",
}
SHOWN = 10


def with_null(node: Any) -> Any:
    """Says `nullable: true`, which OpenAPI 3.1 no longer knows, as JSON Schema says it."""
    if isinstance(node, list):
        return [with_null(one) for one in node]
    if not isinstance(node, dict):
        return node
    table = {name: with_null(one) for name, one in node.items()}
    return {"anyOf": [table, {"type": "null"}]} if node.get("nullable") is True else table


def validators(path: Path) -> tuple[dict[str, Draft202012Validator], Draft202012Validator]:
    """Returns a validator for each schema of a whole reply, and that of a completion's chunk."""
    schemas = with_null(json.loads(path.read_text())["components"]["schemas"])
    null = {"type": "null"}
    logprobs = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]["logprobs"]
    for table in (
        logprobs["anyOf"][0]["properties"]["token_logprobs"],
        logprobs["anyOf"][0]["properties"]["top_logprobs"],
    ):
        table["items"] = {"anyOf": [table["items"], null]}
    chunk = json.loads(json.dumps(schemas["CreateCompletionResponse"]))
    choice = chunk["properties"]["choices"]["items"]["properties"]
    choice["finish_reason"] = {"anyOf": [choice["finish_reason"], null]}
    schemas["Chunk of a completion"] = chunk

    def validator(name: str) -> Draft202012Validator:
        escaped = name.replace(" ", "%20")
        return Draft202012Validator({"$ref": f"#/components/schemas/{escaped}", "components": {"schemas": schemas}})

    names = {*WHOLE.values(), *CHUNK.values(), "ErrorResponse"}
    return {name: validator(name) for name in names}, validator("Chunk of a completion")


def events(reply: str) -> list[Any]:
    """Returns the chunks of a stream. Raises ValueError for what is none."""
    lines = [line for line in reply.split("\n\n") if line]
    if not lines or lines.pop() != "data: [DONE]" or not all(line.startswith("data: ") for line in lines):
        raise ValueError("no stream of events that ends with [DONE]")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def faults(of_stream: list[Any]) -> list[str]:
    """Returns what no schema of a single chunk can say of a stream: it has one id, calls have theirs once, choices end once."""
    found = []
    if len({chunk["id"] for chunk in of_stream}) != 1:
        found.append("a stream has several ids")
    calls: dict[tuple[int, int], str] = {}
    ends: Counter[int] = Counter()
    for chunk in of_stream:
        for choice in chunk["choices"]:
            index = choice["index"]
            ends[index] += choice["finish_reason"] is not None
            for call in choice.get("delta", {}).get("tool_calls", []):
                at = (index, call["index"])
                if (at in calls) == ("id" in call):
                    found.append(f"call {at} has an id in a chunk that is not its first, or none in its first")
                calls.setdefault(at, call.get("id", ""))
    if len(set(calls.values())) != len(calls):
        found.append("two calls have one id")
    if any(count != 1 for count in ends.values()):
        found.append("a choice has no end, or several")
    return found


def main(openapi: str, *records: str) -> None:
    by_name, chunk_of_text = validators(Path(openapi))
    checked: Counter[str] = Counter()
    wrong: list[str] = []

    def check(about: str, validator: Draft202012Validator, value: Any) -> None:
        checked[about] += 1
        for error in validator.iter_errors(value):
            deepest = min(error.context, key=lambda one: -len(one.absolute_path)) if error.context else error
            wrong.append(f"{about}: {list(deepest.absolute_path)}: {deepest.message[:300]}")

    for line in (line for file in records for line in Path(file).read_text().splitlines()):
        record = json.loads(line)
        path = re.sub(r"^/v1/models/.+", "/v1/models/NAME", record["path"].partition("?")[0])
        route = f"{record['method']} {path}"
        try:
            if record["status"] >= 400:
                check("refusal", by_name["ErrorResponse"], json.loads(record["reply"]))
            elif route in CHUNK and record["type"].startswith("text/event-stream"):
                chunks = events(record["reply"])
                for chunk in chunks:
                    if "error" in chunk:
                        check("refusal in a stream", by_name["ErrorResponse"], chunk)
                    else:
                        validator = chunk_of_text if path == "/v1/completions" else by_name[CHUNK[route]]
                        check(f"{route}, chunk", validator, chunk)
                wrong += [f"{route}: {fault}" for fault in faults([one for one in chunks if "error" not in one])]
            elif route in WHOLE:
                check(route, by_name[WHOLE[route]], json.loads(record["reply"]))
        except (ValueError, KeyError) as error:
            wrong.append(f"{route}: {error!r}: {record['reply'][:200]}")
    for about, count in sorted(checked.items()):
        print(f"{about}: {count} checked")
    for fault, count in Counter(wrong).most_common(SHOWN):
        print(f"WRONG, {count} times: {fault}")
    sys.exit(1 if wrong or not checked else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
