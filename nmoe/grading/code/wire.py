"""The message format between judge and candidate: one JSON value per message, decoded only to exact builtin types.

A value that JSON cannot express is an object with one key: {"tuple": [...]}, {"set": [...]}, {"dict": [[key, value], ...]},
{"bytes": "00ff"}, {"int": "0x..."}, {"complex": [re, im]}, {"range": [start, stop, step]}, {"fraction": [1, 3]},
{"decimal": "0.1"}, {"iterator": [...]}. An object that stays with its owner is
{"handle": 3}, its number there. {"builtin": "int"} is a builtin type, {"exception": [names]} an exception class and its bases.
A subclass is sent as the builtin that it extends, a numpy scalar as Python's. Runs inside sandboxes, on the standard library
alone.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

MAX_BYTES = 4 << 20
_MAX_DEPTH = 60
_MAX_ITEMS = 100_000
# Of a set's or a dictionary's items whose hash another one has. Numbers of one hash can be chosen, and take quadratic time.
_MAX_COLLISIONS = 1_000
_LENGTH = struct.Struct("<I")
# Python writes every float to JSON exactly. A long int is written in hexadecimal: Python limits decimal digits.
_LONG = 1 << 1000


class WireError(Exception):
    """A value that cannot be sent, or a malformed message."""


OBJECTS = ("handle", "builtin", "exception")


def encode(value: Any, of_object: Callable[[Any], dict[str, Any]], depth: int = 0) -> Any:
    """Encodes a value as JSON data; `of_object` encodes values that are not plain data, under one of the keys OBJECTS.

    Raises WireError for data that is nested too deep or too long.
    """
    if depth > _MAX_DEPTH:
        raise WireError("nested too deep, or within itself")

    def inner(items: Any) -> list[Any]:
        found = list(islice(items, _MAX_ITEMS + 1))
        if len(found) > _MAX_ITEMS:
            raise WireError(f"more than {_MAX_ITEMS} items")
        return [encode(item, of_object, depth + 1) for item in found]

    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return int(value) if -_LONG < value < _LONG else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list):
        return inner(list.__iter__(value))
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {name: inner(iter(value))}
    if isinstance(value, range):
        return {"range": inner(_bounds(value))}
    if isinstance(value, dict):
        return {"dict": inner(iter(dict.items(value)))}
    # A value of these classes exists only where the module has been loaded.
    if "fractions" in sys.modules and isinstance(value, sys.modules["fractions"].Fraction):
        return {"fraction": inner((value.numerator, value.denominator))}
    if "decimal" in sys.modules and isinstance(value, sys.modules["decimal"].Decimal):
        return {"decimal": str(value)}
    if isinstance(value, Iterator):
        return {"iterator": inner(value)}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), of_object, depth + 1)
    return of_object(value)


def decode(data: Any, to_object: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """Decodes a message; `to_object` decodes values under one of the keys OBJECTS. Raises WireError for anything that `encode` does
    not produce.
    """
    if depth > _MAX_DEPTH + 5:
        raise WireError("nested too deep")
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is list:
        if len(data) > _MAX_ITEMS:
            raise WireError(f"more than {_MAX_ITEMS} items")
        return [decode(item, to_object, depth + 1) for item in data]
    if type(data) is not dict or len(data) != 1:
        raise WireError("no message")
    ((kind, body),) = data.items()
    try:
        match kind:
            case "int":
                return int(body, 16)
            case "bytes":
                return bytes.fromhex(body)
            case "complex":
                return complex(float(body[0]), float(body[1]))
            case "decimal":
                return _decimal(body)
        if kind in OBJECTS:
            return to_object(kind, body)
        items = decode(body, to_object, depth + 1)
        if type(items) is list:
            match kind:
                case "tuple":
                    return tuple(items)
                case "set":
                    return set(_spread(items))
                case "frozenset":
                    return frozenset(_spread(items))
                case "dict":
                    _spread([key for key, _ in items])
                    return dict(items)
                case "range":
                    found = range(*items)
                    _bounds(found)
                    return found
                case "fraction":
                    return _fraction(*items)
                case "iterator":
                    return iter(items)
    except (TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
        raise WireError(f"no {kind}: {error}") from None
    raise WireError("no message")


def _bounds(value: range) -> tuple[int, int, int]:
    """Returns start, stop and step of a range. Raises WireError if it is longer than a list may be."""
    if value[_MAX_ITEMS:]:
        raise WireError(f"more than {_MAX_ITEMS} items")
    return value.start, value.stop, value.step


def _spread(items: list[Any]) -> list[Any]:
    """Returns the items of a set, or the keys of a dictionary, unchanged. Raises WireError if many have equal hashes, which would
    take quadratic time.
    """
    if len(items) - len(set(map(hash, items))) > _MAX_COLLISIONS:
        raise WireError("items of equal hashes")
    return items


def _fraction(numerator: int, denominator: int) -> Any:
    from fractions import Fraction

    return Fraction(numerator, denominator)


def _decimal(text: str) -> Any:
    from decimal import Decimal

    return Decimal(text)


def send(connection: socket.socket, message: Any) -> None:
    text = json.dumps(message).encode()
    if len(text) > MAX_BYTES:
        raise WireError(f"{len(text)} bytes in one message, more than {MAX_BYTES}")
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket) -> Any:
    """Receives the next message. Raises WireError if it is malformed, EOFError if the other process has closed the channel."""
    size = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
    if size > MAX_BYTES:
        raise WireError(f"{size} bytes in one message, more than {MAX_BYTES}")
    try:
        return json.loads(_exactly(connection, size))
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {error}") from None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(min(size - len(data), 1 << 16))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return bytes(data)
