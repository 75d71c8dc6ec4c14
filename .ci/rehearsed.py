"""Counts the faults that `nmoe rehearse` names, of the list below: python .ci/rehearsed.py FILE

FILE has what the command printed. The list is older than the command. `tests/cluster/test_rehearse.py` counts the
mistakes of a configuration. Exit code 1 where fewer than nine in ten faults are named.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FAULTS = {
    "learner killed": "the training process ends without a word",
    "learner hangs": "the training process stops, and does not end",
    "checkpoint cut short": "the newest checkpoint lacks the end of a file",
    "parent killed": "the process that started the engines ends; they must not stay behind",
    "engine killed": "an engine server ends in the middle of its requests",
    "engine hangs": "an engine server takes requests, and answers none",
    "engine lost in a transfer": "an engine server ends while it takes weights",
    "wrong weights": "an engine server samples by other weights than were sent",
    "torn answer": "an engine server's reply ends in its middle",
    "double or late answer": "an engine server sends a reply twice, or one that comes too late",
    "disk full": "a file of the run cannot be written",
}
"""Faults. A lost machine of several, and a rank of several that hangs in a collective, need more than a laptop."""

MISTAKES = {
    "wrong key": "a key of the file is misspelt",
    "context too small": "prompts and max_new_tokens do not fit the model's context",
    "grader missing": "the reward's function cannot be imported",
    "sandbox missing": "the environment's tools need a sandbox that the machine lacks",
    "evaluation set missing": "[[eval]] names an environment whose records are not there",
    "batch not divisible": "prompts_per_step is no multiple of updates_per_step, so updates differ in size",
    "staleness uncorrected": "async.max_staleness is above 0 and algorithm.correction is none",
    "checkpoint directory": "the run's directory cannot be written, or its disk has no room for a checkpoint",
    "placement too large": "learners and engines need more GPUs than there are",
    "token_s too small": "engine.token_s lets an engine under load count as lost",
    "reward always equal": "the reward is the same for right and wrong answers",
}
"""Mistakes of a configuration, one more than ten."""


def main() -> int:
    text = Path(sys.argv[1]).read_text()
    named = 0
    for fault, meaning in FAULTS.items():
        # Nothing notices training that stands still, and that is what has to be said of it alone.
        wrong = "not rehearsed" if fault == "learner hangs" else "not rehearsed|nothing noticed"
        found = re.search(rf"^(ok|warn|fail) +{fault} +(?!{wrong})", text, re.MULTILINE)
        named += found is not None
        print(f"{'NOT NAMED' if found is None else found[1]:<9}  {fault} ({meaning})")
    print(f"{named} of {len(FAULTS)} faults are named")
    return 0 if named >= 0.9 * len(FAULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
