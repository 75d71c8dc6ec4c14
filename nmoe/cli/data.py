"""The commands `nmoe data ...`: show, filter, sample, download and export datasets."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nmoe.cli.arguments import Checkpoint, Device, ExpertWeights, Seed, Temperature, file_and_overrides

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A file, a directory or a Hugging Face name; a suffix @[a:b] selects a slice.",
        show_default=False,
    ),
]
RenderingTokenizer = Annotated[
    Path | None, typer.Option(metavar="DIR_OR_RUN", help="Whose tokenizer to render with; default: a byte tokenizer.")
]
RecordsFormat = Annotated[
    Literal["auto", "harmony", "chat", "text"],
    typer.Option(
        help="How records become tokens; auto: Harmony if the tokenizer has its control tokens, else its chat template."
    ),
]
Kind = Annotated[
    str | None, typer.Option(metavar="KIND", help="The format of the records; default: recognised by their columns.")
]
Columns = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN=NAME", help="Which column of the data to read, such as prompt=question."),
]
Subset = Annotated[str | None, typer.Option(metavar="NAME", help="The dataset's configuration, such as main.")]
Split = Annotated[str, typer.Option(metavar="SPLIT", help="The split, with an optional slice such as train[:100].")]


def show_data(
    file: File,
    masks: Annotated[bool, typer.Option("--masks")] = False,
    records: Annotated[int, typer.Option(metavar="N", min=1)] = 3,
    tokenizer: RenderingTokenizer = None,
    format: RecordsFormat = "auto",
    kind: Kind = None,
    column: Columns = None,
    subset: Subset = None,
    split: Split = "train",
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

    Args:
        masks: Show the first records token by token.
        records: How many records --masks shows.
    """
    from nmoe.data.show import dataset_settings, show_data
    from nmoe.runs.resolve import resolve_tokenizer

    settings = dataset_settings(file, kind, column or [], subset, split)
    for line in show_data(settings, tokenizer and resolve_tokenizer(tokenizer), format, masks, records):
        typer.echo(line)


def pairs(
    checkpoint: Checkpoint,
    environment: Annotated[Path, typer.Argument(metavar="ENVIRONMENT")],
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl")],
    problems: Annotated[int, typer.Option(metavar="N", min=1)] = 1000,
    samples: Annotated[int, typer.Option(metavar="N", min=2)] = 8,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    expert_weights: ExpertWeights = "dequantized",
) -> None:
    """Sample preference pairs from a checkpoint.

    Each pair holds a completion that the environment grades as right and one that it grades as wrong.

    \b
    Example:
      nmoe data pairs runs/speedrun/base skills pairs.jsonl --problems 4000 --samples 6

    Args:
        environment: The environment that grades: a TOML file, a directory, or a packaged name.
        file: Where to write the pairs.
        problems: How many problems.
        samples: Completions per problem.
    """
    from nmoe.recipes.sampled_data import write_pairs

    typer.echo(write_pairs(checkpoint, environment, file, problems, samples, temperature, seed, device, expert_weights))


def solve_rates(
    checkpoint: Checkpoint,
    environment: Annotated[Path, typer.Argument(metavar="ENVIRONMENT")],
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl")],
    problems: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1)] = 8,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    expert_weights: ExpertWeights = "dequantized",
) -> None:
    """Measure how often a checkpoint solves each problem of a pool.

    Writes the pool's records with a field solve_rate. A pool of this file with easy_first = "-solve_rate" begins with the easiest.

    \b
    Example:
      nmoe data solve-rates runs/base mine.toml rated.jsonl --samples 8

    Args:
        environment: The environment whose pool is a JSONL file: a TOML file or a directory.
        file: Where to write the records with their rates.
        problems: How many problems; default: all.
        samples: Completions per problem.
    """
    from nmoe.recipes.sampled_data import write_solve_rates

    settings = (problems, samples, temperature, seed, device, expert_weights)
    typer.echo(write_solve_rates(checkpoint, environment, file, *settings))


def prepare(
    arguments: Annotated[list[str], typer.Argument(metavar="CONFIG [--section.key=value]", show_default=False)],
) -> None:
    """Filter a collection of problems, and draw disjoint pools and probes from it.

    Prints how many problems each filter leaves and how long they are. Writes a JSONL file for each split and manifest.json with
    counts, digests and settings; the same seed gives the same bytes. No problem is in two files.

    \b
    Example, NuminaMath-1.5 from the hub:
      nmoe data prepare numina
    Example, local files and a smaller pool:
      nmoe data prepare numina --source.path='numina/*.parquet' --splits.rl_pool=10000 --directory=data/small
    Example, with two probes and an evaluation set to keep out, in a file copied from nmoe config show numina:
      nmoe data prepare mine.toml

    Args:
        arguments: The preparation's TOML file or a packaged name, and values that override the file's.
    """
    from nmoe.config.loader import load_preparation

    settings = load_preparation(*file_and_overrides(arguments))
    from nmoe.data.prepare.prepare import prepare, report
    from nmoe.runs.resolve import resolve_tokenizer
    from nmoe.text.tokenizer import Tokenizer

    named = settings.source.tokenizer
    tokenizer = None if named is None else Tokenizer.load(resolve_tokenizer(Path(named)))
    for line in report(prepare(settings, tokenizer)):
        typer.echo(line)
    typer.echo(f"written to {settings.directory}")


def download(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    files: Annotated[list[str] | None, typer.Option(metavar="PATTERN")] = None,
    revision: Annotated[str | None, typer.Option(metavar="REVISION")] = None,
) -> None:
    """Fetch a dataset from the Hugging Face hub, and keep it.

    The copy lies below $NMOE_DATASETS, or else ~/.cache/nmoe/datasets, and is read wherever its name stands, without a network.
    A download that was interrupted goes on when it is called again.

    \b
    Example:
      nmoe data download openai/gsm8k
    Example, some of its files:
      nmoe data download AI-MO/NuminaMath-1.5 --files '*.parquet' --revision main

    Args:
        name: The dataset's name on the Hugging Face hub.
        files: Only files that match, such as 'main/*.parquet'; may be repeated.
        revision: Branch, tag or commit; default: the newest of main.
    """
    from nmoe.data.hub import download

    typer.echo(download(name, files or (), revision))


def export_data(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", show_default=False)],
    tokenizer: RenderingTokenizer = None,
    format: RecordsFormat = "auto",
    context_tokens: Annotated[int | None, typer.Option(metavar="N", min=1)] = None,
    kind: Kind = None,
    column: Columns = None,
    subset: Subset = None,
    split: Split = "train",
) -> None:
    """Write records as the tokens and labels that SFT trains on.

    Each line has input_ids, labels (-100 where nothing is learned) and loss_mask. They equal what `nmoe sft` trains on.

    \b
    Example:
      nmoe data export train.jsonl masked.jsonl --tokenizer runs/speedrun/base
    Example, columns with other names:
      nmoe data export questions.csv masked.jsonl --column prompt=question --column completion=answer

    Args:
        out: Where to write.
        context_tokens: Leave out longer sequences, as training does; default: keep all.
    """
    from nmoe.data.show import dataset_settings, export_masked
    from nmoe.runs.resolve import resolve_tokenizer

    settings = dataset_settings(file, kind, column or [], subset, split)
    directory = tokenizer and resolve_tokenizer(tokenizer)
    for line in export_masked(settings, out, directory, format, context_tokens):
        typer.echo(line)
