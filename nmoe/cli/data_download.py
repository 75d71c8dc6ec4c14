"""`nmoe data download`."""

from typing import Annotated

import typer


def download(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The dataset's name on the Hugging Face hub.", show_default=False)
    ],
    files: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only files that match, such as 'main/*.parquet'; may be repeated."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit; default: the newest of main.")
    ] = None,
) -> None:
    """Fetch a dataset from the Hugging Face hub, and keep it.

    The copy lies below $NMOE_DATASETS, or else ~/.cache/nmoe/datasets, and is read wherever its name stands, without a network.
    A download that was interrupted goes on when it is called again.

    \b
    Example:
      nmoe data download openai/gsm8k
    Example, some of its files:
      nmoe data download AI-MO/NuminaMath-1.5 --files '*.parquet' --revision main
    """
    from nmoe.data.copies import download

    typer.echo(download(name, files or (), revision))
