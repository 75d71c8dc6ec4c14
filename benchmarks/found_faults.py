"""Prints what each fault found in commit 72e30f8 did there, what happens today, and what is wanted.

    python benchmarks/found_faults.py                          # every check, each in a process and a folder of its own
    python benchmarks/found_faults.py --only 7 --only 8        # the checks of items 7 and 8
    python benchmarks/found_faults.py --tree ../older          # the checks of this checkout on the code of another one
    python benchmarks/found_faults.py --tree ../older --record # writes benchmarks/results/found_faults.json from 72e30f8

A check that raises has failed, and shows its error: some checks call functions that 72e30f8 does not have.
The checks lie in benchmarks/found, a file for each kind of fault.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_files import write_results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "found_faults.json"
SECONDS = 600
"""How long one check may run."""

_RUNNER = """
import json, sys
sys.path[:0] = [{tree!r}, {checks!r}]
import found
found.load()
line, holds = found.CHECKS[{name!r}].run()
print("\\n" + json.dumps({{"line": line, "holds": holds}}))
"""


def measured(name: str, tree: Path) -> dict[str, Any]:
    """Runs one check on the code of a checkout, in a new process and an empty folder."""
    code = _RUNNER.format(tree=str(tree), checks=str(ROOT / "benchmarks"), name=name)
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-c", code],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"line": f"no end after {SECONDS} s", "holds": False}
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip() or f"exit code {ended.returncode}").splitlines()[-1]
        return {"line": f"fails: {said[:160]}", "holds": False}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    import found

    found.load()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--only", action="append", type=int, default=[], help="the checks of this item; can be repeated"
    )
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout whose code is checked (default: this one)"
    )
    parser.add_argument("--record", action="store_true", help="write the lines as those of 72e30f8")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for name, check in sorted(found.CHECKS.items(), key=lambda one: (one[1].item, one[0])):
        if arguments.only and check.item not in arguments.only:
            continue
        now = measured(name, arguments.tree.resolve())
        if arguments.record:
            results[name] = now["line"]
        before = results.get(name, "not recorded")
        verdict = "ok  " if now["holds"] else "FAIL"
        print(f"{verdict} {check.item:>2} {check.what}\n        72e30f8: {before}", flush=True)
        print(f"        now:     {now['line']}\n        wanted:  {check.wanted}", flush=True)
        if not now["holds"]:
            failed.append(name)
    if arguments.record:
        write_results(RESULTS, dict(sorted(results.items())))
    if failed and not arguments.record:
        raise SystemExit(f"{len(failed)} checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
