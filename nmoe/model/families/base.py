"""The protocol of a model family, and the code that converts tensors between a family's checkpoint and our model by the family's
entries.

A family's file only maps names and settings. Our weights are filled one after another; each stored tensor is read once, in pieces
of 4 MiB where its rows are also rows of our weight, copied into its part of our weight, and freed. Ranks that shard a weight each
keep their part.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.packed_experts import PackedExperts
from nmoe.model.shards import StoredTensors
from nmoe.parallel.ranks import is_sharded, to_fill

# Llama's name of the head, which a checkpoint may contain although the head is tied to the embedding.
TIED_HEAD = "lm_head.weight"

# A tensor is read in pieces of this size where its rows can be read one by one.
_PIECE_BYTES = 4 * 2**20

# The number of problems listed in a message; the rest are only counted.
_SHOWN = 5


def identity(x: Tensor) -> Tensor:
    return x


def transpose(x: Tensor) -> Tensor:
    """Exchanges the last two axes, as a view: stored experts are `[out, in]`, ours `[in, out]`."""
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
    # Whether `read` treats every row of the first axis alone, experts saved as one tensor above all: `read(theirs)[e]` is
    # `read(theirs[e : e + 1])[0]`, and so it is with a packing's `unpack`. They are then read a few at a time, or several
    # copies of the largest tensor of the model would be in memory at once.
    stacked: bool = False
    packed: bool = False  # bytes of a quantised form, copied as they are


@dataclass(frozen=True)
class Packing:
    """A quantised storage: a tensor `name` is stored as `name + suffix` for each suffix, and `unpack` makes it from these tensors
    in this order, or raises UserError with the problem. Only used for reading: nmoe never writes packed checkpoints."""

    suffixes: tuple[str, ...]
    unpack: Callable[..., Tensor]


class Family(Protocol):
    """A module that maps one family of Hugging Face checkpoints, one `model_type`, to our model."""

    MODEL_TYPE: str
    PACKINGS: tuple[Packing, ...]

    def config_from_hf(self, raw: dict[str, Any], /) -> ModelConfig:
        """Converts a `config.json` to our configuration. Raises UserError for a missing key and, naming key and value, for an
        unsupported setting."""

    def config_to_hf(self, config: ModelConfig, /) -> dict[str, Any]:
        """Converts our configuration to a `config.json` that transformers loads, with `model_type` and `architectures`. Never
        fails: settings that the family cannot express are left out. To find them, compare with
        `config_from_hf(config_to_hf(config))`."""

    def entries(self, config: ModelConfig, /) -> Iterator[Entry]:
        """Yields an entry for every tensor of the checkpoint; together they fill every parameter exactly once."""

    def ignores(self, name: str, config: ModelConfig, /) -> bool:
        """Returns whether a stored tensor that has no entry may be ignored; any other is an error."""


def fill(
    state: dict[str, Tensor],
    family: Family,
    config: ModelConfig,
    shards: StoredTensors,
    buffers: Collection[str],
    entries: Iterable[Entry] | None = None,
    quantised: Mapping[str, PackedExperts] = MappingProxyType({}),
) -> None:
    """Copies a checkpoint into a model's `state_dict`, converting to its dtypes. Tensors named in `buffers` that have no entry are
    set to 0. `entries` defaults to the family's. Weights named in `quantised`, which are on the device meta in `state`, are
    quantised into these experts.

    Names, shapes and dtypes are all compared before anything is copied; values are checked to be finite while copying. Raises
    UserError naming file and tensor.
    """
    filling(state, family, config, shards, buffers, entries, quantised)()


def filling(
    state: dict[str, Tensor],
    family: Family,
    config: ModelConfig,
    shards: StoredTensors,
    buffers: Collection[str],
    entries: Iterable[Entry] | None = None,
    quantised: Mapping[str, PackedExperts] = MappingProxyType({}),
) -> Callable[[], None]:
    """Does what `fill` does before it copies anything, and returns a function that copies."""
    entries = list(family.entries(config) if entries is None else entries)
    stored = _compare(entries, family, config, shards)
    unfilled = _unfilled(state, entries, buffers)
    by_weight: dict[str, list[Entry]] = {}
    for entry in entries:
        by_weight.setdefault(entry.ours, []).append(entry)

    def copy() -> None:
        for name in unfilled:
            state[name].zero_()
        for name, parts in by_weight.items():
            experts = quantised.get(name)
            with to_fill(state[name]) if experts is None else experts.to_fill(state[name].dtype) as weight:
                for entry in parts:
                    _fill_entry(weight[entry.index], entry, *stored[entry.theirs], shards)
        if config.tie_embeddings and TIED_HEAD in shards.files and family.ignores(TIED_HEAD, config):
            embedding = state["embedding.weight"]
            _compare_tied_head(embedding.full_tensor() if is_sharded(embedding) else embedding, shards)

    return copy


def check_names(family: Family, config: ModelConfig, shards: StoredTensors) -> None:
    """Raises UserError, as `fill` does, if a checkpoint's names, shapes or dtypes do not fit its configuration."""
    _compare(list(family.entries(config)), family, config, shards)


