"""Sends `nmoe serve` malformed requests, and holds what it answers and keeps against what a server owes:

    python .ci/served_fuzz.py CLIENTS_PYTHON [--requests 10000] [--seconds 90] [--seed 0]

First schemathesis asks for what OpenAI's description of its API (../shared/openai, where it is) allows and forbids. Then come
requests whose bytes are mutated, over raw sockets, 16 at once; among them valid ones, clients that leave in the middle of a stream,
and clients that read nothing. Valid requests have to be answered with 200, others with 200, 4xx or a closed connection, none with
5xx. The memory of the server's process may grow by 5 MB between the thousandth request and the end. Then the server has to be idle,
and to answer the valid requests as it did before, in the form that OpenAI's description wants.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from served import ROOT, Client, cpu_s, draw, largest_mb, recording, resident_mb, serving
from served_requests import REQUESTS

OPENAPI = ROOT.parent / "shared/openai/openapi.json"
AT_ONCE, VALID_EVERY, LEAVING_EVERY, SILENT_EVERY = 16, 10, 50, 250
WARM_REQUESTS, MOST_MB = 1000, 5.0
LEAVES_AFTER_S, SILENT_S = 0.3, 2.0
# The context of CONTEXT tokens bounds a request's work, whatever its mutated numbers say. The deadline is far away: a busy machine
# would reach a near one, whose 504 is no fault.
CONTEXT, DEADLINE_S = 512, 600
REPLY_S = DEADLINE_S + 30.0
# The cache is small, so that its pages, which count as memory once they are written, are so early.
OPTIONS = (
    *("--max-n", "4", "--deadline", str(DEADLINE_S), "--max-body-mb", "1", "--max-sequences", "16"),
    *("--threads", "1", "--cache-mb", "2"),
)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -1e308, 0.5, "", "x", "\ud800", [], {}, [[]], [None], {"a": 1}, "0", [-1],
    [10**9], [["x"]], {"type": "function"}, [{"role": "user"}], [{"role": "user", "content": 3}], "\x00", "tiny", "/../", 1e-320,
)  # fmt: skip
STREAM = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}


def raw(method: str, path: str, body: Any) -> bytes:
    """Returns the bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values inside a body."""
    found = [at] if at else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [path for key, one in pairs for path in places(one, (*at, key))]


def with_other_value(draw: random.Random, method: str, path: str, body: Any) -> bytes:
    """Returns a request of which a value is another, missing, beside itself, or nested deeply."""
    body = json.loads(json.dumps(body))
    *above, last = draw.choice(places(body))
    table = body
    for key in above:
        table = table[key]
    how = draw.randrange(5)
    if how == 0:
        del table[last]
    elif how == 1 and isinstance(table, dict):
        table[draw.choice(["x", "", "model ", "n\x00", "seed", "stream", "logprobs", "tools"])] = draw.choice(VALUES)
    elif how == 2:
        table[last] = "@"
        nested = draw.choice(
            ["[" * 50_000, "{}", "[" * 50_000 + "]" * 50_000, '{"a":' * 20_000 + "1" + "}" * 20_000, "NaN", "1e999"]
        )
        data = json.dumps(body).replace('"@"', nested).encode()
        return raw(method, path, None).replace(b"Content-Length: 0", b"Content-Length: %d" % len(data)) + data
    else:
        table[last] = draw.choice(VALUES)
    return raw(method, path, body)


def with_other_bytes(draw: random.Random, request: bytes, other: bytes) -> bytes:
    """Returns a request of which bytes are others, missing, added, or those of a second request."""
    found = bytearray(request)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(found) or 1)
        how = draw.randrange(6)
        if how == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif how == 1:
            del found[at : at + draw.choice((1, 2, 20))]
        elif how == 2:
            found[at:at] = draw.randbytes(draw.choice((1, 2, 20)))
        elif how == 3:
            found[at:at] = found[at : at + draw.randrange(40)]
        elif how == 4:
            found[at:at] = draw.choice(
                (b"\xff\xfe", b"\x00", b"\r\n", b"\r\n\r\n", b"\xc0\xaf", b'"', b"}", b"Transfer-Encoding: chunked\r\n")
            )
        else:
            found[at:] = other[at:]
    return bytes(found)


def with_other_head(draw: random.Random, request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    size = draw.choice((b"-1", b"0", b"7", b"99999999", b"99999999999999999999", b"x", b"1, 2", b""))
    lines = [b"Content-Length: " + size if line.startswith(b"Content-Length") else line for line in lines]
    lines[1:1] = draw.choice(
        ([], [b"Transfer-Encoding: chunked"], [b"X: " + b"y" * 70_000], [b"Content-Encoding: gzip"], [b"Expect: 100-continue"],
         [b"Host: evil"], [b"Origin: http://evil.example"], [b"Authorization: Bearer \xff"], [b": none"],
         [b"Upgrade: websocket", b"Connection: Upgrade"])
    )  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def mutated(draw: random.Random) -> bytes:
    method, path, body = draw.choice(REQUESTS)
    kind = draw.randrange(10)
    if kind < 5 and body:
        return with_other_value(draw, method, path, body)
    if kind < 9:
        return with_other_bytes(draw, raw(method, path, body), raw(*draw.choice(REQUESTS)))
    return with_other_head(draw, raw(method, path, body))


def whole(request: bytes) -> bool:
    """Says whether a request has all the bytes that it announces, so that a server can answer before its client goes."""
    head, found, body = request.partition(b"\r\n\r\n")
    sizes = re.findall(rb"(?im)^content-length: *(\d+) *\r?$", head)
    return (
        bool(found) and b"chunked" not in head.lower() and len(sizes) < 2 and len(body) >= int(sizes[0] if sizes else 0)
    )


def complete(reply: bytes) -> bool:
    head, found, body = reply.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return complete(body)
    size = re.search(rb"(?i)content-length: *(\d+)", head)
    return bool(found) and (len(body) >= int(size[1]) if size else body.endswith(b"0\r\n\r\n"))


async def ask(port: int, request: bytes, patience_s: float = REPLY_S) -> bytes | None:
    """Returns what the server says until it closes or the reply is whole, or None if it says nothing within the time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reply = b""
    try:
        async with asyncio.timeout(patience_s):
            writer.write(request)
            while not complete(reply) and (part := await reader.read(65536)):
                reply += part
    except TimeoutError:
        return reply or None
    except ConnectionError:
        pass
    finally:
        writer.close()
    return reply


