"""Runs tests-dist again and again, and counts how often it hangs or fails: python scripts/count_hangs.py [--runs 50] [--ranks 2]

Exits with 1 if any run does. On two cores a run of 2 ranks takes about a minute.
"""

import argparse
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=300, help="seconds after which a run counts as hanging")
    parser.add_argument("--only", action="append", default=[], help="a check of tests-dist; may be repeated")
    options = parser.parse_args()
    command = [*("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}")]
    command += ["-m", "nmoe.rl", "tests-dist", *(f"--only={name}" for name in options.only)]
    hung, failed, seconds = 0, 0, []
    for number in range(1, options.runs + 1):
        began = time.monotonic()
        try:
            code = subprocess.run(
                [sys.executable, *command], timeout=options.deadline, capture_output=True, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            hung += 1
        else:
            failed += code != 0
            seconds.append(time.monotonic() - began)
        median = f", median {statistics.median(seconds):.0f} s" if seconds else ""
        print(f"{number} runs of {options.ranks} ranks: {hung} hung, {failed} failed{median}", flush=True)
    sys.exit(bool(hung or failed))


if __name__ == "__main__":
    main()
