"""What a family is, and the walk over its entries that copies a checkpoint's tensors into a model or makes them from one.

A family's file only maps names and settings. Entries are handled in order; each stored tensor is read once, copied into its
part of ours, and freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.shards import Shards

# Llama's name of the head, which a checkpoint may contain although the head is tied to the embedding.
TIED_HEAD = "lm_head.weight"

# Rows of a table compared at once.
_ROWS = 4096

# The number of problems listed in a message; the rest are only counted.
_SHOWN = 5


def identity(x: Tensor) -> Tensor:
    return x


def transpose(x: Tensor) -> Tensor:
    """The last two axes exchanged, as a view: stored experts are `[out, in]`, ours `[in, out]`."""
    return x.transpose(-1, -2)


@dataclass(frozen=True)
class Entry:
    """One stored tensor and the part of our model that it fills: `ours[index] = read(theirs)`, and back `theirs =
    write(ours[index])`.

    Example, the gate of one expert: `Entry("model.layers.0.mlp.experts.3.gate_proj.weight", "blocks.0.ffn.gate_up", (F, D),
    (3, slice(None), slice(0, F)), transpose, transpose)`.
    """

    theirs: str
    ours: str  # a name in Transformer.state_dict()
    shape: tuple[int, ...]  # of theirs
    index: tuple[slice | int, ...] = ()
    read: Callable[[Tensor], Tensor] = identity  # gives a view where it can
    write: Callable[[Tensor], Tensor] = identity


@dataclass(frozen=True)
class Packing:
    """Quantised storage: where all of `theirs + suffix` are stored, `unpack(*them)` in this order is the tensor that an entry
    calls `theirs`, or raises UserError with the problem. Used for reading only; written checkpoints are never packed."""

    suffixes: tuple[str, ...]
    unpack: Callable[..., Tensor]


class Family(Protocol):
    """A module of this package, one per `model_type`."""

    MODEL_TYPE: str
    PACKINGS: tuple[Packing, ...]

    def config_from_hf(self, raw: dict[str, Any], /) -> ModelConfig:
        """The decoder that a `config.json` describes. Raises UserError for a missing key and, naming key and value, for an
        unsupported setting."""

    def config_to_hf(self, config: ModelConfig, /) -> dict[str, Any]:
        """A `config.json` that transformers loads, with `model_type` and `architectures`. Never fails: it leaves out what the
        family cannot express. To find out, compare with `config_from_hf(config_to_hf(config))`."""

    def entries(self, config: ModelConfig, /) -> Iterator[Entry]:
        """Every tensor of the checkpoint; together they fill every parameter exactly once."""

    def ignores(self, name: str, config: ModelConfig, /) -> bool:
        """Whether a stored tensor that no entry names is allowed."""


def fill(state: dict[str, Tensor], family: Family, config: ModelConfig, shards: Shards) -> None:
    """Copies a checkpoint into a model's state, converting to its dtypes. Buffers that no entry fills become 0.

    Names, shapes and dtypes are all compared before anything is copied; values are checked to be finite while copying. Raises
    UserError naming file and tensor.
    """
    entries = list(family.entries(config))
    stored = {entry.theirs: _stored_names(entry.theirs, family, shards) for entry in entries}
    _compare(entries, stored, family, config, shards)
    for name in state.keys() - {entry.ours for entry in entries}:
        state[name].zero_()
    for entry in entries:
        names, unpack = stored[entry.theirs]
        file = shards.files[names[0]]
        parts = [shards.read(name) for name in names]
        try:
            tensor = unpack(*parts)
        except UserError as error:
            raise UserError(f"{file}: {entry.theirs}: {error}") from None
        del parts
        if tensor.shape != entry.shape:
            raise UserError(f"{file}: {_wrong_shape(entry, tuple(tensor.shape))}")
        part = state[entry.ours][entry.index]
        part.copy_(entry.read(tensor))
        # One pass without extra memory; isfinite would make a mask of every element.
        if part.numel() and not all(bound.isfinite() for bound in torch.aminmax(part.detach())):
            overflow = f" once converted to {part.dtype}" if tensor.float().isfinite().all() else ""
            raise UserError(f"{file}: {entry.theirs} holds NaN or infinite values{overflow}")
        del tensor
    if config.tie_embeddings and TIED_HEAD in shards.files and family.ignores(TIED_HEAD, config):
        _compare_tied_head(state["embedding.weight"], shards)


def _compare_tied_head(embedding_VD: Tensor, shards: Shards) -> None:
    """Raises UserError if a head that should be tied to the embedding is stored with other values: transformers would untie the
    two."""
    stored_VD = shards.read(TIED_HEAD)
    same = stored_VD.shape == embedding_VD.shape and all(
        torch.equal(part_nD.to(embedding_nD.dtype), embedding_nD.cpu())
        for part_nD, embedding_nD in zip(stored_VD.split(_ROWS), embedding_VD.detach().split(_ROWS), strict=True)
    )
    if not same:
        raise UserError(
            f"{shards.files[TIED_HEAD]}: config.json ties the head to the embedding (tie_word_embeddings = true), and {TIED_HEAD} "
            "is another tensor; set tie_word_embeddings to false to use it, or remove it"
        )


def tensors_of(
    state: dict[str, Tensor], family: Family, config: ModelConfig
) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    """A model's state as the family's tensors: name, size in bytes, and a call that makes the tensor, contiguous on the CPU."""
    for entry in family.entries(config):
        part = state[entry.ours][entry.index]

        def make(part: Tensor = part, entry: Entry = entry) -> Tensor:
            tensor = entry.write(part.detach()).cpu().contiguous()
            assert tensor.shape == entry.shape, f"{entry.theirs}: {tuple(tensor.shape)} is not {entry.shape}"
            return tensor

        yield entry.theirs, part.numel() * part.element_size(), make


def _stored_names(theirs: str, family: Family, shards: Shards) -> tuple[tuple[str, ...], Callable[..., Tensor]]:
    for packing in family.PACKINGS:
        names = tuple(theirs + suffix for suffix in packing.suffixes)
        if all(name in shards.files for name in names):
            return names, packing.unpack
    return (theirs,), identity


def _compare(
    entries: list[Entry],
    stored: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]],
    family: Family,
    config: ModelConfig,
    shards: Shards,
) -> None:
    """Raises UserError that lists, by file, tensors that are missing, have a wrong shape or dtype, or do not belong to this
    architecture."""
    problems: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        names, _ = stored[entry.theirs]
        if names != (entry.theirs,):
            continue  # packed: its shape is known once it is unpacked
        if entry.theirs not in shards.files:
            problems[str(shards.listing)].append(f"{entry.theirs} is missing")
        elif shards.shapes[entry.theirs] != entry.shape:
            found = shards.shapes[entry.theirs]
            problems[str(shards.files[entry.theirs])].append(_wrong_shape(entry, found))
        elif (dtype := shards.dtype(entry.theirs)) is None or not dtype.is_floating_point or dtype.itemsize < 2:
            problems[str(shards.files[entry.theirs])].append(
                f"{entry.theirs} is stored as {shards.dtype_name(entry.theirs)}, which is not a float this family is stored in"
            )
    read = {name for names, _ in stored.values() for name in names}
    for name in sorted(shards.files.keys() - read):
        if not family.ignores(name, config):
            problems[str(shards.files[name])].append(f"{name} is not part of this architecture")
    if problems:
        file, first = next(iter(problems.items()))
        more = sum(map(len, problems.values())) - len(first[:_SHOWN])
        shown = "; ".join(first[:_SHOWN]) + (f"; and {more} more" if more else "")
        raise UserError(f"{file}: not a checkpoint of the architecture in its config.json: {shown}")


def _wrong_shape(entry: Entry, found: tuple[int, ...]) -> str:
    return f"{entry.theirs} has shape {list(found)}, config.json asks for {list(entry.shape)}"