async def silent(port: int) -> None:
    """Asks for a stream and reads nothing of it."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", port))
        await loop.sock_sendall(
            slow, raw("POST", "/v1/chat/completions", STREAM | {"n": 4, "logprobs": True, "top_logprobs": 20})
        )
        await asyncio.sleep(SILENT_S)


class Fuzz:
    """The mutated requests of one seed. `statuses` counts answers; `wrong` has what a server should not have said."""

    def __init__(self, port: int, process: int, requests: int, seed: int) -> None:
        self.port, self.process, self.requests, self.seed = port, process, requests, seed
        self.statuses: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.sent = 0
        self.warm_mb = 0.0

    async def run(self) -> None:
        await asyncio.gather(*(self._send_all() for _ in range(AT_ONCE)))

    async def _send_all(self) -> None:
        while self.sent < self.requests:
            number = self.sent
            self.sent += 1
            if number == WARM_REQUESTS:
                self.warm_mb = resident_mb(self.process)
            draw = random.Random(f"{self.seed}/{number}")
            if number % SILENT_EVERY == SILENT_EVERY - 1:
                await silent(self.port)
                self.statuses["read nothing"] += 1
            elif number % LEAVING_EVERY == LEAVING_EVERY - 1:
                await ask(self.port, raw("POST", "/v1/chat/completions", STREAM | {"n": 2}), draw.uniform(0, 0.2))
                self.statuses["left"] += 1
            elif number % VALID_EVERY == 0:
                method, path, body = draw.choice(REQUESTS)
                own = {"request_id": str(number)} if "request_id" in (body or {}) else {}
                await self._one(number, raw(method, path, body and body | own), valid=True)
            else:
                await self._one(number, mutated(draw), valid=False)

    async def _one(self, number: int, request: bytes, valid: bool) -> None:
        reply = await ask(self.port, request, REPLY_S if whole(request) else LEAVES_AFTER_S)
        if reply is None and not whole(request):
            self.statuses["client left before its request was whole"] += 1
            return
        found = re.match(rb"HTTP/1\.[01] (\d\d\d)", reply or b"")
        status = int(found[1]) if found else 0
        self.statuses["none" if reply is None else f"{'valid: ' if valid else ''}{status or 'closed'}"] += 1
        good = status == 200 if valid else reply is not None and (status == 0 or status // 100 in (1, 2, 4))
        if not good:
            self.wrong.append(f"request {number}: {request[:600]!r}... -> {(reply or b'no answer')[:400]!r}")


def described(file: Path, models: list[str]) -> Path:
    """Writes OpenAI's description, cut to the routes of this server, with refusals."""
    document = json.loads(OPENAPI.read_text())
    document["servers"], document["security"] = [], []
    routes = {"/chat/completions": "post", "/completions": "post", "/models": "get", "/models/{model}": "get"}
    document["paths"] = {path: {method: document["paths"][path][method]} for path, method in routes.items()}
    refusal = {
        "description": "refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
    }
    for path, method in routes.items():
        operation = document["paths"][path][method]
        operation["responses"]["4XX"] = refusal
        operation["responses"].pop("429", None)
        operation.pop("security", None)
    for name in ("CreateChatCompletionRequest", "CreateCompletionRequest"):
        for part in document["components"]["schemas"][name].get("allOf", [document["components"]["schemas"][name]]):
            if "model" in part.get("properties", {}):
                part["properties"]["model"] = {"type": "string", "enum": models}
    file.write_text(json.dumps(document))
    return file


