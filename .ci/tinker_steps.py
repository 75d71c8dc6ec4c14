"""An adapter and a whole model trained by the unmodified SDK of Tinker, run by .ci/tinker_kills.py with the SDK's interpreter.

Prints every number that the server returns, so that two runs can be compared to the bit: python .ci/tinker_steps.py STEPS
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import tinker
from tinker import types

TEXT = "The quick brown fox jumps over the lazy dog"


def datum(ids: list[int], begin: int, logprobs: list[float], advantage: float) -> types.Datum:
    """Returns a sample as training data; its tokens from `begin` on were sampled."""
    before = [0.0] * (begin - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(ids[1:]),
            "logprobs": np.asarray([*before, *logprobs], np.float32),
            "advantages": np.asarray([*before, *[advantage] * len(logprobs)], np.float32),
        },
    )


def shown(name: str, *values: Any) -> None:
    print(name, hashlib.sha256(repr(values).encode()).hexdigest()[:16], *map(str, values[:1]), flush=True)


def main(steps: int) -> None:
    service = tinker.ServiceClient()
    base = service.get_server_capabilities().supported_models[0].model_name
    models = [service.create_lora_training_client(base_model=base, rank=rank, seed=rank) for rank in (8, 0)]
    ids = models[0].get_tokenizer().encode(TEXT)
    prompt = types.ModelInput.from_ints(ids)
    for step in range(steps):
        for number, model in enumerate(models):
            sampler = model.save_weights_and_get_sampling_client()
            futures = [
                sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8, seed=10 * step + k)) for k in range(3)
            ]
            sampled = [one for future in futures for one in future.result().sequences]
            shown(f"{step} model {number} samples", *[(one.tokens, one.logprobs) for one in sampled])
            data = [
                datum([*ids, *one.tokens], len(ids), one.logprobs, advantage)
                for one, advantage in zip(sampled, np.linspace(-1, 1, len(sampled)), strict=True)
            ]
            # As the cookbook does it: all is sent before a result is awaited, and a step has two passes.
            passes = [model.forward_backward(part, "importance_sampling") for part in (data[:3], data[3:])]
            taken = model.optim_step(types.AdamParams(learning_rate=1e-2))
            for passed in passes:
                result = passed.result()
                found = [one["logprobs"].tolist() for one in result.loss_fn_outputs]
                shown(f"{step} model {number} pass", result.metrics["loss:sum"], found)
            shown(f"{step} model {number} step", sorted((taken.result().metrics or {}).items()))
            if step % 4 == 3:
                path = model.save_state(f"state-{step}").result().path
                again = service.create_training_client_from_state_with_optimizer(path)
                result = again.forward(data, "importance_sampling").result()
                shown(f"{step} model {number} loaded", result.metrics["loss:sum"])
    if hasattr(service, "close"):
        service.close("success").result()


if __name__ == "__main__":
    main(int(sys.argv[1]))
