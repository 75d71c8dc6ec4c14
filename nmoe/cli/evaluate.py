"""The commands `nmoe eval`, `nmoe grade` and `nmoe chat`: evaluate a checkpoint, grade answers, talk with a model."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from nmoe.cli.arguments import (
    Device,
    ExpertWeights,
    PrecisionOfWeights,
    Seed,
    Temperature,
    TemperatureOfMode,
)
from nmoe.config.modes import LIKELIHOOD_MODES
from nmoe.errors import UserError


def evaluate(
    named: Annotated[list[Path], typer.Argument(metavar="[NAME=]CHECKPOINT... BENCHMARK...", show_default=False)],
    problems: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)] = None,
    mode: Annotated[str | None, typer.Option(metavar="MODE", show_default=False)] = None,
    samples: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)] = None,
    temperature: TemperatureOfMode = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)] = None,
    reasoning_effort: Annotated[Literal["low", "medium", "high"] | None, typer.Option(show_default=False)] = None,
    seed: Seed = 0,
    device: Device = "auto",
    precision: PrecisionOfWeights = None,
    expert_weights: ExpertWeights = "dequantized",
    best_of: Annotated[Path | None, typer.Option(metavar="RUN_OR_CHECKPOINT")] = None,
    engine: Annotated[list[str] | None, typer.Option(metavar="URL", show_default=False)] = None,
    allow_trained_on: Annotated[bool, typer.Option("--allow-trained-on")] = False,
    format_check: Annotated[bool, typer.Option("--format-check")] = False,
    results: Annotated[Path, typer.Option(metavar="DIRECTORY")] = Path("evals"),
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", show_default=False)] = None,
) -> None:
    """Evaluate checkpoints on benchmarks.

    Several checkpoints or benchmarks give one table, with paired tests against the first checkpoint. A checkpoint stands in it by
    its NAME, if it has one.

    \b
    Example, greedy:
      nmoe eval runs/speedrun/sort_grpo sort --out sort.json
    Example, the majority of eight samples per problem, and pass@k for k up to 8:
      nmoe eval runs/speedrun/sort_grpo sort --mode sampling_pass@8
    Example, two models on two benchmarks:
      nmoe eval runs/base runs/sort_grpo sort skills
    Example, the same under other names:
      nmoe eval before=runs/base after=runs/sort_grpo sort skills
    Example, the best of eight samples by a reward model, and the majority vote:
      nmoe eval runs/speedrun/sort_grpo sort --samples 8 --temperature 0.6 --best-of runs/speedrun/reward
    Example, multiple choice by likelihood, of all problems:
      nmoe eval runs/base arc_easy arc_challenge --mode likelihood_text
    Example, the CORE score, set by set:
      nmoe eval runs/base core
    Example, what a running engine server samples, nmoe's or vLLM:
      nmoe eval runs/base sort --engine http://127.0.0.1:8000
    Example, whether a model is ready for reinforcement learning:
      nmoe eval runs/base math --format-check

    Args:
        named: Runs or checkpoints, then environments: TOML files, directories, or packaged names. With --format-check one
            checkpoint; its default environment is the one that the run was trained on.
        problems: How many problems; default: 200, with --format-check 20, by likelihood all.
        mode: greedy_pass@1, sampling_pass@N (the majority of N), nondet_proxy_pass@N or, of multiple choice, likelihood_letter or
            likelihood_text; default: from --samples and --temperature.
        samples: Completions per problem; default: 1, or the number in --mode.
        max_tokens: The most tokens of a completion; default: the rest of the context, with --format-check the run's limit or 256.
        reasoning_effort: Replaces the environment's reasoning effort.
        best_of: A reward model or verifier that chooses among the samples of a problem.
        engine: Running engine server that samples, with the weights that it has; repeat it for several, which share the problems.
            The checkpoint is a directory with its tokenizer and config.json. The key is $NMOE_ENGINE_KEY.
        allow_trained_on: Evaluate although the model was trained on some of the problems, which is refused otherwise; the results
            then say so.
        format_check: Report whether the model is ready for reinforcement learning on the environment, or what to do first.
        results: Where the outcome of every problem is kept, so that the same command continues after an interruption.
        out: Write the results here as JSON; of one checkpoint on one benchmark with the answers to every problem.
    """
    if engine:
        if format_check or named[-1] == Path("core") or mode in LIKELIHOOD_MODES:
            raise UserError("--engine samples; leave out --format-check, core and the modes by likelihood")
        if device != "auto" or precision or expert_weights != "dequantized":
            raise UserError(
                "--engine: its server decides about --device, --precision and --expert-weights; leave them out"
            )
    from nmoe.eval.evaluate import Asked, models_and_benchmarks, without_labels

    named, labels = without_labels(named)
    if format_check:
        if samples or temperature or mode is not None or best_of is not None:
            raise UserError(
                "--format-check decides how problems are sampled; leave out --mode, --samples, --temperature and --best-of"
            )
        if len(named) > 2:
            raise UserError("--format-check is of one checkpoint on one environment")
        from nmoe.eval.format_check import format_check as check_format

        environment = named[1] if len(named) > 1 else None
        for line in check_format(
            named[0], environment, problems or 20, seed, device, expert_weights, max_tokens, reasoning_effort, precision
        ):
            typer.echo(line)
        return
    if len(named) > 1 and named[-1] == Path("core"):
        if samples or temperature or mode or max_tokens or reasoning_effort or best_of is not None:
            raise UserError("core is decided by likelihoods, and samples nothing; leave out the settings of sampling")
        from nmoe.eval.core import core_command

        core_command(named[:-1], problems, device, out, precision, labels)
        return
    if mode in LIKELIHOOD_MODES:
        if samples or temperature or max_tokens or reasoning_effort or best_of is not None:
            raise UserError(f"{mode} samples nothing; leave out the settings of sampling")
        from nmoe.eval.choices import choices_command

        choices_command(
            named, mode, problems, device, out, allow_trained_on=allow_trained_on, precision=precision, labels=labels
        )
        return
    from nmoe.config.modes import mode_of

    chosen = mode_of(mode, samples, temperature)
    from nmoe.eval.sweep import sweep_command

    checkpoints, benchmarks = models_and_benchmarks(named, labels)
    from nmoe.verifier.scorers import load_scorer

    asked = Asked(
        chosen,
        problems or 200,
        seed,
        max_tokens,
        reasoning_effort,
        device,
        expert_weights,
        best_of,
        allow_trained_on,
        precision,
    )
    with ExitStack() as stack:
        if engine:
            from nmoe.engine.remote.served import served_engine
            from nmoe.runs.resolve import resolve_checkpoint

            if len(checkpoints) > 1:
                raise UserError("--engine is of one checkpoint: the one that the servers have loaded")
            fleet = stack.enter_context(served_engine(engine, resolve_checkpoint(checkpoints[0]), typer.echo))
            asked = replace(asked, engine=fleet)
        sweep_command(checkpoints, benchmarks, asked, results, out, load_scorer, labels)


def grade(
    file: Annotated[str, typer.Argument(metavar="FILE.jsonl")],
    extract: Literal["whole", "boxed", "prose", "last_number", "harmony"] = "whole",
    answer_order: Literal["any", "as_gold"] = "any",
    units: Literal["asked", "as_gold", "any"] = "asked",
    skip_unreadable: Annotated[bool, typer.Option("--skip-unreadable")] = False,
) -> None:
    """Grade recorded predictions against gold answers.

    Prints one JSON line per prediction, and a summary on stderr. Two texts are compared by value. An answer to a question has to be
    worked out, too: 96/4 does not answer "How many are left?", whose gold is 24.

    \b
    Example:
      nmoe grade predictions.jsonl > verdicts.jsonl
    Example, boxed answers from a pipe:
      zcat predictions.jsonl.gz | nmoe grade - --extract boxed

    Args:
        file: Lines of {"gold": "...", "prediction": "..."}, with an optional "id" and "question"; - for stdin.
        extract: Where in a prediction the answer is.
        answer_order: Whether a list without brackets has an order.
        units: Which units an answer may add to a gold that has none: the one that its question names, none, or any.
        skip_unreadable: Skip and count lines whose gold answer cannot be read.
    """
    from nmoe.grading.math.question import Policy
    from nmoe.grading.regrade import regrade

    regrade(file, extract, sys.stdout, Policy(answer_order, units), skip_unreadable=skip_unreadable)


def chat(
    checkpoint: Annotated[Path | None, typer.Argument(metavar="RUN_OR_CHECKPOINT", show_default=False)] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", show_default=False)] = None,
    temperature: Temperature = 0.7,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1)] = 256,
    system: Annotated[str | None, typer.Option(metavar="TEXT", show_default=False)] = None,
    format: Literal["auto", "harmony", "chat", "text"] = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    precision: PrecisionOfWeights = None,
    expert_weights: ExpertWeights = "dequantized",
) -> None:
    """Chat with a checkpoint or a server in the terminal.

    Every turn is part of one conversation; /new starts another one. The model of a run is asked as in training, with its
    environment's system message, reasoning effort, chat_template_kwargs and tools, which run in a new sandbox for each question.
    Reasoning is dimmed, or marked in a pipe. A server's key is in the variable OPENAI_API_KEY.

    \b
    Example:
      nmoe chat runs/speedrun/sort_grpo --temperature 0
    Example, any checkpoint of a known family, by its own chat template:
      nmoe chat models/Qwen3-0.6B --system "Answer in one sentence."
    Example, a server of OpenAI's protocol, such as nmoe serve:
      nmoe chat --url http://127.0.0.1:8000

    Args:
        checkpoint: A run's directory, one of its checkpoints, or a .gguf file.
        url: The address of a server that answers /v1/chat/completions, in place of a checkpoint.
        model: The name of the server's model; default: the first that it lists.
        max_new_tokens: The maximum number of tokens per answer.
        system: The system message; default: the one of the run's training environment.
        format: How the conversation becomes tokens; auto: the format of the run's environment, else Harmony or the tokenizer's chat
            template.
    """
    from nmoe.serve.chat import chat, chat_with_server

    if (checkpoint is None) == (url is None):
        raise UserError("name a checkpoint, or a server by --url; one of the two")
    if url is not None:
        if (format, device, precision, expert_weights) != ("auto", "auto", None, "dequantized"):
            raise UserError(
                "--format, --device, --precision and --expert-weights are for a checkpoint; the server has its own"
            )
        chat_with_server(url, model, temperature, max_new_tokens, seed, system)
        return
    if model is not None:
        raise UserError("--model names a model of a server; name the server by --url")
    assert checkpoint is not None, "one of the two is named"
    chat(checkpoint, temperature, max_new_tokens, seed, system, format, device, expert_weights, precision)
