"""Runs the tests as other machines would:

    python scripts/suite_everywhere.py                        `./test.sh` in every setting below, an hour on two cores
    python scripts/suite_everywhere.py --settings avx2 plain  only these
    python scripts/suite_everywhere.py --exact                the tests of exact numerics in ten settings, five minutes of CPU time

torch, oneDNN, MKL and the C++ kernels are held to the instructions of older processors, or there is no C++ compiler, on one thread
or two. MKL may disregard its settings on processors that are not Intel's. Compiled kernels are made anew for each run of
`./test.sh`, as on a new machine; its results go to benchmarks/results/suite.json, with processor and calibration
(benchmarks/machine.py). Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/suite.json"
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import calibration_s, machine, versions  # noqa: E402
from result_files import read_records, write_records  # noqa: E402

EXACT_TESTS = [
    "tests/model/test_precision.py",
    "tests/model/ops/test_exact_numerics.py",
    "tests/model/ops/test_exact_attention.py",
    "tests/model/test_lora.py",
    "tests/engine/test_learner_agreement.py",
    "tests/engine/test_engine_equivalence.py",
]
# The engine's two settings with the smallest products, and the recomputation of learner and scorer.
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
EXACT_SETTINGS = [
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

SETTINGS = {
    "native": {},
    "two_threads": {"OMP_NUM_THREADS": "2"},
    "avx2": INSTRUCTIONS["AVX2"],
    "plain": {"CXX": "/no/compiler"},
}
"""By name: what it changes of the environment. `plain` has no C++ compiler."""

# What the suite may take on a slow machine, two vCPUs of an Intel Xeon. Its calibration was never printed; it was about half as
# fast as an AMD EPYC (Zen 5), which prints 0.19 s.
ALLOWED_CPU_S, SLOW_CALIBRATION_S = 900, 0.38


def count(word: str, text: str) -> int:
    """The number before a word in pytest's last line, as in "6628 passed"; 0 if the word is not there."""
    found = re.findall(rf"(\d+) {word}", text.strip().splitlines()[-1])
    return int(found[0]) if found else 0


def measure(name: str) -> dict[str, Any]:
    """One run of the suite."""
    record = {"setting": name, **machine(), **versions("torch")}
    with tempfile.TemporaryDirectory() as kernels:
        environment = os.environ | SETTINGS[name]
        environment |= {"XDG_CACHE_HOME": kernels, "TORCHINDUCTOR_CACHE_DIR": f"{kernels}/inductor"}
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([ROOT / "test.sh"], env=environment, stdout=subprocess.PIPE, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stdout[-6000:] if done.returncode else "", end="")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return record | {
        "exit_code": done.returncode,
        "threads": int(environment.get("OMP_NUM_THREADS", 1)),
        **{word: count(word, done.stdout) for word in ("passed", "failed", "skipped")},
        "wall_s": round(time.perf_counter() - began),
        "cpu_s": round(cpu_s),
        "cpu_s_at_slow_calibration": round(cpu_s * SLOW_CALIBRATION_S / calibration_s()),
    }


def run_exact(instructions: str, kernels: bool, threads: int) -> tuple[bool, str]:
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
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", *EXACT_TESTS, "-k", CHOSEN]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return done.returncode == 0, lines[-1].strip("= ") if lines else f"pytest exited with {done.returncode}"


def exact_everywhere() -> int:
    """Prints a table of the tests of exact numerics by setting."""
    print(f"{'instructions':16}{'C++ kernels':13}{'threads':9}{'CPU s':>6}  result", flush=True)
    passed_all = True
    for instructions, kernels, threads in EXACT_SETTINGS:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        passed, line = run_exact(instructions, kernels, threads)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        used = "in use" if kernels else "hidden"
        print(f"{instructions:16}{used:13}{threads:<9}{seconds:6.0f}  {line}", flush=True)
        passed_all &= passed
    return 0 if passed_all else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="only these")
    parser.add_argument("--exact", action="store_true", help="the tests of exact numerics, in more settings")
    arguments = parser.parse_args()
    if arguments.exact:
        return exact_everywhere()
    failed = False
    for name in arguments.settings:
        record = measure(name)
        write_records(RESULTS, [*(one for one in read_records(RESULTS) if one["setting"] != name), record])
        failed |= record["exit_code"] != 0
        print(
            f"{name:12} {record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped; "
            f"{record['cpu_s']} CPU s in {record['wall_s']} s; about {record['cpu_s_at_slow_calibration']} CPU s where the "
            f"calibration is {SLOW_CALIBRATION_S} s ({ALLOWED_CPU_S} are allowed)",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
