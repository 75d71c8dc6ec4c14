"""Runs the demonstration `nmoe speedrun`, with a released model or a new one, or the pipeline of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from nmoe.data.packages import packaged_model
from nmoe.errors import MissingInputError, UserError
from nmoe.speedrun.planned import Planned
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


def run_pipeline(
    named: str,
    out: Path | None = None,
    seed: int = 0,
    resume: bool = False,
    device: str = "auto",
    replace: bool = False,
) -> None:
    """Runs the pipeline of a TOML file or packaged name in the directory `out`, by default the file's, and prints the path of its
    report. Raises as `Planned.run` does."""
    Planned(named, out, seed, resume, device).run(replace)


def _begun(out: Path | None) -> Kind | None:
    """Returns the pipeline that was begun in `out`, or in a default directory if `out` is None; None if there is none."""
    if out is None:
        return next((kind for kind in (DEFAULT, *DIRECTORIES) if begun_with(DIRECTORIES[kind]) is not None), None)
    settings = begun_with(out)
    if settings is not None and (named := settings.get("pipeline")):
        raise UserError(f"{out}: holds the pipeline {named}; go on with nmoe speedrun {named} --out {out} --resume")
    return None if settings is None else "real" if settings.get("real") else "scratch"


def _possible(kind: Kind) -> Kind:
    if kind == "real":
        try:
            packaged_model(MODEL, print)
        except MissingInputError as error:
            print(f"{error}\nwithout that model, one from nothing is trained instead: nmoe speedrun --scratch")
            return "scratch"
    return kind
