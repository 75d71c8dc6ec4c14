"""`nmoe data export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file, a directory or a Hugging Face name; a suffix @[a:b] selects a slice.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where to write.", show_default=False)],
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
    context_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Leave out longer sequences, as training does; default: keep all."),
    ] = None,
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
    """Write records as the tokens and labels that SFT trains on.

    Each line has input_ids, labels (-100 where nothing is learned) and loss_mask. They equal what `nmoe sft` trains on.

    \b
    Example:
      nmoe data export train.jsonl masked.jsonl --tokenizer runs/speedrun/base
    Example, columns with other names:
      nmoe data export questions.csv masked.jsonl --column prompt=question --column completion=answer
    """
    from nmoe.data.masked import export_masked
    from nmoe.data.show import dataset_settings
    from nmoe.runs.resolve import resolve_tokenizer

    settings = dataset_settings(file, kind, column or [], subset, split)
    directory = tokenizer and resolve_tokenizer(tokenizer)
    for line in export_masked(settings, out, directory, format, context_tokens):
        typer.echo(line)
