"""Files of whole tensors that several ranks write."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nmoe.parallel.sharded_files import join

SCRIPT = Path(__file__).with_name("saving_ranks.py")


def saved(ranks: int, directory: Path, case: str = "works") -> dict[str, Any]:
    """What the first rank says of what the ranks wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(SCRIPT), str(directory), case]
        environment = os.environ | place | {"OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = [one.communicate(timeout=120) for one in started]
    assert [one.returncode for one in started] == [0] * ranks, said
    found: dict[str, Any] = json.loads(said[0][0])
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
