"""The command `nmoe serve`: OpenAI's routes over a checkpoint."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nmoe.cli.arguments import Checkpoint, Device, ExpertWeights, PrecisionOfWeights, finite

Limit = typer.Option(metavar="N", min=1)


def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535)] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(metavar="NAME", show_default=False)] = None,
    adapter: Annotated[list[str] | None, typer.Option(metavar="NAME=DIRECTORY", show_default=False)] = None,
    tinker: Annotated[bool, typer.Option("--tinker")] = False,
    saved: Annotated[Path, typer.Option(metavar="DIRECTORY")] = Path("runs/tinker"),
    strict: Annotated[bool, typer.Option("--strict")] = False,
    format: Literal["auto", "harmony", "chat", "text"] = "auto",
    numerics: Literal["fast", "exact"] = "fast",
    max_sequences: Annotated[int, Limit] = 64,
    max_requests: Annotated[int, Limit] = 512,
    max_prompt_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)] = None,
    max_n: Annotated[int, Limit] = 128,
    max_stop: Annotated[int, Limit] = 16,
    max_body_mb: Annotated[int, Limit] = 16,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, callback=finite)] = 600,
    drain: Annotated[float, typer.Option(metavar="SECONDS", min=0, callback=finite)] = 30,
    stalled: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, callback=finite)] = 30,
    cache_mb: Annotated[int, typer.Option(metavar="N", min=0)] = 0,
    threads: Annotated[int, typer.Option(metavar="N", min=0)] = 0,
    device: Device = "auto",
    precision: PrecisionOfWeights = None,
    expert_weights: ExpertWeights = "dequantized",
) -> None:
    """Serve a model to clients of OpenAI's API.

    The environment variable NMOE_SERVE_KEY has the key that clients have to send; without it only this machine is served. SIGTERM
    or Ctrl-C lets running requests finish. docs/serving.md has the routes and fields.

    \b
    Example:
      nmoe serve runs/speedrun/sort_grpo
    Example, for other machines, under the name that a client expects:
      NMOE_SERVE_KEY=secret nmoe serve models/Qwen3-0.6B --host 0.0.0.0 --served-model-name gpt-5.4
    Example, to train with the unmodified SDK of Tinker (TINKER_BASE_URL=http://127.0.0.1:8000):
      nmoe serve runs/speedrun/base --tinker

    Args:
        host: The address to listen on; another than this machine's own needs a key.
        port: The port to listen on; 0: any free one.
        served_model_name: A name that clients use for the model, repeated for several; default: RUN_OR_CHECKPOINT.
        adapter: An adapter over this base, which clients ask for by its name; repeated for several.
        tinker: Speak Tinker's protocol: clients train adapters of this base, or copies of it, and sample from them.
        saved: Where the weights that clients of --tinker save are kept.
        strict: Refuse fields that change nothing here, in place of naming them in the header x-nmoe-ignored.
        format: How conversations become tokens; auto: the tokenizer's own format.
        numerics: exact: a request has the same tokens in any batch.
        max_sequences: Samples that are computed at once; others wait.
        max_requests: Requests that run or wait at once; others are refused with 429.
        max_prompt_tokens: Tokens of a prompt; default: the model's context.
        max_n: Samples of a request.
        max_stop: Stop strings of a request.
        max_body_mb: Size of a request's body.
        deadline: After it a request ends with the tokens that it has.
        drain: How long running requests may go on after SIGTERM.
        stalled: How long a client may read nothing of a stream before its request is ended.
        cache_mb: Size of the key-value cache; 0: as the engine chooses.
        threads: 0: as many as there are cores.
    """
    from nmoe.extras import needed_by

    with needed_by("nmoe serve", "serve"):
        from nmoe.serve.openai.limits import Limits
        from nmoe.serve.openai.process import Options, serve

    limits = Limits(
        body_bytes=max_body_mb * 2**20,
        prompt_tokens=max_prompt_tokens or 0,
        samples=max_n,
        stops=max_stop,
        requests=max_requests,
        request_s=deadline,
        drain_s=drain,
        stalled_s=stalled,
    )
    options = Options(
        checkpoint, host, port, tuple(served_model_name or ()), tuple(adapter or ()), strict, format, device, precision,
        expert_weights, numerics, max_sequences, cache_mb, threads, limits,
    )  # fmt: skip
    if tinker:
        from nmoe.serve.tinker.process import serve as serve_tinker

        serve_tinker(options, saved)
    else:
        serve(options)
