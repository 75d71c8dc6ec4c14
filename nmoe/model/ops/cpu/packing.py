"""Keeps weights in the order in which the CPU's kernels read them, from one small batch to the next, and records which kernels are
in use."""

# Shapes: D inputs, F outputs, E experts.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nmoe.model.ops.cpu import library

# torch reaches oneDNN's linear layer by an operator of its compiler's back end.
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# oneDNN multiplies bf16 only where there are instructions for it, AVX-512 or AVX-NE-CONVERT, and raises elsewhere.
ONEDNN_BF16 = ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()

PANEL = 32  # of tile.h
HALF = PANEL // 2

Packing = Callable[[Tensor], list[Tensor]]


class PackedWeights:
    """A cache of weights rearranged for oneDNN or our kernels, for a model that runs many small batches between two changes of its
    weights.

    Without it each call rearranges its whole weight first, which for a decode step of 64 rows takes as long as the product (256 x
    4096 in bf16: 185 us packed, 312 us not). oneDNN's results are the same to the bit.

    Takes as much memory again as the weights. A weight changed in place is packed again when it is next used.
    """

    def __init__(self) -> None:
        self._packed: dict[tuple[int, Packing], tuple[int, Tensor, list[Tensor]]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes products without gradient use the packed weights of this cache within the `with` block.

        This applies to the current thread only, because a scorer may run another model beside the engine.
        """
        outer, IN_FORCE.packed = IN_FORCE.packed, self
        try:
            yield
        finally:
            IN_FORCE.packed = outer

    def clear(self) -> None:
        """Frees all packed weights."""
        self._packed.clear()

    def of(self, weight: Tensor, packing: Packing) -> list[Tensor]:
        """Returns `packing(weight)`, computed again only after the weight has changed."""
        key = id(weight), packing
        if key in self._packed:
            version, _, packed = self._packed[key]
            if version == weight._version:
                return packed
            # Freed first, so that the new one takes its place: beside it, 135M weights in bf16 grew by 27 MB a step.
            del packed, self._packed[key]
        packed = packing(weight)
        self._packed[key] = (weight._version, weight, packed)  # holding the weight keeps its id its own
        return packed


class _InForce(threading.local):
    """The cache of packed weights, and the kernels, that are in use in this thread."""

    packed: PackedWeights | None = None
    kernels = False


IN_FORCE = _InForce()


@contextmanager
def kernels_in_use() -> Iterator[None]:
    """Lets operations with fast numerics and without gradient use the C++ kernels inside the context, in this thread, if they can
    be compiled."""
    outer, IN_FORCE.kernels = IN_FORCE.kernels, library.library() is not None
    try:
        yield
    finally:
        IN_FORCE.kernels = outer


def can_pack(x: Tensor, weight: Tensor) -> bool:
    """Returns whether x can be multiplied by a cached packed weight.

    It can if a cache is in use, x is on a CPU in fp32 or bf16, no gradient is recorded, and the weight is a parameter
    that counts its changes, which a parameter made under `inference_mode` does not.
    """
    return (
        ONEDNN
        and IN_FORCE.packed is not None
        and x.is_cpu
        and x.dtype in (torch.float32, torch.bfloat16)
        and not torch.is_grad_enabled()
        and isinstance(weight, nn.Parameter)
        and not weight.is_inference()
    )


def can_pack_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the weight can be cached in oneDNN's packed layout."""
    return can_pack(x, weight) and (x.dtype == torch.float32 or ONEDNN_BF16)


def packed(weight: Tensor, packing: Packing) -> list[Tensor]:
    """Returns the packed forms of a weight for which `can_pack` holds, from the cache if possible."""
    assert IN_FORCE.packed is not None, "the caller looked"
    return IN_FORCE.packed.of(weight, packing)


def kept(weight: Tensor, packing: Packing) -> Tensor:
    """Returns the packed weight, from the cache if it can be kept there, else packed now: a copy that costs little beside products
    of many rows."""
    return packed(weight, packing)[0] if can_pack(weight, weight) else packing(weight.detach())[0]


def for_onednn(weight_FD: Tensor) -> list[Tensor]:
    return [torch.ops.mkldnn._reorder_linear_weight(weight_FD.contiguous(), None)]


def each_for_onednn(weight_EDF: Tensor) -> list[Tensor]:
    return [packed for weight_DF in weight_EDF for packed in for_onednn(weight_DF.t())]


def packed_panels(weight_EDF: Tensor) -> Tensor:
    """Arranges weights `[E, D, F]` in the order that kernels read: panels of 32 outputs, as in tile.h. D is even in bf16."""
    experts, inputs, outputs = weight_EDF.shape
    padded = torch.nn.functional.pad(weight_EDF, (0, -outputs % PANEL))
    if weight_EDF.dtype == torch.float32:
        return padded.view(experts, inputs, -1, PANEL).transpose(1, 2).contiguous()
    return padded.view(experts, inputs // 2, 2, -1, PANEL).permute(0, 3, 1, 4, 2).contiguous()


def packed_gate_up(weight_EDF: Tensor) -> Tensor:
    """Arranges gate and up `[E, D, 2F]` in panels of 16 columns of the gate and the same 16 of up."""
    experts, inputs, columns = weight_EDF.shape
    halves = torch.nn.functional.pad(weight_EDF.view(experts, inputs, 2, columns // 2), (0, -(columns // 2) % HALF))
    return packed_panels(halves.unflatten(-1, (-1, HALF)).transpose(2, 3).reshape(experts, inputs, -1))


def packed_down(weight_EFD: Tensor) -> Tensor:
    """Arranges down projections in panels, with F padded to a multiple of 16, as `experts` pads its hidden units."""
    return packed_panels(torch.nn.functional.pad(weight_EFD, (0, 0, 0, -weight_EFD.shape[1] % HALF)))


def panels(weight_FD: Tensor) -> list[Tensor]:
    return [packed_panels(weight_FD.t().unsqueeze(0))]


def each_panels(weight_EDF: Tensor) -> list[Tensor]:
    return [packed_panels(weight_EDF)]


def panels_in_fp32(weight_FD: Tensor) -> list[Tensor]:
    return panels(weight_FD.float())


def gate_up_panels(weight_FD: Tensor) -> list[Tensor]:
    return [packed_gate_up(weight_FD.t().unsqueeze(0))]


def each_gate_up(weight_EDF: Tensor) -> list[Tensor]:
    return [packed_gate_up(weight_EDF)]


def each_down(weight_EFD: Tensor) -> list[Tensor]:
    return [packed_down(weight_EFD)]
