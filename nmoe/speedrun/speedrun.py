"""Runs the demonstration `nmoe speedrun`, with a released model or a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from nmoe.data.packages import packaged_model
from nmoe.errors import MissingInputError
from nmoe.speedrun.real import MODEL, Real
from nmoe.speedrun.scratch import Scratch
from nmoe.speedrun.stages import begun_with

Kind = Literal["real", "scratch"]

DEFAULT: Kind = "real"
"""The pipeline that runs if none is named."""
DIRECTORIES: dict[Kind, Path] = {"real": Path("runs/real"), "scratch": Path("runs/speedrun")}


def speedrun(
    kind: Kind | None = None,
    out: Path | None = None,
    seed: int = 0,
    full: bool = False,
    resume: bool = False,
    device: str = "auto",
    replace: bool = False,
) -> tuple[Kind, Path]:
    """Runs a pipeline in the directory `out` and prints the path of its report; returns which pipeline ran, and its directory.

    An earlier speedrun in the directory is replaced or, with `resume`, finished. `full` adds stages or tasks, even to a
    resumed pipeline that began without them. `replace` permits to delete other files that have the name of a stage's
    output (`Stages`). If no pipeline is named and the released model cannot be downloaded, a new model is trained.
    Raises as `Pipeline.run` does.
    """
    kind = kind or (_begun(out) if resume else None) or _possible(DEFAULT)
    out = DIRECTORIES[kind] if out is None else out
    (Real if kind == "real" else Scratch)(out, seed, full, resume, device).run(replace)
    return kind, out


def _begun(out: Path | None) -> Kind | None:
    """Returns the pipeline that was begun in `out`, or in a default directory if `out` is None; None if there is none."""
    if out is None:
        return next((kind for kind in (DEFAULT, *DIRECTORIES) if begun_with(DIRECTORIES[kind]) is not None), None)
    settings = begun_with(out)
    return None if settings is None else "real" if settings.get("real") else "scratch"


def _possible(kind: Kind) -> Kind:
    if kind == "real":
        try:
            packaged_model(MODEL, print)
        except MissingInputError as error:
            print(f"{error}\nwithout that model, one from nothing is trained instead: nmoe speedrun --scratch")
            return "scratch"
    return kind
