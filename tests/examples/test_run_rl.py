"""examples/run_rl.py, run as its user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# documented: python examples/run_rl.py
def test_the_reward_function_in_the_file_is_learned(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "run_rl.py", "--directory", tmp_path / "out", "--steps", "25"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    run = tmp_path / "out" / "letters"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Measured: 0.011 at first, 0.05 after 25 steps (and 0.98 after the 80 that the example takes).
    assert metrics[0]["reward/share"] < 0.02
    assert metrics[-1]["reward/share"] > 0.03
    assert metrics[-1]["reward_mean"] == pytest.approx(metrics[-1]["reward/share"]), "nothing else is rewarded"
    assert result.stdout.rstrip().endswith(f"in {run}")
    sample = json.loads((run / "samples" / "step_000025.jsonl").read_text().splitlines()[0])
    text = sample["text"].removesuffix("<|endoftext|>")
    assert sample["components"]["share"] == text.count(sample["columns"]["letter"]) / max(len(text), 1)
    assert sample["trainer_state"] == {"global_step": 24, "max_steps": 25}
