"""Holds a verifier against docs/guides/verifier.md, with what `nmoe eval POLICY ENVIRONMENT --best-of VERIFIER` printed:

nmoe eval ... --best-of runs/speedrun/verifier | python .ci/check_verifier.py runs/speedrun/verifier
"""

import json
import re
import sys
from pathlib import Path

from holding import hold

run = Path(sys.argv[1])
results = {result["mode"]: result for result in json.loads(max((run / "eval").iterdir()).read_text())["results"]}
last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
printed = sys.stdin.read()
print(printed)
# "best_of@8 - sampling_pass@8 on sums 64.5% [59.8%, 69.2%] of 400"
shares = {
    mode: [float(part) / 100 for part in numbers]
    for mode, *numbers in re.findall(r"^(\S.*?) on \S+ (-?[\d.]+)% \[(-?[\d.]+)%, (-?[\d.]+)%\]", printed, re.MULTILINE)
}
hold(
    {
        "held-out F1": (results["processbench_f1"]["value"], 0.88, 1.0),
        "its 95% interval's lower end": (results["processbench_f1"]["low"], 0.85, 1.0),
        "expected calibration error": (last["verifier_ece"], 0.0, 0.05),
        "the policy's samples that are right": (shares["sampling_pass@1"][0], 0.35, 0.65),
        "best of 8 less majority of 8": (shares["best_of@8 - sampling_pass@8"][0], 0.1, 1.0),
        "its 95% interval's lower end, over problems": (shares["best_of@8 - sampling_pass@8"][1], 0.05, 1.0),
    },
    [run],
)
