"""The keys of a GGUF file's metadata that belong to its model: `llama.block_count`, where the architecture is `llama`."""

from __future__ import annotations

from typing import Any

from nmoe.gguf_file import GGUFFile

_NEEDED: Any = object()


def own_key(file: GGUFFile, key: str, kind: type, default: Any = _NEEDED) -> Any:
    """A value of the model's own keys, such as `block_count`. Raises UserError where it has another type, or no default and is
    absent."""
    name = f"{file.architecture}.{key}"
    return file.need(name, kind) if default is _NEEDED else file.get(name, kind, default)


def own_real(file: GGUFFile, key: str, default: Any = _NEEDED) -> Any:
    """A number in fp32, as it was written before it was rounded: 1e-05 and not 9.999999747378752e-06."""
    value = own_key(file, key, float, default)
    return value if value is None else float(f"{value:.7g}")
