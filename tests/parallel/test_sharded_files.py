"""Files of whole tensors that several ranks write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from safetensors.torch import save_file

from nmoe.parallel.sharded_files import join


def saved(ranks: int, directory: Path, case: str = "works") -> dict[str, Any]:
    """What the first rank says of what the ranks wrote."""
    found: dict[str, Any] = json.loads(on_ranks(ranks, "saving_ranks.py", str(directory), case))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_what_ranks_hold_parts_of_is_written_whole(ranks: int, tmp_path: Path) -> None:
    found = saved(ranks, tmp_path)
    assert found["equal"] == {"model.safetensors": True, "optimizer.safetensors": True}
    # Floats, two bytes each in low precision and eight in double.
    assert found["size"] == 4 * (15 + 4 + 14 + 1 + 6) + 2 * 24 + 8 * 3
    assert found["largest"] == 60, "no more than the largest tensor at a time"
    assert not found["left"]


def test_a_rank_that_cannot_write_is_told_of_by_the_first(tmp_path: Path) -> None:
    assert saved(2, tmp_path, "full") == {"error": "[Errno 28] No space left on device", "left": False}


def test_missing_parts_are_refused(tmp_path: Path) -> None:
    place, out = tmp_path / "parts", tmp_path / "out"
    place.mkdir()
    out.mkdir()
    offsets = {"model.safetensors/a": {"saved_offsets": [2]}}
    notes = {"DCP_SHARDING_INFO": json.dumps(offsets)}
    save_file({"model.safetensors/a": torch.ones(2)}, place / "shard-1.safetensors", notes)
    with pytest.raises(ValueError, match="the parts of a are 2 of its 4 numbers"):
        join(place, {"model.safetensors": ["a"]}, out)
    with pytest.raises(ValueError, match="no rank wrote b of model"):
        join(place, {"model.safetensors": ["a", "b"]}, out)
