"""`nmoe export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nmoe.cli.arguments import Checkpoint


def export(
    checkpoint: Checkpoint,
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Where to write; created if missing, otherwise empty.")
    ],
    format: Annotated[
        Literal["hf", "peft"],
        typer.Option(
            help="hf: a Hugging Face checkpoint, with an adapter merged into its base; peft: the adapter alone."
        ),
    ] = "hf",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="The dtype of the weights; default: as they are stored."),
    ] = None,
) -> None:
    """Export a checkpoint for transformers, servers or PEFT.

    Writes weights, configuration, tokenizer and chat template. For a run with [lora], hf merges the adapter into its base, and
    peft writes the adapter alone.

    \b
    Example:
      nmoe export runs/speedrun/sort_grpo exported
    Example, one of a run's checkpoints, in bfloat16:
      nmoe export runs/speedrun/sort_grpo/checkpoints/best exported --format hf --dtype bfloat16
    Example, the adapter that a run trained:
      nmoe export runs/speedrun/sort_grpo adapter --format peft
    """
    from nmoe.runs.export import export_checkpoint

    export_checkpoint(checkpoint, directory, dtype, format)
    typer.echo(directory)
