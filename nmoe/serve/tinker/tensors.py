"""Tensors of Tinker's protocol as NumPy arrays, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.messages import FLOAT32, INT32, INT64, message

# Of a sparse tensor, which takes memory for all of them: as many targets as a position of a sample has likeliest tokens.
MOST_COLUMNS = 128

_NUMPY: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}


def read_tensor(sent: Any, where: str) -> NDArray[Any]:
    """Returns a tensor as a dense array; a sparse one has zeros where it lists nothing. Raises TinkerError for one whose parts do
    not fit together, or whose numbers are not finite."""
    if (dtype := _NUMPY.get(sent.dtype)) is None:
        raise TinkerError(f"{where}: dtype {sent.dtype} is none of float32, int64 and int32")
    try:
        if sent.HasField("sparse_csr"):
            array = _dense(sent, dtype)
        else:
            array = np.frombuffer(sent.dense, dtype)
            array = array.reshape(tuple(sent.shape)) if sent.shape else array
    except (ValueError, IndexError) as error:
        raise TinkerError(f"{where}: no tensor of shape {list(sent.shape)}: {error}") from None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise TinkerError(f"{where}: holds NaN or infinity")
    return array


def _dense(sent: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    rows, columns = sent.shape
    if columns > MOST_COLUMNS:
        raise ValueError(f"at most {MOST_COLUMNS} columns")
    csr = sent.sparse_csr
    values = np.frombuffer(csr.values, dtype)
    begins, of_column = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    if len(begins) != rows + 1 or begins[0] != 0 or begins[-1] != len(values) or (np.diff(begins) < 0).any():
        raise ValueError(f"{len(begins)} row pointers for {len(values)} values")
    if len(of_column) != len(values) or ((of_column < 0) | (of_column >= columns)).any():
        raise ValueError("columns that are not there")
    dense = np.zeros((rows, columns), dtype)
    dense[np.repeat(np.arange(rows), np.diff(begins)), of_column] = values
    return dense


def batched(arrays: Sequence[NDArray[np.float32]]) -> Any:
    """Returns arrays `[n]` or `[n, K]` of several lengths n as one tensor of the protocol."""
    sizes = [array.nbytes for array in arrays]
    return message("BatchedTensor")(
        data=b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays),
        offsets=np.cumsum([0, *sizes]).astype("<i8").tobytes(),
        dtype=FLOAT32,
        trailing_shape=arrays[0].shape[1:] if arrays else (),
    )
