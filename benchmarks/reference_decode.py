"""transformers as the reference: makes the checkpoint that all sides load, and holds each side against its logits and logprobs.

Nothing is timed before every side is shown to run the same model: transformers in fp32, whole sequences, is the reference.
"""

# Shapes: B sequences, T tokens, V vocabulary.

from __future__ import annotations

import math
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_workload import DTYPES_OF, VOCABULARY, Dtype, Logits, Run, Score, make_prompts
from side import Side, answer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_PEAK = 0.5  # mean entropy of the output, in parts of that of a uniform one


def make_model(shape: dict[str, Any]) -> PreTrainedModel:
    """Random weights, the same on every call, that make every part of the model matter.

    Matrices keep the size of what they multiply (standard deviation hidden_size ** -0.5; at the usual 0.02 a model this narrow
    repeats its last token 87% of the time), norms scale every channel by another factor, and the head is scaled until the mean
    entropy is at most half of log V: under a nearly uniform output any attention passes for any other. The embedding is the
    head, so the scale goes into the last norm.
    """
    config = AutoConfig.for_model(**shape)
    assert config.vocab_size >= VOCABULARY, "prompts are drawn from the workload's vocabulary"
    config.initializer_range = config.hidden_size**-0.5
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
        ids_BT = torch.tensor(make_prompts(_prompts(config.vocab_size)))
        while mean_entropy(model(ids_BT).logits) > _PEAK * math.log(config.vocab_size):
            model.model.norm.weight.mul_(1.05)
    return model


def _prompts(vocabulary: int) -> int:
    """The number of prompts whose entropy is taken: at a wide vocabulary fewer, for their logits' memory."""
    return max(4, 64 * VOCABULARY // vocabulary)


def mean_entropy(logits_BTV: Tensor) -> float:
    """In nats, over all positions."""
    return float(torch.distributions.Categorical(logits=logits_BTV).entropy().mean())


class Reference:
    """The model in fp32, whole sequences at a time, no cache."""

    def __init__(self, shape: dict[str, Any], directory: Path) -> None:
        self.model = make_model(shape)
        self.model.save_pretrained(directory)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        with torch.inference_mode():
            ids_BT = torch.tensor(make_prompts(_prompts(self.model.config.vocab_size)))
            entropy = mean_entropy(self.model(ids_BT).logits)
        self.about = {"parameters": parameters, "entropy_nats": round(entropy, 2)}

    @torch.inference_mode()
    def reply(self, question: Logits | Score | str) -> object:
        if isinstance(question, Logits):
            return self.model(torch.tensor(make_prompts(question.sequences))).logits.numpy()
        if isinstance(question, Score):
            prompts_BP = torch.tensor(make_prompts(len(question.token_ids), question.seed))
            sampled_BN = torch.tensor(question.token_ids)
            logits_BTV = self.model(torch.cat([prompts_BP, sampled_BN], 1)).logits
            logits_BNV = logits_BTV[:, prompts_BP.shape[1] - 1 : -1]
            return logits_BNV.log_softmax(-1).gather(-1, sampled_BN.unsqueeze(-1)).squeeze(-1).tolist()
        return self.about


def serve(connection: Connection, shape: dict[str, Any], directory: Path) -> None:
    """Writes the checkpoint, then answers."""
    answer(connection, Reference(shape, directory).reply)


_SEQUENCES = 16

# Largest difference of any logit, and of any sampled token's logprob, in fp32. At 30 layers of
# width 576 logits of a spread of 3.5 differ by 1.3e-4.
_TOLERANCE = 3e-4
# Median difference of logprobs in bf16, whose rounding these weights amplify, and which sends some tokens to other experts (so that
# a mean would say less). Measured with the bare loop, dense / MoE: as it should be 0.05 / 0.04; attention's output scaled by 0.9
# 0.21 / 0.26, experts' by 0.9 0.19, positions off by one 0.73 / 0.32, one expert too few 0.60. At SmolLM2-135M's shape
# transformers' own bf16 differs by 0.12, nmoe's by 0.11.
_TOLERANCE_BF16 = 0.15


def check_logits(nmoe: Side, reference: Side) -> None:
    """nmoe's logits at every position of the prompts, in fp32. Raises AssertionError where they are not transformers'."""
    ours, theirs = (side.ask(Logits(_SEQUENCES)) for side in (nmoe, reference))
    difference = float(np.abs(ours - theirs).max())
    print(f"  nmoe: fp32 logits differ by at most {difference:.1e} (they spread by {theirs.std():.1f})", flush=True)
    assert difference <= _TOLERANCE, f"nmoe's logits differ from transformers' by {difference:.1e}"


def check_logprobs(name: str, side: Side, dtype: Dtype, reference: Side) -> None:
    """The logprobs a side gives to what it sampled. Raises AssertionError where the reference gives others."""
    run = Run(dtype, _SEQUENCES, seed=0, logprobs=True)
    generated = side.ask(run)
    expected = reference.ask(Score(run.seed, generated.token_ids))
    differences = [
        abs(a - b)
        for ours, theirs in zip(generated.logprobs, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    median, largest = statistics.median(differences), max(differences)
    print(
        f"  {name}: {dtype} logprobs differ from fp32's by {median:.1e} in the median, {largest:.1e} at most",
        flush=True,
    )
    fits = largest <= _TOLERANCE if dtype == "fp32" else median <= _TOLERANCE_BF16
    assert fits, f"{name} gives other logprobs than transformers: it does not run the same model"


def check(sides: dict[str, Side], dtypes: list[Dtype], reference: Side) -> None:
    """All sides, in every dtype that is going to be timed."""
    if "nmoe" in sides:
        check_logits(sides["nmoe"], reference)
    for name, side in sides.items():
        for dtype in dtypes:
            if dtype in DTYPES_OF[name]:
                check_logprobs(name, side, dtype, reference)
