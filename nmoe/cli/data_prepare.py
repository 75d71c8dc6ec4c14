"""`nmoe data prepare`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import file_and_overrides


def prepare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [--section.key=value]",
            help="The preparation's TOML file or a packaged name, and values that replace those of the file.",
            show_default=False,
        ),
    ],
) -> None:
    """Filter a collection of problems, and draw disjoint pools and probes from it.

    Prints how many problems each filter leaves and how long they are. Writes a JSONL file for each split and manifest.json with
    counts, digests and settings; the same seed gives the same bytes. No problem is in two files.

    \b
    Example, NuminaMath-1.5 from the hub:
      nmoe data prepare numina
    Example, local files and a smaller pool:
      nmoe data prepare numina --source.path='numina/*.parquet' --splits.rl_pool=10000 --directory=data/small
    Example, with two probes and an evaluation set to keep out, as a file of one's own from nmoe config show numina:
      nmoe data prepare mine.toml
    """
    from nmoe.config.preparation import load_preparation

    settings = load_preparation(*file_and_overrides(arguments))
    from nmoe.data.prepare.prepare import prepare, report
    from nmoe.runs.resolve import resolve_tokenizer
    from nmoe.text.tokenizer import Tokenizer

    named = settings.source.tokenizer
    tokenizer = None if named is None else Tokenizer.load(resolve_tokenizer(Path(named)))
    for line in report(prepare(settings, tokenizer)):
        typer.echo(line)
    typer.echo(f"written to {settings.directory}")
