"""`nmoe data show`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file, a directory or a Hugging Face name; a suffix @[a:b] selects a slice.",
            show_default=False,
        ),
    ],
    masks: Annotated[bool, typer.Option("--masks", help="Show the first records token by token.")] = False,
    records: Annotated[int, typer.Option(metavar="N", min=1, help="How many records --masks shows.")] = 3,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR_OR_RUN", help="Whose tokenizer to render with; default: a byte tokenizer."),
    ] = None,
    format: Annotated[
        Literal["auto", "harmony", "chat", "text"],
        typer.Option(
            help="How records become tokens; auto: Harmony if the tokenizer has its control tokens, else its chat template."
        ),
    ] = "auto",
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="The format of the records; default: recognised by their columns."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=NAME", help="Which column of the data to read, such as prompt=question."),
    ] = None,
    subset: Annotated[
        str | None, typer.Option(metavar="NAME", help="The dataset's configuration, such as main.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="SPLIT", help="The split, with an optional slice such as train[:100].")
    ] = "train",
) -> None:
    """Show the format, number and length of a dataset's records.

    With --masks, also show which of their tokens are trained on.

    \b
    Example:
      nmoe data show train.jsonl@[:1000]
    Example, token by token with a run's tokenizer:
      nmoe data show train.jsonl --masks --tokenizer runs/speedrun
    Example, columns with other names:
      nmoe data show questions.csv --column prompt=question --column completion=answer
    """
    from nmoe.data.show import dataset_settings, show_data
    from nmoe.runs.resolve import resolve_tokenizer

    settings = dataset_settings(file, kind, column or [], subset, split)
    for line in show_data(settings, tokenizer and resolve_tokenizer(tokenizer), format, masks, records):
        typer.echo(line)