def reader(family: Family, config: ModelConfig, shards: StoredTensors) -> Callable[[str, Tensor], Tensor]:
    """Returns a function that fills an empty weight from a checkpoint, given our name of the weight. Both raise UserError as `fill`
    does: this call for wrong names, shapes or dtypes, the function for values that are not finite."""
    entries = list(family.entries(config))
    stored = _compare(entries, family, config, shards)

    def read(name: str, weight: Tensor) -> Tensor:
        for entry in entries:
            if entry.ours == name:
                _fill_entry(weight[entry.index], entry, *stored[entry.theirs], shards)
        return weight

    return read


def _unfilled(state: dict[str, Tensor], entries: Iterable[Entry], buffers: Collection[str]) -> list[str]:
    """Returns the names of the buffers that no entry fills. Raises ValueError if a family's entries leave a part of a weight
    unset."""
    filled: Counter[str] = Counter()
    for entry in entries:
        filled[entry.ours] += torch.empty(state[entry.ours].shape, device="meta")[entry.index].numel()
    for name, tensor in state.items():
        if filled[name] != tensor.numel() and (filled[name] or name not in buffers):
            raise ValueError(f"{name}: the family's entries fill {filled[name]} of its {tensor.numel()} values")
    return [name for name in state if not filled[name]]


def _fill_entry(
    part: Tensor, entry: Entry, names: tuple[str, ...], unpack: Callable[..., Tensor], shards: StoredTensors
) -> None:
    """Copies one tensor of a checkpoint into `part` of our weight. `names` are its stored tensors (several if it is quantised),
    which `unpack` combines. Raises UserError for a wrong shape once unpacked, and for values that are not finite."""
    file = shards.files[names[0]]
    for rows in _pieces(entry, names, shards):
        stored = [shards.read(name, rows) for name in names]
        try:
            tensor = unpack(*stored)
        except UserError as error:
            raise UserError(f"{file}: {entry.theirs}: {error}") from None
        del stored
        wanted = entry.shape if rows is None else (rows.stop - rows.start, *entry.shape[1:])
        if tensor.shape != wanted:
            found = tuple(tensor.shape) if rows is None else (entry.shape[0], *tensor.shape[1:])
            raise UserError(f"{file}: {_wrong_shape(entry, found)}")
        piece = part if rows is None else part[rows]
        piece.copy_(entry.read(tensor))
        # One pass without extra memory; isfinite would make a mask of every element.
        if piece.numel() and not all(bound.isfinite() for bound in torch.aminmax(piece.detach())):
            overflow = f" once converted to {piece.dtype}" if tensor.float().isfinite().all() else ""
            raise UserError(f"{file}: {entry.theirs} holds NaN or infinite values{overflow}")
        del tensor


