"""Checkpoints in one GGUF file, as llama.cpp writes them: read as the Hugging Face checkpoint that they were made from.

A file's metadata becomes the `config.json` of a family (`hf_config`), and its tensors those of that family under their names
(`GGUFTensors`, beside `Shards`), so that families know nothing of GGUF. Tensors are dequantised by the `gguf` library, as many rows
at a time as are asked for.

llama.cpp stores a model in its own way, which is undone here: rows of queries and keys in Llama's heads are in another order, norms
of Gemma have the one added that they scale by, and experts of a layer are one tensor. (`convert_hf_to_gguf.py` of llama.cpp.)
"""

# Shapes: E experts, N a product's outputs, D its inputs, G blocks of 32 numbers, W bytes of a block.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.gguf_file import GGUFFile, StoredTensor, read_header

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

_NUMBER = (int, float)


@dataclass(frozen=True)
class Source:
    """Where a Hugging Face tensor comes from: a stored one, or one expert of it, and what is done with its values.

    `heads` is the number of heads whose rows llama.cpp has put into another order, or 0.
    """

    stored: str
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0  # added to each value


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores one family."""

    config: Callable[[GGUFFile], dict[str, Any]]
    sources: Callable[[GGUFFile], Iterator[tuple[str, Source]]]


def _shared(file: GGUFFile, model_type: str, name: str) -> dict[str, Any]:
    """The keys of `config.json` that the families share."""
    arch = file.architecture
    heads, width = file.need(f"{arch}.attention.head_count", int), file.need(f"{arch}.embedding_length", int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path}: token_embd.weight is missing; it is not a whole language model")
    head_dim = file.get(f"{arch}.attention.key_length", int)
    if head_dim is None:
        head_dim = file.get(f"{arch}.rope.dimension_count", int, width // max(heads, 1))
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": file.get(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": file.need(f"{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.need(f"{arch}.context_length", int),
        "rms_norm_eps": file.need(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_theta": file.get(f"{arch}.rope.freq_base", float, 10_000.0),
        "rope_scaling": None,
    }


def _llama(file: GGUFFile) -> dict[str, Any]:
    return _shared(file, "llama", "LlamaForCausalLM") | {"hidden_act": "silu", "mlp_bias": False}


_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    f"self_attn.{name}_proj": f"attn_{stored}" for name, stored in zip("qkvo", ("q", "k", "v", "output"), strict=True)
}
_SWIGLU = {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def _named(file: GGUFFile, names: dict[str, str]) -> Iterator[tuple[str, Source]]:
    """The weights and biases that a file has of these modules, whose names are theirs to llama.cpp's."""
    for theirs, stored in names.items():
        for part in ("weight", "bias"):
            if f"{stored}.{part}" in file.tensors:
                yield f"{theirs}.{part}", Source(f"{stored}.{part}")


