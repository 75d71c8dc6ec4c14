"""Holds a full speedrun against what it promises: `python .ci/check_full.py runs/full`"""

import json
import sys
from pathlib import Path

from holding import hold

out = Path(sys.argv[1])
summary = json.loads((out / "summary.json").read_text())
stages = {stage["name"]: stage for stage in json.loads((out / "stages.json").read_text())["done"]}
for name, stage in stages.items():
    print(f"{name}: {stage['seconds']:.0f} s, attempt {stage['attempts']}, {stage['figures']}")
figures = {name: stage["figures"] for name, stage in stages.items()}
hold(
    {
        "correctness of the base": (summary["base_correctness"], 0.05, 0.4),
        "trained correctness": (summary["trained_correctness"], 0.9, 1.0),
        "in the required format": (summary["format_ok"], 0.98, 1.0),
        "verifier, F1": (figures["training a verifier of steps"]["held-out F1"], 0.88, 1.0),
        "proofs that self-play accepted": (figures["a round of self-play"]["proofs accepted"], 1, float("inf")),
        "attempts of the stages": (max(stage["attempts"] for stage in stages.values()), 1, 2),
        "wall_s": (summary["wall_s"], 0.0, 1800.0),
        "peak_memory_mb": (summary["peak_memory_mb"], 0.0, 8192.0),
    },
    [out / name for name in ("base", "midtraining", "sft", "rl", "verifier", "selfplay")],
)
