"""nmoe's side of the fine-tuning benchmark: the learner, as a recipe calls it."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from sft_workload import ADAM_BETAS, ADAM_EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Case, Step
from side import answer

from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.learner.optimizer import OptimizerSettings
from nmoe.model.checkpoint import load_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.recipes.pretrain import document_batch
from nmoe.recipes.setup import keep_freed_memory

TOKENS_PER_MICROBATCH = 16384


def load(case: Case) -> Transformer:
    """The case's initial weights in nmoe's decoder."""
    theirs = case.make_model()
    if "moe" in case.name:
        with tempfile.TemporaryDirectory() as directory:
            theirs.save_pretrained(directory)
            return load_model(Path(directory))
    config, weights = theirs.config, theirs.state_dict()
    model = Transformer(
        ModelConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            context_tokens=config.max_position_embeddings,
            intermediate_size=config.intermediate_size,
            tie_embeddings=config.tie_word_embeddings,
            rope_theta=config.rope_parameters["rope_theta"],
            norm_eps=config.rms_norm_eps,
        )
    )
    ours = {"embedding.weight": weights["model.embed_tokens.weight"], "norm.weight": weights["model.norm.weight"]}
    for layer in range(config.num_hidden_layers):
        there, here = f"model.layers.{layer}.", f"blocks.{layer}."
        for name, parts in {
            "attention_norm": ["input_layernorm"],
            "attention.qkv_proj": [f"self_attn.{n}_proj" for n in "qkv"],
            "attention.q_norm": ["self_attn.q_norm"],
            "attention.k_norm": ["self_attn.k_norm"],
            "attention.o_proj": ["self_attn.o_proj"],
            "ffn_norm": ["post_attention_layernorm"],
            "ffn.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            "ffn.down_proj": ["mlp.down_proj"],
        }.items():
            ours[f"{here}{name}.weight"] = torch.cat([weights[f"{there}{part}.weight"] for part in parts])
    model.load_state_dict(ours)
    return model


class NmoeSft:
    """A learner over the case's initial weights, in a process set up as every recipe does it."""

    def __init__(self, case: Case) -> None:
        keep_freed_memory()
        model = load(case)
        settings = OptimizerSettings(
            LEARNING_RATE,
            min_lr_ratio=1.0,
            weight_decay=WEIGHT_DECAY,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            eps=ADAM_EPS,
            max_grad_norm=MAX_GRAD_NORM,
        )
        self.learner = Learner(model, settings, total_steps=10**6, tokens_per_microbatch=TOKENS_PER_MICROBATCH)

    def step(self, rows: list[list[int]]) -> Step:
        """One step of training on these sequences."""
        began = time.perf_counter()
        batch = document_batch([np.array(row) for row in rows])
        result = self.learner.forward_backward(batch, cross_entropy).result()
        update = self.learner.optim_step().result()
        return Step(time.perf_counter() - began, result.loss, update.grad_norm)


def serve(connection: Connection, case: Case) -> None:
    """Takes the step whose number is asked for, and answers with what it took and gave."""
    side = NmoeSft(case)
    answer(connection, lambda step: side.step(case.rows(step)))
