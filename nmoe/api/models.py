"""`load_model`, `generate` and `evaluate`: load a trained model, sample from it, and measure how often it is right."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from nmoe.api.environments import Data, Env, environment_settings
from nmoe.api.given import explained, model_path
from nmoe.config.environment import held_out
from nmoe.config.registry import names_of_one_call
from nmoe.config.tables.rollout import EngineSection, SandboxSettings
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment, renderer_as_trained
from nmoe.envs.tasks.record_fields import split_prompt
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.eval.evaluate import Evaluation
from nmoe.model.policy import load_policy_on
from nmoe.model.transformer import Transformer
from nmoe.runs.resolve import resolve_checkpoint, trained_on
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import ExpertWeightsForm, FinishReason, Message, Precision, Sample, Sampling

Model = str | Path | Transformer
Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Completion:
    """One completion: `Completion("4", None, (23, 0), (-0.1, -0.2), "stop")`.

        >>> import nmoe
        >>> [[completion]] = nmoe.generate(checkpoint, "2 + 2 =", max_new_tokens=4)
        >>> len(completion.token_ids) == len(completion.logprobs)
        True

    `text` is the answer without reasoning; `reasoning` is the reasoning before the answer, None if there is none.
    `token_ids` are all sampled tokens, including the stop token, each with its log-probability under the distribution that it was
    drawn from.
    """

    text: str
    reasoning: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def load_model(
    path: str | Path,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
    precision: Precision | None = None,
) -> Transformer:
    """Loads the model of a run or checkpoint; an adapter is loaded with its base model. `device` is "auto" (a GPU if there is one),
    "cpu", "cuda" or, with several GPUs, "cuda:1". `precision`, of weights and activations, is "float32", "bfloat16" or
    "float16"; None is bfloat16 on a GPU, and on a CPU with bfloat16 products if the weights are stored in it; else float32. With
    `expert_weights` "mxfp4" a released gpt-oss keeps its experts in four bits, and with "fp8" and "nvfp4" any model's experts are
    quantised, for sampling and beneath an adapter.

        >>> import nmoe
        >>> model = nmoe.load_model(checkpoint)
        >>> model.config.vocab_size  # 256 bytes and Harmony's control tokens
        264

    Raises UserError for a path that holds no model, a model of an unknown family, and a device that is not there.
    """
    named = model_path(path, "path")
    directory = resolve_checkpoint(named)
    if expert_weights not in get_args(ExpertWeightsForm):
        raise UserError(f"expert_weights = {expert_weights!r} is none of {', '.join(get_args(ExpertWeightsForm))}")
    if precision not in (None, *get_args(Precision)):
        raise UserError(f"precision = {precision!r} is none of {', '.join(map(repr, get_args(Precision)))}")
    model = load_policy_on(directory, device, expert_weights, precision, "device")
    model.origin = named
    return model


def _opened(
    model: Model, device: str, expert_weights: ExpertWeightsForm, precision: Precision | None
) -> tuple[Path, Path, Transformer]:
    """Loads the model of a path, or takes a loaded one; returns the path, the directory of its tokenizer, and the model."""
    if not isinstance(model, Transformer):
        path = model_path(model)
        loaded = load_model(path, device, expert_weights, precision).requires_grad_(False)
        return path, resolve_checkpoint(path), loaded
    if model.origin is None:
        raise UserError("model: it does not say where its tokenizer is; pass what nmoe.load_model returned, or a path")
    if (device, expert_weights, precision) != ("auto", "dequantized", None):
        raise UserError("model is loaded already: pass device, expert_weights and precision to nmoe.load_model")
    return model.origin, resolve_checkpoint(model.origin), model


@explained
def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    samples: int = 1,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
    precision: Precision | None = None,
) -> list[list[Completion]]:
    """Samples completions of prompts and returns one list of `samples` completions per prompt.

        >>> import nmoe
        >>> [[completion]] = nmoe.generate(checkpoint, "Sort: 312", max_new_tokens=8, temperature=0.0)
        >>> len(completion.token_ids) <= 8
        True

    A prompt is a text or a list of messages; it is rendered in the format of the environment that the model was
    trained on, with its `reasoning_effort` and `chat_template_kwargs`, else in the one that the tokenizer is made for:
    Harmony, its chat template, or plain text. The samples
    depend on `seed` and on the index of the prompt, not on the other prompts. `model` is a path or a loaded model; for a path,
    `device`, `expert_weights` and `precision` have the meaning they have in `load_model`.
    Raises UserError for a prompt that leaves no room in the model's context, and for `samples` below 1.
    """
    if samples < 1:
        raise UserError(f"samples = {samples} is less than 1")
    path, directory, loaded = _opened(model, device, expert_weights, precision)
    tokenizer = Tokenizer.load(directory)
    renderer = renderer_as_trained(trained_on(path), tokenizer)
    requests = []
    for index, prompt in enumerate(_prompts(prompts)):
        history, question = split_prompt(prompt, f"prompt {index}")
        prompt_ids = renderer.prompt_ids([*history, Message("user", question)])
        if (room := loaded.config.context_tokens - len(prompt_ids)) < 1:
            raise UserError(
                f"prompt {index}: its {len(prompt_ids)} tokens fill the model's context of {loaded.config.context_tokens}"
            )
        sampling = Sampling(
            min(max_new_tokens, room), temperature, top_p, top_k, tuple(renderer.stop_ids), seed=seed + index
        )
        requests.append(Request(tuple(prompt_ids), samples, sampling, f"generate/{index}"))
    engine = NativeEngine(loaded, EngineSection().max_sequences)

    async def sample() -> list[list[Sample]]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    def completion(sample: Sample) -> Completion:
        reasoning, text = renderer.said(sample.token_ids)
        return Completion(text, reasoning, tuple(sample.token_ids), tuple(sample.logprobs), sample.finish_reason)

    return [[completion(one) for one in group] for group in engine.run(sample())]


@explained
@names_of_one_call()
def evaluate(
    model: Model,
    env: Env,
    *,
    data: Data | None = None,
    problems: int = 200,
    samples: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
    precision: Precision | None = None,
    allow_trained_on: bool = False,
) -> list[Evaluation]:
    """Evaluates a model on an environment's problems and returns the results: first over all problems, then by source.

        >>> import nmoe
        >>> [result, *_] = nmoe.evaluate(checkpoint, "sort", problems=4, max_new_tokens=16)
        >>> result.mode, result.problems
        ('greedy_pass@1', 4)

    `env` and `data` have the meaning they have in `train_rl`. Generated problems come from the held-out split. One sample per
    problem gives `greedy_pass@1` at temperature 0 and `sampling_pass@1` above; several give pass@k and, by majority,
    `sampling_pass@n`. `model` is a path or a loaded model; for a path, `device`, `expert_weights` and `precision` have the
    meaning they have in `load_model`. Raises UserError for problems without a right answer, for numbers that are not positive,
    and for problems that the run was trained on, unless `allow_trained_on`; then the results say how many those are.
    """
    from nmoe.eval.evaluate import evaluate as evaluated
    from nmoe.eval.overlap import TrainedOn, find_overlap

    if min(problems, samples, max_new_tokens) < 1:
        raise UserError(
            f"problems = {problems}, samples = {samples}, max_new_tokens = {max_new_tokens}: each is at least 1"
        )
    path, directory, loaded = _opened(model, device, expert_weights, precision)
    tokenizer = Tokenizer.load(directory)
    settings = environment_settings(env, "evaluate", data)
    environment = Environment.from_settings(settings, tokenizer)
    # The records of a dataset have no held-out split: the caller asked for these.
    if held_out(settings) is not None:
        environment = environment.held_out()
    overlap = find_overlap(environment, problems, TrainedOn(path, directory), allowed=allow_trained_on)
    limit = environment.prompts.token_limit(max_new_tokens)
    environment.leave_out_overlong(loaded.config.context_tokens, limit)
    with ToolRuntime(environment, SandboxSettings()) as runtime:
        results = evaluated(
            NativeEngine(loaded, EngineSection().max_sequences),
            environment,
            loaded.config.context_tokens,
            problems=problems,
            samples=samples,
            temperature=temperature,
            max_new_tokens=limit,
            seed=seed,
            runtime=runtime,
        )
    common = None if overlap is None else overlap.common or None
    return [replace(one, trained_on=common if one.outcomes else None) for one in results]


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts as a list; a string or a list of messages is one prompt. Raises UserError for any other value."""
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts = {prompts!r} is neither a prompt nor a list of prompts")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping)):
        return [cast(Prompt, prompts)]
    return [cast(Prompt, prompt) for prompt in prompts]