def _in_layers(file: GGUFFile, names: dict[str, str]) -> Iterator[tuple[str, Source]]:
    for layer in range(file.need(f"{file.architecture}.block_count", int)):
        yield from _named(
            file, {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{own}" for theirs, own in names.items()}
        )


def _llama_sources(file: GGUFFile) -> Iterator[tuple[str, Source]]:
    heads = file.need("llama.attention.head_count", int)
    turned = {"attn_q": heads, "attn_k": file.get("llama.attention.head_count_kv", int, heads)}
    yield from _named(file, _ENDS)
    for theirs, source in _in_layers(file, _NORMS | _ATTENTION | _SWIGLU):
        yield theirs, Source(source.stored, heads=turned.get(source.stored.split(".")[2], 0))


_ARCHITECTURES = {"llama": Architecture(_llama, _llama_sources)}

# Of no use here: the table of frequencies, which is part of the configuration.
_UNREAD = ("rope_freqs.weight",)


def _architecture(file: GGUFFile) -> Architecture:
    if (name := file.architecture) not in _ARCHITECTURES:
        raise UserError(
            f"{file.path}: general.architecture = {name!r} is not read from GGUF, only {', '.join(sorted(_ARCHITECTURES))}; use "
            "the model's safetensors where nmoe knows its family"
        )
    return _ARCHITECTURES[name]


def hf_config(path: Path) -> dict[str, Any]:
    """The `config.json` of the checkpoint that a file was made from. Raises UserError for an architecture that is not read."""
    file = read_header(path)
    return _architecture(file).config(file)


class GGUFTensors:
    """The tensors of a GGUF file under their Hugging Face names, with the interface of `Shards`: names, shapes and types are read
    at once, values on request.

    Raises UserError, naming file and tensor, for a type that is not read and for a torn file.
    """

    def __init__(self, path: Path) -> None:
        file = read_header(path)
        self.listing = path
        self._sources = dict(_architecture(file).sources(file))
        self._stored = {name: file.tensors[source.stored] for name, source in self._sources.items()}
        used = {source.stored for source in self._sources.values()}
        for name, stored in file.tensors.items():
            self._check(file, stored)
            if name not in used and name not in _UNREAD:
                self._sources[name], self._stored[name] = Source(name), stored
        self.files = dict.fromkeys(self._sources, path)
        self.shapes = {
            name: stored.shape[1:] if self._sources[name].expert is not None else stored.shape
            for name, stored in self._stored.items()
        }

    def _check(self, file: GGUFFile, stored: StoredTensor) -> None:
        kind = _kind(stored, file.path)
        block, size = _block(kind)
        if not stored.shape or stored.shape[-1] % block:
            raise UserError(
                f"{file.path}: {stored.name}: rows of {stored.shape[-1:]} values are not whole blocks of {kind}"
            )
        end = stored.offset + math.prod(stored.shape) // block * size
        if end > file.size:
            raise UserError(
                f"{file.path}: torn: {stored.name} ends at byte {end}, and the file has {file.size}; fetch it again"
            )

    @property
    def copied_dtype(self) -> torch.dtype:
        """The dtype of a copy in safetensors: bf16 where any weight is quantised or in bf16, else fp16 where any is, else fp32."""
        found = {self.dtype(name) for name in self.files}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in found), torch.float32)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in; bf16 for a quantised one."""
        return _FLOATS.get(self.dtype_name(name), torch.bfloat16)

    def dtype_name(self, name: str) -> str:
        """The type as ggml writes it, such as Q4_1."""
        return _kind(self._stored[name], self.listing)

    def nbytes(self, name: str) -> int:
        """The size of a tensor once it is dequantised."""
        return math.prod(self.shapes[name]) * 4

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Reads one tensor, or only these rows of its first axis: as stored, or dequantised to fp32."""
        source, stored = self._sources[name], self._stored[name]
        first, last, _ = (rows or slice(None)).indices(self.shapes[name][0])
        if not source.heads:
            values = self._values(stored, source.expert, first, last)
        else:
            # Whole heads, of which a part may have been asked for.
            rows_of_head = self.shapes[name][0] // source.heads
            above = first // rows_of_head * rows_of_head
            values = self._values(stored, source.expert, above, -(-last // rows_of_head) * rows_of_head)
            pairs = values.unflatten(0, (-1, rows_of_head // 2, 2))
            values = pairs.transpose(1, 2).flatten(0, 2)[first - above : last - above]
        return values + source.offset if source.offset else values

    def _values(self, stored: StoredTensor, expert: int | None, first: int, last: int) -> Tensor:
        """Rows of a stored tensor, or of one of its experts."""
        kind = _kind(stored, self.listing)
        data = self._bytes(stored, expert, first, last)
        shape = (last - first, *stored.shape[1 if expert is None else 2 :])
        if kind in _FLOATS:
            return torch.frombuffer(data, dtype=_FLOATS[kind]).view(shape)
        import gguf
        import numpy as np

        rows = np.frombuffer(data, np.uint8).reshape(math.prod(shape[:-1]), -1)
        return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])).view(shape)

    def _bytes(self, stored: StoredTensor, expert: int | None, first: int, last: int) -> bytearray:
        block, size = _block(_kind(stored, self.listing))
        row = math.prod(stored.shape[1 if expert is None else 2 :]) * size // block
        above = 0 if expert is None else expert * stored.shape[1]
        data = bytearray((last - first) * row)
        try:
            with self.listing.open("rb") as file:
                file.seek(stored.offset + (above + first) * row)
                found = file.readinto(data)
        except OSError as error:
            raise UserError(f"{self.listing}: {stored.name} cannot be read: {error.strerror}") from None
        if found != len(data):
            raise UserError(f"{self.listing}: torn: {stored.name} is cut; fetch the file again")
        return data


def _kind(stored: StoredTensor, path: Path) -> str:
    """The name of a tensor's type. Raises UserError for one that the library cannot read."""
    import gguf

    try:
        name = gguf.GGMLQuantizationType(stored.kind).name
    except ValueError:
        name = str(stored.kind)
    if name not in _FLOATS and name not in _readable():
        raise UserError(
            f"{path}: {stored.name} is of type {name}, which is not read; use a file in Q8_0, Q4_K_M or BF16"
        )
    return name


def _readable() -> frozenset[str]:
    from gguf import quants

    return frozenset(kind.name for kind in quants._type_traits)


def _block(kind: str) -> tuple[int, int]:
    """How many values a block holds, and its size in bytes."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return block, size
