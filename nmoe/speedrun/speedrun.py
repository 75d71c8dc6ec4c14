"""The demonstration. `nmoe speedrun`"""

from __future__ import annotations

from pathlib import Path

from nmoe.speedrun.scratch import Scratch


def speedrun(
    out: Path, seed: int, full: bool = False, resume: bool = False, device: str = "auto", replace: bool = False
) -> None:
    """Runs every stage into `out` and prints where the report is. It replaces what an earlier speedrun made there or, with
    `resume`, finishes it. `full` adds the stages of the whole pipeline, also to one that is resumed and began without them. Of
    other things that are in the way, `replace` deletes those that bear the name of a stage (`Stages`). Raises as `Pipeline.run`
    does."""
    Scratch(out, seed, full, resume, device).run(replace)
