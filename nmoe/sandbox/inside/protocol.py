"""The messages between host and agent: sizes, a header, and blobs (bytes).

A request's header is a Python literal, which the agent accepts only from the host. An answer's header is one line of text, because
the host trusts nothing from the sandbox unchecked.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False  # the module typing is slow to load, and only a type checker needs it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

SIZES = struct.Struct("<II")  # of the header and of the blobs together


def request(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    return _message(repr((header, [len(blob) for blob in blobs])), blobs)


def parse_request(header: bytes, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    fields, sizes = eval(header)
    return fields, _split(body, sizes)


def answer(
    failure: str,
    exit_code: int | None,
    times: tuple[float, float, float],
    out: bytes | bytearray,
    err: bytes | bytearray,
) -> bytes:
    """Encodes an answer of the agent. `times` are wall-clock, CPU and starved seconds."""
    shown = " ".join(f"{one:.6f}" for one in times)
    return _message(f"{failure} {exit_code} {shown} {len(out)}", (out, err))


def parse_answer(header: bytes, body: bytes) -> tuple[str, int | None, tuple[float, float, float], bytes, bytes]:
    """Parses an answer of the agent. Raises ValueError for anything that `answer` does not write."""
    failure, code, wall_s, cpu_s, starved_s, size = header.decode("ascii").split(" ")
    times = float(wall_s), float(cpu_s), float(starved_s)
    return failure, None if code == "None" else int(code), times, body[: int(size)], body[int(size) :]


def _message(header: str, blobs: Sequence[bytes | bytearray]) -> bytes:
    text = header.encode()
    return b"".join([SIZES.pack(len(text), sum(map(len, blobs))), text, *blobs])


def _split(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    parts, start = [], 0
    for size in sizes:
        parts.append(body[start : start + size])
        start += size
    return parts
