"""Servers that a run starts on a machine with GPUs get the ones that its own ranks leave."""

from __future__ import annotations

import pytest

from nmoe.engine.remote.process import _gpus
from nmoe.errors import UserError


@pytest.mark.parametrize(
    ("named", "count", "ranks", "number", "each", "seen"),
    [
        (None, 4, 1, 0, 1, "1"),
        (None, 4, 1, 2, 1, "3"),
        (None, 8, 4, 1, 2, "6,7"),
        ("2,3,5,7,GPU-abc", 8, 1, 0, 2, "3,5"),
        ("2,3,5,7,GPU-abc", 8, 1, 1, 2, "7,GPU-abc"),
        (None, 4, 1, 3, 1, 4),
        ("2,3", 8, 1, 0, 2, 2),
        ("", 0, 1, 0, 1, 0),
    ],
)
def test_a_server_sees_the_next_gpus_after_the_ranks_and_the_servers_before_it(
    monkeypatch: pytest.MonkeyPatch, named: str | None, count: int, ranks: int, number: int, each: int, seen: str | int
) -> None:
    """`seen` is what the server sees, or the number of GPUs that are too few."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if isinstance(seen, str):
        assert _gpus(number, each, ranks) == {"CUDA_VISIBLE_DEVICES": seen}
        return
    wanted = f"server {number} needs {each} of this machine's GPUs after the first {ranks + number * each}, and there are {seen}"
    with pytest.raises(UserError, match=wanted):
        _gpus(number, each, ranks)