def _pieces(entry: Entry, names: tuple[str, ...], shards: StoredTensors) -> Iterator[slice | None]:
    """Yields the ranges of rows of the first axis to read one after another; None for the whole tensor at once."""
    plain = names == (entry.theirs,) and entry.read is identity
    alike = bool(entry.shape) and all(shards.shapes[name][:1] == entry.shape[:1] for name in names)
    if not alike or not (plain or entry.stacked):
        yield None
        return
    count = entry.shape[0]
    # Packed weights are larger once they are unpacked.
    size = max(sum(shards.nbytes(name) for name in names), 4 * math.prod(entry.shape), 1)
    step = max(1, _PIECE_BYTES * count // size)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _compare_tied_head(embedding_VD: Tensor, shards: StoredTensors) -> None:
    """Raises UserError if an output head that should be tied to the embedding is stored with other values, because transformers
    would untie the two."""
    same = shards.shapes[TIED_HEAD] == embedding_VD.shape
    step = max(1, _PIECE_BYTES * len(embedding_VD) // max(1, shards.nbytes(TIED_HEAD)))
    for first in range(0, len(embedding_VD) if same else 0, step):
        ours_nD = embedding_VD.detach()[first : first + step].cpu()
        rows = slice(first, first + len(ours_nD))
        same = same and torch.equal(shards.read(TIED_HEAD, rows).to(ours_nD.dtype), ours_nD)
    if not same:
        raise UserError(
            f"{shards.files[TIED_HEAD]}: config.json ties the head to the embedding (tie_word_embeddings = true), and {TIED_HEAD} "
            "is another tensor; set tie_word_embeddings to false to use it, or remove it"
        )


Written = tuple[str, int, Callable[[], Tensor]]
"""A tensor to store: its name, its size in bytes, and a function that returns it, contiguous on the CPU."""


def tensors_of(
    state: Mapping[str, Tensor], entries: Iterable[Entry], gather: Callable[[str], Tensor] | None = None
) -> Iterator[Written]:
    """Converts a model's weights to the checkpoint tensors that these entries name: yields for each the name, the size in bytes and
    a function that makes the tensor, on the host. Where ranks hold parts of a weight, `gather` returns the whole weight of a
    name."""
    for entry in entries:

        def make(entry: Entry = entry) -> Tensor:
            whole = state[entry.ours] if gather is None else gather(entry.ours)
            tensor = entry.write(whole.detach()[entry.index]).cpu().contiguous()
            assert tensor.shape == entry.shape, f"{entry.theirs}: {tuple(tensor.shape)} is not {entry.shape}"
            return tensor

        yield entry.theirs, math.prod(entry.shape) * state[entry.ours].element_size(), make


def _stored_names(theirs: str, family: Family, shards: StoredTensors) -> tuple[tuple[str, ...], Callable[..., Tensor]]:
    for packing in family.PACKINGS:
        names = tuple(theirs + suffix for suffix in packing.suffixes)
        if all(name in shards.files for name in names):
            return names, packing.unpack
    return (theirs,), identity


def _compare(
    entries: list[Entry], family: Family, config: ModelConfig, shards: StoredTensors
) -> dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]]:
    """Returns for each entry the names of its stored tensors, and the function that combines them. Raises UserError that lists, by
    file, tensors that are missing, have a wrong shape or dtype, or do not belong to this architecture."""
    stored = {entry.theirs: _stored_names(entry.theirs, family, shards) for entry in entries}
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
        elif entry.packed:
            if shards.dtype(entry.theirs) != torch.uint8:
                found_dtype = shards.dtype_name(entry.theirs)
                problems[str(shards.files[entry.theirs])].append(
                    f"{entry.theirs} is stored as {found_dtype}, not as bytes"
                )
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
    return stored


def _wrong_shape(entry: Entry, found: tuple[int, ...]) -> str:
    return f"{entry.theirs} has shape {list(found)}, config.json asks for {list(entry.shape)}"
