"""Runs `./test.sh` as other machines would, and keeps what it took:

    python scripts/suite_everywhere.py                        every setting below, an hour on two cores
    python scripts/suite_everywhere.py --settings avx2 plain  only these

torch, oneDNN, MKL and the C++ kernels are held to older instructions, there is no C++ compiler, or there are two threads. Compiled
kernels are made anew in each, as on a new machine. Results go to benchmarks/results/suite.json, with processor and calibration
(benchmarks/machine.py). Ends with 1 where a test failed.
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

from exact_everywhere import INSTRUCTIONS  # noqa: E402
from machine import calibration_s, machine, versions  # noqa: E402
from result_files import read_records, write_records  # noqa: E402

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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="only these")
    failed = False
    for name in parser.parse_args().settings:
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
