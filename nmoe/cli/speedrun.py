"""`nmoe speedrun`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Device, Seed


def speedrun(
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The directory to write to.")] = Path("runs/speedrun"),
    full: Annotated[bool, typer.Option("--full", help="Add mid-training, SFT, a verifier and self-play.")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume the one in OUT, or extend it with --full; finished stages are not repeated."
        ),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Delete what is in the way in OUT: what no speedrun made or you have changed, and what --full would extend.",
        ),
    ] = False,
    device: Device = "auto",
) -> None:
    """Train a small model from scratch: pretraining, GRPO, evaluation.

    Makes a tokenizer, pretrains, post-trains, evaluates and writes a report, without a download. An earlier speedrun in OUT is
    replaced; your own runs beside it stay. With --full a plain one is replaced only with --replace.

    \b
    Example:
      nmoe speedrun --seed 1 --out runs/speedrun-1
    Example, the added stages after a plain speedrun:
      nmoe speedrun --full --resume
    """
    from nmoe.speedrun import speedrun

    speedrun(out, seed, full, resume, device, replace)
