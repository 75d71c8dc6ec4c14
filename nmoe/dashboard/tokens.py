"""The tokens of one sample: their texts, from the run's tokenizer, and their columns, read by byte offset from samples/."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_TYPES = {"F32": ("f", 4), "I64": ("q", 8), "U8": ("B", 1), "U16": ("H", 2)}
_FLOATS = ("advantage", "logprob", "entropy", "weight", "gradient")


class ColumnsFile:
    """samples/step_000010.safetensors, as nmoe.rl.recording writes it."""

    def __init__(self, path: Path) -> None:
        """Reads the file's header. Raises OSError or ValueError if there is no such file."""
        self._file = path.open("rb")
        (size,) = struct.unpack("<Q", self._file.read(8))
        if size > 1 << 24:
            raise ValueError("no header")
        header = json.loads(self._file.read(size))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._tensors: dict[str, Any] = header
        self._data = 8 + size

    def __enter__(self) -> ColumnsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def values(self, name: str, first: int, count: int) -> list[Any]:
        """Returns rows of a tensor; a row of several dimensions is a flat list."""
        about = self._tensors[name]
        code, size = _TYPES[about["dtype"]]
        width = 1
        for length in about["shape"][1:]:
            width *= length
        start, end = about["data_offsets"]
        self._file.seek(self._data + start + first * width * size)
        data = array(code)
        data.frombytes(self._file.read(min(count * width * size, end - start - first * width * size)))
        flat = data.tolist()
        return flat if len(about["shape"]) == 1 else [flat[at : at + width] for at in range(0, len(flat), width)]

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name]["shape"])


def columns_of(run: Path, step: int, line: int, mask: Sequence[int], first: int, count: int) -> dict[str, Any]:
    """Returns the columns of the tokens [first, first + count) of a sample, each with None at tokens that were not sampled, and
    `gradient_share`, a token's part of the batch's gradient; {} if none were recorded."""
    try:
        with ColumnsFile(run / "samples" / f"step_{step:06d}.safetensors") as file:
            counts = file.values("tokens", 0, line + 1)
            # Counts of another file than the lines': both are written anew when a run is resumed.
            if line >= len(counts) or counts[line] != sum(mask):
                return {}
            before, last = sum(mask[:first]), sum(mask[: first + count])
            start = sum(counts[:line]) + before
            found: dict[str, Any] = {}
            for name in (*_FLOATS, "experts"):
                if name in file:
                    values = iter(file.values(name, start, last - before))
                    found[name] = [next(values, None) if bit else None for bit in mask[first : first + count]]
            if "gradient" in found and (total := float(file.metadata.get("gradient_sum", 0))):
                found["gradient_share"] = [None if g is None else abs(g) / total for g in found["gradient"]]
            if "experts" in file:
                found["layers"] = file.shape("experts")[1]
            return found
    except (OSError, ValueError, KeyError, struct.error):
        return {}


class Vocabulary:
    """The bytes of each token id."""

    def __init__(self, directories: Sequence[Path]) -> None:
        """Reads the first tokenizer that one of the directories holds."""
        self._bytes: dict[int, bytes] = {}
        for directory in directories:
            try:
                self._bytes = _vocabulary(directory)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            if self._bytes:
                return

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token; bytes that are no text by themselves are shown as numbers, and a token of no known text
        as its id."""
        return [self._text(id_) for id_ in ids]

    def _text(self, id_: int) -> str:
        found = self._bytes.get(id_)
        if found is None:
            return f"‹{id_}›"
        try:
            return found.decode()
        except UnicodeDecodeError:
            return f"‹{found.hex(' ')}›"


def tokenizers_of(run: Path, tables: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the directories that may hold a run's tokenizer, its own first."""
    yield run / "replay" / "tokenizer"
    yield from sorted((run / "checkpoints").glob("step_*"), reverse=True)
    model = tables.get("model") or {}
    for key in ("tokenizer", "path"):
        if isinstance(model.get(key), str):
            path = Path(model[key])
            yield path
            yield from (path / "checkpoints" / name for name in ("best", "latest"))
            yield from (path / "rl" / "checkpoints" / name for name in ("best", "latest"))


def _vocabulary(directory: Path) -> dict[int, bytes]:
    if (file := directory / "tokenizer.json").is_file():
        return _of_json(json.loads(file.read_bytes()))
    pairs = (line.split() for line in (directory / "tiktoken.model").read_bytes().splitlines() if line)
    return {int(rank): base64.b64decode(token) for token, rank in pairs}


def _of_json(definition: dict[str, Any]) -> dict[int, bytes]:
    vocabulary = definition["model"]["vocab"]
    pairs = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((entry[0], id_) for id_, entry in enumerate(vocabulary))
    )
    byte_level = '"ByteLevel"' in json.dumps([definition.get("decoder"), definition.get("pre_tokenizer")])
    read = _of_byte_level if byte_level else _of_pieces
    found = {id_: read(token) for token, id_ in pairs}
    return found | {one["id"]: one["content"].encode() for one in definition.get("added_tokens", ())}


def _alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for (GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _of_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[sign] for sign in token)
    except KeyError:
        return token.encode()


def _of_pieces(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
