"""Runs the tests of exact numerics as other machines would: python scripts/exact_everywhere.py

torch, oneDNN, MKL and the C++ kernels are held to the instructions of older processors, or there is no C++ compiler; one or two
threads. Prints a table and exits with 1 where a test fails. About five minutes of CPU time. MKL may disregard its settings on
processors that are not Intel's.
"""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [
    "tests/model/test_exactness.py",
    "tests/model/ops/test_exact_numerics.py",
    "tests/model/ops/test_exact_attention.py",
    "tests/model/test_lora.py",
    "tests/engine/test_learner_agreement.py",
    "tests/engine/test_engine_equivalence.py",
]
# Of the engine's ways the two in which products are smallest, and the learner's and the scorer's recomputation.
CHOSEN = "exact and not (in_a_batch or after_a_prefix_hit or in_little_memory)"

INSTRUCTIONS = {
    "this machine's": {},
    "AVX-512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
# Instructions of the libraries, whether our kernels are compiled, threads.
SETTINGS = [
    ("this machine's", True, 1),
    ("this machine's", True, 2),
    ("AVX2", True, 1),
    ("AVX2", True, 2),
    ("none", True, 1),
    ("AVX-512", False, 1),
    ("AVX-512", False, 2),
    ("AVX2", False, 1),
    ("AVX2", False, 2),
    ("none", False, 1),
]


def run(instructions: str, kernels: bool, threads: int) -> tuple[bool, str]:
    """Whether all tests passed, and pytest's last line."""
    environment = os.environ | INSTRUCTIONS[instructions]
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    if not kernels:
        environment["CXX"] = "/no/compiler"
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", *TESTS, "-k", CHOSEN]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return done.returncode == 0, lines[-1].strip("= ") if lines else f"pytest exited with {done.returncode}"


def main() -> int:
    print(f"{'instructions':16}{'C++ kernels':13}{'threads':9}{'CPU s':>6}  result", flush=True)
    passed_all = True
    for instructions, kernels, threads in SETTINGS:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        passed, line = run(instructions, kernels, threads)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        used = "in use" if kernels else "hidden"
        print(f"{instructions:16}{used:13}{threads:<9}{seconds:6.0f}  {line}", flush=True)
        passed_all &= passed
    return 0 if passed_all else 1


if __name__ == "__main__":
    sys.exit(main())
