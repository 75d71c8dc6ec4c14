"""transformers as the reference: makes the checkpoint that all sides load, and says what logits and logprobs are right."""

# Shapes: B sequences, T tokens, V vocabulary.

from __future__ import annotations

import math
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from decode_workload import VOCABULARY, Logits, Score, make_prompts
from side import answer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_PEAK = 0.5  # mean entropy of the output, in parts of that of a uniform one


def make_model(config_file: Path) -> PreTrainedModel:
    """Random weights, the same on every call, that make every part of the model matter.

    Matrices keep the size of what they multiply (standard deviation hidden_size ** -0.5; at the usual 0.02 a model this narrow
    repeats its last token 87% of the time), norms scale every channel by another factor, and the head is scaled until the mean
    entropy is at most half of log V: under a nearly uniform output any attention passes for any other. The embedding is the
    head, so the scale goes into the last norm.
    """
    config = AutoConfig.from_pretrained(config_file)
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

    def __init__(self, config_file: Path, directory: Path) -> None:
        self.model = make_model(config_file)
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


def serve(connection: Connection, config_file: Path, directory: Path) -> None:
    """Writes the checkpoint, then answers."""
    answer(connection, Reference(config_file, directory).reply)
