"""Tiny runs of every kind on one device, and the mismatch of engine and learner: python scripts/gpu_runs.py [cuda]

A base, GRPO of it in bf16, in float32 and with exact numerics, an adapter and DPO, each in a process of its own as a user would
start it (`tiny_run.py`). Prints a line of JSON for each run; exits with 1 where a run fails or a mismatch is out of bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tiny_run import make_workshop, run

ROOT = Path(__file__).parents[1]

# The largest mean of `mismatch_abs_mean` over a run's steps: that of the CPU, ten times that for a GPU's other order of sums, none
# with exact numerics, and rounding to 8 bits on a model this small and peaked.
RUNS: dict[str, tuple[str, tuple[str, ...], float | None]] = {
    "grpo, bf16": ("grpo", ("--model.precision=bfloat16",), 1e-2),
    "grpo, float32": ("grpo", ("--model.precision=float32",), 1e-5),
    "grpo, exact": ("grpo", ("--model.numerics=exact",), 0.0),
    "sft of an adapter": ("sft", (), None),
    "dpo": ("dpo", (), None),
}


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        workshop = Path(directory)
        make_workshop(ROOT, workshop)
        for name, (kind, overrides, bound) in RUNS.items():
            out = workshop / name.replace(", ", "_").replace(" ", "_")
            asked = (f"--model.device={device}", "--run.steps=2", f"--run.directory={out}", *overrides)
            asked = tuple(one for one in asked if not (kind == "sft" and one.startswith("--run.steps")))
            try:
                at = run(ROOT, workshop, kind, *asked)
            except subprocess.CalledProcessError:
                print(json.dumps({"run": name, "failed": True}), flush=True)
                bad += 1
                continue
            rows = [json.loads(line) for line in (at / "metrics.jsonl").read_text().splitlines()]
            found = {"run": name, "device": json.loads((at / "provenance.json").read_text())["device"]}
            found |= {
                key: [row[key] for row in rows if key in row] for key in ("loss", "grad_norm", "mismatch_abs_mean")
            }
            mismatch = found["mismatch_abs_mean"]
            good = bound is None or (len(mismatch) > 0 and sum(mismatch) / len(mismatch) <= bound)
            print(json.dumps(found | {"good": good}), flush=True)
            bad += not good
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
