"""Writes a checkpoint with drawn weights in the shape of Qwen3-0.6B, cut to two of its 28 layers, with the released tokenizer:

    python .ci/drawn_qwen.py DIRECTORY TOKENIZER

About one token in forty ends the turn, so that some answers have the form and others are cut: rewards differ, and RL has something
to learn from.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nmoe.text.tokenizer import Tokenizer

# The ends of a turn that its authors publish beside the weights.
ENDS = [151645, 151643]
# config.json as published, but for the layers.
CONFIG = Qwen3Config(
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000},
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


def main(directory: Path, tokenizer: Path) -> None:
    directory.mkdir(parents=True)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG).bfloat16()
    with torch.no_grad():
        # All states share this component; it adds about 9 to the logit of the end.
        model.lm_head.weight[:, 0] = 2.0
        model.lm_head.weight[ENDS[0], 0] = 5.2
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(directory)
    Tokenizer.load(tokenizer).save(directory)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
