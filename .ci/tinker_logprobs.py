"""Runs the cookbook's checks of log-probabilities against `nmoe serve --tinker`: python .ci/tinker_logprobs.py CLIENT_PYTHON TESTS

TESTS is the folder `tests` of tinker_cookbook's source distribution, which its wheel leaves out. Both scripts run as they are:
`validate_temperature_logprobs.py` compares temperatures, and samples of many tokens with samples of one;
`compare_sampling_training_logprobs.py` trains three steps and compares sampler and trainer on a document that it downloads: here it
gets another one. Exit code 1 where a difference is above what is wanted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from served import draw, serving

KEY = "tml-check"
# Differences of log-probabilities at six decimals, and the mean of their squares.
MOST, MOST_SQUARE = 2e-5, 1e-10
# The document of the second script comes from GitHub.
WITHOUT_DOWNLOAD = """
import pathlib, runpy, sys, types
import httpx
text = pathlib.Path(sys.argv[1]).read_text()[:3000]
httpx.get = lambda url: types.SimpleNamespace(text=text, raise_for_status=lambda: None)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(command: list[str], url: str, home: str) -> str:
    environment = os.environ | {
        "TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "HOME": home,
    }  # fmt: skip
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=900, cwd=home)
    print(done.stdout)
    if done.returncode:
        sys.exit(f"{command[-3:]} ended with {done.returncode}")
    return done.stdout


def main(interpreter: str, tests: Path) -> int:
    """Returns the exit code."""
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = draw(Path(scratch) / "drawn", expert_width=32)  # for adapters of rank 32, the default
        with serving(checkpoint, "--tinker", "--saved", f"{scratch}/saved", key=KEY) as server:
            url, of_model = str(server.http.base_url), str(checkpoint)
            script = str(tests / "validate_temperature_logprobs.py")
            # A drawn model's distribution is flat, so that few tokens come twice at low numbers of trials.
            shown = run([interpreter, script, f"base_model={of_model}", "num_trials=60"], url, scratch)
            rows = re.findall(r"^ +([\d.]+) +(\d+) +(\d+) +([\d.]+) +([\d.]+) *$", shown, re.MULTILINE)
            if len(rows) != 7:
                failed.append(f"{len(rows)} rows of seven have differences")
            failed += [f"temperature {row[0]}: differs by {row[4]}" for row in rows if float(row[4]) > MOST]
            script = str(tests / "compare_sampling_training_logprobs.py")
            command = [
                interpreter,
                "-c",
                WITHOUT_DOWNLOAD,
                script,
                f'model_names=["{of_model}"]',
                "model_name_filter=[]",
            ]
            shown = run(command, url, scratch)
            (square,) = re.findall(r"'mse\[sample, train\]': ([\d.e+-]+)", shown)
            if not float(square) <= MOST_SQUARE:
                failed.append(f"sampler and trainer differ by {square} in the mean square; at most {MOST_SQUARE}")
    print(*failed, sep="\n") if failed else print(f"all checks pass; sampler against trainer {square}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
