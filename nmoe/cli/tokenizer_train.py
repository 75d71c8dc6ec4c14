"""`nmoe tokenizer train`."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Texts: files (JSONL, JSON, Parquet, CSV, .txt, .md), patterns, directories or Hugging Face names.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIRECTORY", help="Where to write the tokenizer.", show_default=False)],
    vocab_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens in all: bytes, control tokens and merges.")
    ] = 65_536,
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The column with the text; default: text, or the contents of messages."),
    ] = None,
    chars: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop reading after so many characters; default: read all.")
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer on texts of your own.

    Any text is encoded and decoded without loss. Harmony's control tokens are part of the vocabulary, and each digit is a token of
    its own. The same texts give the same tokenizer.

    \b
    Example:
      nmoe tokenizer train corpus.jsonl --out tokenizer --vocab-size 4096
    Example, a part of a large corpus:
      nmoe tokenizer train 'corpus/*.parquet' --out tokenizer --chars 2000000000
    """
    from nmoe.data.corpus import train_tokenizer

    for line in train_tokenizer(paths, out, vocab_size, column, chars):
        typer.echo(line)
    typer.echo(f"written to {out}; a run takes it as model.tokenizer")
