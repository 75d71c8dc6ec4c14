"""The Triton kernels pass the compiler for the chips that they are written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What a block of these chips can have (CUDA C++ Programming Guide, tables of compute capability 9.0 and 10.0).
SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.long)])
def test_every_kernel_compiles_and_fits(tmp_path: Path, capability: int) -> None:
    pytest.importorskip("triton", reason="the compiler comes with triton")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(capability)],
        env=os.environ
        | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 12 + 5 + 4 + 3 + 1  # a window of 128 needs no joining
    assert all(row["shared"] <= SHARED_BYTES for row in rows)
    for row in rows:
        assert row["target"].startswith(f"sm_{capability}"), row
        assert row["bytes"] > 0
        if row["kernel"] == "paged_attention._attend":
            assert row["async_copies"], row
            assert row["tensor_cores"] == ("fp32" not in row["case"]), row
