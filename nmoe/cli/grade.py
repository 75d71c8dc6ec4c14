"""`nmoe grade`."""

import sys
from typing import Annotated, Literal

import typer


def grade(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.jsonl",
            help='Lines of {"gold": "...", "prediction": "..."}, with an optional "id" and "question"; - for stdin.',
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
        Literal["asked", "as_gold", "any"],
        typer.Option(
            help="Which units an answer may add to a gold that has none: the one that its question names, none, or any."
        ),
    ] = "asked",
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip and count lines whose gold answer cannot be read.")
    ] = False,
) -> None:
    """Grade recorded predictions against gold answers.

    Prints one JSON line per prediction, and a summary on stderr. Two texts are compared by value. An answer to a question has to be
    worked out, too: 96/4 does not answer "How many are left?", whose gold is 24.

    \b
    Example:
      nmoe grade predictions.jsonl > verdicts.jsonl
    Example, boxed answers from a pipe:
      zcat predictions.jsonl.gz | nmoe grade - --extract boxed
    """
    from nmoe.grading.math.policy import Policy
    from nmoe.grading.regrade import regrade

    regrade(file, extract, sys.stdout, Policy(answer_order, units), skip_unreadable=skip_unreadable)
