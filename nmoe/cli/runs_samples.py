"""`nmoe runs samples`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.runs.sample_limits import CHARACTERS, PROBLEMS


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="All samples that this step recorded, which are those of its first problem; default: samples of the last steps.",
            show_default=False,
        ),
    ] = None,
    of_evaluation: Annotated[
        bool,
        typer.Option("--eval", help="Answers of an evaluation, that of --step or the last, the wrong ones first."),
    ] = False,
    problems: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Without --step, and with --eval: how many problems, each with its best and worst sample, or its answers.",
        ),
    ] = PROBLEMS,
    characters: Annotated[
        int, typer.Option(metavar="N", min=0, help="The most characters of a prompt or completion; 0: all.")
    ] = CHARACTERS,
) -> None:
    """Show what the policy wrote: prompt, completion, reward and why.

    Control characters are shown as escapes.

    \b
    Example:
      nmoe runs samples runs/speedrun/rl
    Example, the whole group of the first step:
      nmoe runs samples runs/speedrun/rl --step 1 --characters 0
    Example, what the run answered in its last evaluation, and how the answers failed:
      nmoe runs samples runs/speedrun/rl --eval
    """
    from nmoe.runs.answers import show_answers
    from nmoe.runs.record import read_run
    from nmoe.runs.samples import show_samples

    path = read_run(run).path
    lines = show_answers(path, step, problems) if of_evaluation else show_samples(path, step, problems, characters)
    for line in lines:
        typer.echo(line)
