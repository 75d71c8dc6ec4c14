"""`nmoe grade`."""

import sys
from typing import Annotated, Literal

import typer


def grade(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.jsonl",
            help='Lines of {"gold": "...", "prediction": "..."}, with an optional "id"; - for stdin.',
        ),
    ],
    extract: Annotated[
        Literal["whole", "boxed", "prose", "last_number", "harmony"],
        typer.Option(help="Where in a prediction the answer is."),
    ] = "whole",
    answer_order: Annotated[
        Literal["any", "as_gold"], typer.Option(help="Whether a list without brackets has an order.")
    ] = "any",
    units: Annotated[
        Literal["as_gold", "any"], typer.Option(help="Which units an answer may add to a gold that has none.")
    ] = "as_gold",
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip and count lines whose gold answer cannot be read.")
    ] = False,
) -> None:
    """Grade recorded predictions against gold answers.

    Prints one JSON line per prediction, and a summary on stderr.

    \b
    Example:
      nmoe grade predictions.jsonl > verdicts.jsonl
    Example, boxed answers from a pipe:
      zcat predictions.jsonl.gz | nmoe grade - --extract boxed
    """
    from nmoe.grading.math.policy import Policy
    from nmoe.grading.regrade import regrade

    regrade(file, extract, sys.stdout, Policy(answer_order, units), skip_unreadable=skip_unreadable)
