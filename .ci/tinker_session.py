"""A session of the unmodified SDK of Tinker, run by .ci/tinker_sdk.py with the SDK's interpreter.

Exits with an AssertionError where the server's numbers do not agree with one another. Prints one line.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import numpy as np
import tinker
from tinker import types

TEXT = "The quick brown fox jumps over the lazy dog"


def datum(ids: list[int], **inputs: Any) -> types.Datum:
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": np.asarray(ids[1:]), **arrays},
    )


def refusal(future: Any) -> str:
    """Returns why a request failed; "" if it did not."""
    try:
        future.result()
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    service = tinker.ServiceClient()
    base = service.get_server_capabilities().supported_models[0].model_name
    model = service.create_lora_training_client(base_model=base, rank=8, seed=3)
    ids = model.get_tokenizer().encode(TEXT)
    prompt = types.ModelInput.from_ints(ids)

    sampler = model.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=8, seed=1)
    sampled = sampler.sample(prompt, 4, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert len(sampled.sequences) == 4
    scores = sampler.compute_logprobs(prompt).result()
    assert scores == sampler.compute_logprobs(prompt).result()
    tokens, q = sampled.sequences[0].tokens, sampled.sequences[0].logprobs
    whole, zeros = [*ids, *tokens], [0.0] * (len(ids) - 1)
    loss_of = {"weights": [*zeros, *[1.0] * len(tokens)]}
    found = model.forward([datum(whole, **loss_of)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    squares = np.square(np.asarray(found) - np.asarray([*scores[1:], *q], np.float32))
    assert squares.max() == 0, "sampled and prompt log-probabilities are the trainer's to the bit"

    chunked = [datum(whole, **loss_of)] * 1100  # more than the SDK sends in one request
    losses = []
    for _ in range(10):
        passed, step = (
            model.forward_backward(chunked[:2], "cross_entropy"),
            model.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        losses.append(passed.result().metrics["loss:sum"])
        step.result()
    assert losses[1] < losses[0]
    assert losses[-1] < losses[1]
    many = model.forward(chunked, "cross_entropy").result()
    assert len(many.loss_fn_outputs) == 1100
    assert sampler.compute_logprobs(prompt).result() == scores, "a snapshot stays, to the bit"
    later = sampler.sample(prompt, 4, params).result().sequences
    assert [(one.tokens, one.logprobs) for one in later] == [(one.tokens, one.logprobs) for one in sampled.sequences]
    advantages = [*zeros, *np.linspace(-1, 1, len(tokens))]
    names = [name for name in ("importance_sampling", "ppo", "cispo", "gspo", "dro") if name in str(types.LossFnType)]
    for name in names:
        masked = {"sequence_ratio_mask": loss_of["weights"]} if name == "gspo" else {}
        one = datum(whole, logprobs=[*zeros, *q], advantages=advantages, **masked)
        result = model.forward_backward([one], name, {"beta": 0.1} if name == "dro" else None).result()
        assert np.isfinite(result.metrics["loss:sum"])
    assert "send one of cross_entropy" in refusal(model.forward_backward(chunked[:1], "stable_reinforce"))

    before = model.forward(chunked[:1], "cross_entropy").result().metrics["loss:sum"]
    state = model.save_state("state").result().path
    again = service.create_training_client_from_state_with_optimizer(state)
    assert again.forward(chunked[:1], "cross_entropy").result().metrics["loss:sum"] == before
    path = model.save_weights_for_sampler("sampler").result().path
    saved, present = service.create_sampling_client(model_path=path), model.save_weights_and_get_sampling_client()
    assert saved.compute_logprobs(prompt).result() == present.compute_logprobs(prompt).result() != scores
    listed = service.create_rest_client().list_checkpoints(model.model_id).result().checkpoints
    assert {one.tinker_path for one in listed} == {state, path}

    copied = service.create_lora_training_client(base_model=base, rank=0)  # the whole model
    assert copied.get_info().is_lora is False
    loss = copied.forward_backward(chunked[:1], "cross_entropy").result().metrics["loss:sum"]
    copied.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    after = copied.forward(chunked[:1], "cross_entropy").result()
    assert after.metrics["loss:sum"] < loss
    exact = copied.save_weights_and_get_sampling_client().compute_logprobs(types.ModelInput.from_ints(whole)).result()
    assert np.array_equal(np.asarray(exact[1:], np.float32), after.loss_fn_outputs[0]["logprobs"].data)
    assert saved.compute_logprobs(prompt).result() == present.compute_logprobs(prompt).result(), "the adapter stays"

    began = time.monotonic()
    futures = [saved.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=number)) for number in range(200)]
    assert all(len(future.result().sequences[0].tokens) for future in futures)
    seconds = time.monotonic() - began
    if "topk_sample_logprobs" in inspect.signature(saved.sample).parameters:
        top = saved.sample(
            prompt, 1, types.SamplingParams(max_tokens=4, temperature=0.0), topk_sample_logprobs=2
        ).result()
        (sequence,) = top.sequences
        assert [one[0][0] for one in sequence.topk_logprobs] == sequence.tokens
    custom = "left out: no torch"
    try:
        import torch  # noqa: F401
    except ImportError:
        pass
    else:
        result = model.forward_backward_custom(
            chunked[:2], lambda _, logprobs: (sum(x.sum() for x in logprobs) ** 2, {})
        ).result()
        custom = f"{result.metrics['loss:sum']:.4g}"
    if hasattr(service, "close"):
        service.close("success").result()
    print(
        f"tinker {tinker.__version__}: {', '.join(names)}; custom loss {custom}; 200 samples in {seconds:.1f} s; all checks pass"
    )


if __name__ == "__main__":
    main()
