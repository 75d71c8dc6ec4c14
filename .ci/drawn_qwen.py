"""Writes a checkpoint with drawn weights in the shape of Qwen3-0.6B, cut to two of its 28 layers, with the released tokenizer:

    python .ci/drawn_qwen.py DIRECTORY TOKENIZER

About one token in twenty ends the turn, so that some answers have the form and others are cut: rewards differ, and RL has something
to learn from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from nmoe.model.checkpoint import save_model
from nmoe.model.families import qwen3
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer

# config.json as published, but for the layers.
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
# The ends of a turn that its authors publish beside the weights.
ENDS = [151645, 151643]


def main(directory: Path, tokenizer: Path) -> None:
    directory.mkdir(parents=True)
    model = Transformer(qwen3.config_from_hf(CONFIG)).initialize(0)
    with torch.no_grad():
        # All states share this component, about 5 behind the norm; it adds about 9 to the logit of the end.
        model.head_weight[:, 0] = 0.1
        model.head_weight[ENDS[0], 0] = 1.9
    save_model(model, directory)
    Tokenizer.load(tokenizer).save(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
