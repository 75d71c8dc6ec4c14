"""Counts false alarms of the referee: rounds with a new seed each, over nmoe's own server, which has none of the faults:

python .ci/referee_clean.py [--rounds 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from referee_servers import drawn_checkpoint, serving

from nmoe.referee.command import judge_of
from nmoe.referee.rounds import hold

MODELS = ("moe_tied", "moe_untied", "dense_tied", "dense_untied")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    alarms = checks = 0
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        for number, model in enumerate(MODELS):
            checkpoint = drawn_checkpoint(Path(scratch) / model, model, seed=number)
            judge, _ = judge_of(checkpoint, "float32")
            with serving(checkpoint) as url:
                for seed in range(number, options.rounds, len(MODELS)):
                    round_ = asyncio.run(hold(url, judge, seed=seed, publish=True, deadline_s=120))
                    checks += sum(outcome.state == "ok" for outcome in round_.outcomes)
                    alarms += bool(round_.new_faults)
                    for outcome in round_.outcomes:
                        for finding in outcome.findings:
                            print(
                                f"seed {seed} on {model}: {outcome.check.name}: {finding.fault}: {finding.seen}",
                                flush=True,
                            )
    cpu_s = (time.process_time() - began) / options.rounds
    print(
        f"{alarms} false alarms in {options.rounds} rounds of {checks / options.rounds:.1f} checks; {cpu_s:.1f} CPU s a round"
    )
    sys.exit(alarms > 0)


main()
