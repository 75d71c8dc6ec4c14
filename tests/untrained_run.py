"""A run of a tiny model with random weights and exact numerics: it costs two CPU seconds, and needs no base."""

from __future__ import annotations

from pathlib import Path

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.rl.launch import train
from nmoe.text.tokenizer import Tokenizer

RUN = """
[run]
name = "run"
directory = "{here}"
steps = 2
threads = 1

[model]
tokenizer = "{here}/tokenizer"
numerics = "exact"

[model.shape]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
experts_per_token = 2
expert_width = 32
context_tokens = 96

[environment]
path = "{here}/draw.toml"

[sampling]
max_new_tokens = 16

[batch]
prompts_per_step = 2
group_size = 4

[checkpoint]
every_steps = 1
keep = 9

[monitor]
samples = "all"
"""
ENVIRONMENT = """
env_id = "draw"

[task_pool]
type = "generated"
task_type = "reverse"
difficulty = [3, 3]

[rubric]
correctness = 1.0
structure = 1.0
"""


def untrained_run(here: Path, *overrides: str) -> Path:
    """Trains it in a directory, with overrides, and returns the run's."""
    Tokenizer.train(["Reverse: analysis final back same"] * 10, 400).save(here / "tokenizer")
    (here / "run.toml").write_text(RUN.format(here=here))
    (here / "draw.toml").write_text(ENVIRONMENT)
    return train(load_run(here / "run.toml", RLConfig, overrides))
