"""What the checks of `nmoe serve` share: a checkpoint to serve, a relay that records what clients and server say, and a process's
memory and CPU time."""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from chat_templates import qwen  # noqa: E402
from served_client import Client, serving  # noqa: E402
from tiny_models import tiny_family  # noqa: E402

from nmoe.model.checkpoint import export_model  # noqa: E402

__all__ = ["ROOT", "Client", "cpu_s", "draw", "largest_mb", "recording", "resident_mb", "serving"]
# What a connection's ends say to each other alone, and what the relay says itself.
BETWEEN = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server", "host"}


def draw(directory: Path, **changes: Any) -> Path:
    """Writes a mixture of experts with drawn weights and a chat template in the style of Qwen3; returns its directory."""
    directory.mkdir()
    tokenizer = qwen(directory)
    shape = {"context_tokens": 4096, "vocab_size": tokenizer.vocab_size} | changes
    export_model(tiny_family("qwen3_moe", 0, **shape), directory)
    tokenizer.save(directory)
    return directory


@contextmanager
def recording(url: str, file: Path) -> Iterator[str]:
    """Passes requests on to the server at `url` inside the context, and adds each with its reply to a file of JSON lines. Yields
    the relay's own address. A reply is passed on when it is whole."""
    lock = threading.Lock()
    to = url.removeprefix("http://").rstrip("/")

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = http.client.HTTPConnection(to, timeout=60)
            sent = {name: value for name, value in self.headers.items() if name.lower() not in BETWEEN}
            connection.request(self.command, self.path, body, sent)
            answer = connection.getresponse()
            reply = answer.read()
            connection.close()
            record = {"method": self.command, "path": self.path, "body": body.decode("latin-1")}
            record |= {"status": answer.status, "type": answer.getheader("content-type", ""), "reply": reply.decode()}
            with lock, file.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in BETWEEN:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = do_DELETE = pass_on

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that has gone is no fault
                super().handle_error(request, client_address)

    relay = Quiet(("127.0.0.1", 0), Relay)
    thread = threading.Thread(target=relay.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{relay.server_port}"
    finally:
        relay.shutdown()
        thread.join()
        relay.server_close()


def resident_mb(process: int) -> float:
    """Returns the memory that a process holds, in 2**20 bytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def largest_mb(process: int) -> float:
    """Returns the most memory that a process has held so far, in 2**20 bytes."""
    (line,) = [one for one in Path(f"/proc/{process}/status").read_text().splitlines() if one.startswith("VmHWM:")]
    return int(line.split()[1]) / 2**10


def cpu_s(process: int) -> float:
    """Returns the CPU seconds of a process, of its threads and of the system for it."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
