"""Measures `nmoe data prepare` on generated problems in the schema and size of NuminaMath-1.5:

    python benchmarks/prepare.py                                             # with generated evaluation sets
    python benchmarks/prepare.py --gsm8k gsm8k.jsonl --math math.jsonl --out benchmarks/results/prepare.json

scripts/numina_like.py writes 896,215 rows. They are prepared twice, each time in a process of its own, with the packaged
settings, a probe of 170 problems drawn from --math, and --gsm8k and --math as the sets that training must not meet. Measured
are the process's CPU seconds (user and system, imports included) and its peak of resident memory. Then every file of the two is
compared byte by byte, and the problems of all files of one are hashed again, by code of this file alone, and counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from machine import machine, versions
from result_files import write_results

MOST_CPU_S, MOST_MB = 180, 500
SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))
import numina_like  # noqa: E402


def prepare(directory: Path, source: Path, gsm8k: Path, math: Path) -> dict[str, float]:
    """Runs the command and returns what it took."""
    config = directory.with_suffix(".toml")
    shipped = subprocess.run(
        [sys.executable, "-m", "nmoe", "config", "show", "numina"], check=True, capture_output=True, text=True
    ).stdout
    sets = "".join(f"\n[[contamination.sets]]\npath = {json.dumps(str(path))}\n" for path in (gsm8k, math))
    config.write_text(f"{shipped}{sets}\n[[probes]]\npath = {json.dumps(str(math))}\nsize = 170\n")
    command = [sys.executable, "-m", "nmoe", "data", "prepare", str(config)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"--source.path={source}", f"--directory={directory}"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("the preparation failed")
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6),
    }


def write_given(path: Path) -> Path:
    """Writes problems to evaluate on: two thousand that the source has not, and the first five hundred that it has."""
    rows = [*islice(numina_like.rows(2000, seed=99), 2000), *islice(numina_like.rows(500, seed=0), 500)]
    path.write_text("".join(json.dumps({"problem": row["problem"], "answer": row["answer"]}) + "\n" for row in rows))
    return path


def shared_problems(directory: Path) -> dict[str, Any]:
    """How many problems each file has, and how many any two of them share."""
    hashes = {}
    for file in sorted(directory.glob("*.jsonl")):
        problems = [json.loads(line)["input"] for line in file.open()]
        plain = [re.sub(r"[\s$]", "", problem.casefold()) for problem in problems]
        hashes[file.stem] = {hashlib.sha256(one.encode()).digest() for one in plain}
        if len(hashes[file.stem]) != len(problems):
            raise SystemExit(f"{file}: a problem twice")
    return {
        "problems": {name: len(these) for name, these in hashes.items()},
        "in_two_files": sum(len(one & other) for one, other in combinations(hashes.values(), 2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test problems, JSONL")
    parser.add_argument("--math", type=Path, help="MATH's test problems, JSONL")
    parser.add_argument("--rows", type=int, default=896_215)
    parser.add_argument("--source", type=Path, help="rows that numina_like.py has written already")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = options.source or Path(temporary, "source")
        if options.source is None:
            script = [sys.executable, str(SCRIPTS / "numina_like.py"), str(source), "--rows", str(options.rows)]
            subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
        directories = [Path(temporary, name) for name in ("first", "second")]
        generated = write_given(Path(temporary, "given.jsonl"))
        sets = options.gsm8k or generated, options.math or generated
        runs = [prepare(directory, source, *sets) for directory in directories]
        contents = [{file.name: file.read_bytes() for file in directory.iterdir()} for directory in directories]
        manifest = json.loads(contents[0]["manifest.json"])
        result = {
            "machine": machine(),
            "versions": versions("pyarrow", "numpy"),
            "source_mb": round(sum(file.stat().st_size for file in source.iterdir()) / 1e6),
            "runs": runs,
            "same_bytes": contents[0] == contents[1],
            **shared_problems(directories[0]),
            "stages": {stage["stage"]: stage["rows"] for stage in manifest["stages"]},
            "contamination": manifest["contamination"],
        }
    reached = {
        "cpu": all(run["cpu_s"] <= MOST_CPU_S for run in runs),
        "memory": all(run["peak_mb"] <= MOST_MB for run in runs),
        "same_bytes": result["same_bytes"],
        "disjoint": result["in_two_files"] == 0,
    }
    result |= {"bounds": {"cpu_s": MOST_CPU_S, "peak_mb": MOST_MB}, "reached": reached}
    print(json.dumps(result, indent=1))
    if options.out:
        write_results(options.out, result)
    sys.exit(not all(reached.values()))


if __name__ == "__main__":
    main()