def by_description(python: str, client: Client, place: Path, seconds: int, seed: int) -> bool:
    program = Path(python).absolute().parent / "schemathesis"  # the command runs elsewhere
    url = str(client.http.base_url).rstrip("/")
    command = [str(program), "run", str(described(place / "openapi.json", ["tiny"])), "--url", f"{url}/v1"]
    command += [
        "--phases",
        "coverage,fuzzing",
        "--max-time",
        str(seconds),
        "--mode",
        "all",
        "--no-shrink",
        "--seed",
        str(seed),
    ]
    command += [
        "--checks",
        "not_a_server_error,status_code_conformance,response_schema_conformance",
        "--request-timeout",
        "60",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    print(done.stdout[-6000:] if done.returncode else "\n".join(done.stdout.splitlines()[-12:]))
    return done.returncode == 0


def answers(client: Client) -> dict[str, Any]:
    """Returns what the server says to the valid requests, but for what differs from one request to the next: ids, times, and how a
    stream is divided."""
    found = {}
    for method, path, body in REQUESTS:
        if path == "/metrics" or ((body or {}).get("temperature") and "seed" not in (body or {})):
            continue
        reply = client.http.request(method, path, json=body) if body is not None else client.http.request(method, path)
        asked = f"{method} {path} {json.dumps(body)}"
        assert reply.status_code == 200, f"{asked}: {reply.status_code} {reply.text[:500]}"
        if reply.headers["content-type"].startswith("text/event"):
            chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            tokens: collections.Counter[int] = collections.Counter()
            parts: dict[int, str] = collections.defaultdict(str)
            for choice in choices:
                parts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                tokens[choice["index"]] += len(choice.get("token_ids") or ())
            found[asked] = (sorted(parts.items()), sorted(tokens.items()), chunks[-1].get("usage"))
        else:
            found[asked] = re.sub(r'"(id|created|request_id)": ?("[^"]*"|\d+)', r'"\1":0', reply.text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failed = list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        checkpoint = draw(place / "drawn", context_tokens=CONTEXT)
        with serving(checkpoint, "--numerics", "exact", *OPTIONS) as client:
            before = answers(client)
            if (
                OPENAPI.exists()
                and arguments.seconds
                and not by_description(arguments.python, client, place, arguments.seconds, arguments.seed)
            ):
                failed.append("schemathesis found faults")
            port, process = client.http.base_url.port, client.process.pid
            assert port is not None
            fuzz = Fuzz(port, process, arguments.requests, arguments.seed)
            began = time.perf_counter()
            asyncio.run(fuzz.run())
            took = time.perf_counter() - began
            time.sleep(SILENT_S)
            grown = resident_mb(process) - fuzz.warm_mb
            spent = cpu_s(process)
            time.sleep(2)
            idle = cpu_s(process) - spent
            print(f"{fuzz.sent} requests in {took:.0f} s: {dict(sorted(fuzz.statuses.items()))}")
            print(
                f"memory after {WARM_REQUESTS} requests {fuzz.warm_mb:.1f} MB, since then {grown:+.1f} MB (at most {MOST_MB:g}); "
                f"the most at any time {largest_mb(process):.1f} MB"
            )
            print(f"{idle:.2f} CPU s of the server in two seconds without requests")
            for fault in fuzz.wrong[:12]:
                print(f"WRONG: {fault}")
            failed += [f"{len(fuzz.wrong)} answers are wrong"] if fuzz.wrong else []
            failed += ["memory grew"] if arguments.requests > WARM_REQUESTS and grown > MOST_MB else []
            failed += ["the server computes without requests"] if idle > 0.5 else []
            for asked, now in answers(client).items():
                if now != before[asked]:
                    failed.append("it answers otherwise than before")
                    print(f"{asked}\n  before {before[asked]}\n  now    {now}")
            if OPENAPI.exists():
                with recording(str(client.http.base_url), place / "records.jsonl") as url:
                    asked = Client(type(client.http)(base_url=url, timeout=60, trust_env=False), client.process)
                    answers(asked)
                    asked.http.close()
                schema = [
                    sys.executable,
                    str(ROOT / ".ci/openai_schema.py"),
                    str(OPENAPI),
                    str(place / "records.jsonl"),
                ]
                failed += ["replies are not as OpenAI describes them"] if subprocess.run(schema).returncode else []
    print("; ".join(failed) or "all as it should be")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
