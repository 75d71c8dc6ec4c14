"""Counts which seeded faults the referee notices, and which it names as what they are:

    python .ci/referee_faults.py [--draws 20] [--quick] [--only FAULT]

Each draw has other parameters of the fault and another seed of the checks, on one of four small models: dense and mixture of
experts, tied and untied. With --quick a round has only the checks that a fault needs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from referee_servers import choose, drawn_checkpoint, serving

from nmoe.referee.command import judge_of
from nmoe.referee.rounds import hold

FAULTS = (
    "stale_keys", "stale_values", "torn_update", "partial_update", "experts_swapped", "expert_stale", "tied_head_stale",
    "logprob_shifted", "other_temperature", "other_kept_set", "missing_end", "wrong_version_span", "salt_ignored",
    "abort_ignored", "duplicated_answer", "late_answer",
)  # fmt: skip
MODELS = ("moe_tied", "moe_untied", "dense_tied", "dense_untied")
QUICK = (
    "tokens.reply", "logprobs.plain", "logprobs.temperature", "logprobs.top_k", "logprobs.both", "logprobs.kept", "ends.one",
    "seeds.n", "aborts.named", "concurrency.own", "publishes.full", "publishes.torn", "publishes.partial", "publishes.flight",
    "publishes.paused",
)  # fmt: skip


def fits(fault: str, model: str) -> bool:
    if fault == "tied_head_stale":
        return model.endswith("_tied")
    return not fault.startswith("expert") or model.startswith("moe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=FAULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    noticed, named, rounds = Counter[str](), Counter[str](), Counter[str]()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        for number, model in enumerate(MODELS):
            checkpoint = drawn_checkpoint(Path(scratch) / model, model, seed=number)
            judge, _ = judge_of(checkpoint, "float32")
            with serving(checkpoint, faulty=True) as url:
                for fault in options.only or FAULTS:
                    able = [one for one in MODELS if fits(fault, one)]
                    if model not in able:
                        continue
                    for draw in range(able.index(model), options.draws, len(able)):
                        settings = choose(url, fault, draw)
                        round_ = asyncio.run(
                            hold(url, judge, seed=draw, publish=True, only=QUICK if options.quick else ())
                        )
                        found = [name for name, _ in round_.faults()]
                        rounds[fault] += 1
                        noticed[fault] += bool(found)
                        named[fault] += found[:1] == [fault]
                        seconds = sum(outcome.seconds for outcome in round_.outcomes)
                        print(
                            f"{fault} {draw} on {model}: {', '.join(found) or 'nothing'} ({seconds:.0f} s)", flush=True
                        )
                        if found[:1] != [fault]:
                            print(f"  {settings}", flush=True)
                        for outcome in round_.outcomes:
                            for finding in outcome.findings:
                                if finding.fault != fault:
                                    print(f"  {outcome.check.name}: {finding.fault}: {finding.seen}", flush=True)
    for fault in options.only or FAULTS:
        print(f"{fault:<20} {noticed[fault]:>3} noticed, {named[fault]:>3} named, of {rounds[fault]}")
    total = sum(rounds.values())
    cpu_s = (time.process_time() - began) / max(1, total)
    print(
        f"{sum(noticed.values())} of {total} noticed, {sum(named.values())} named; {cpu_s:.1f} CPU s a round, without the server's"
    )
    sys.exit(sum(noticed.values()) < total or sum(named.values()) < 0.95 * total)


main()
