"""Serves a run's model with vLLM, from what `nmoe export` writes, and holds its log-probabilities against the learner's own:

    python .ci/check_vllm.py RUN VLLM_PYTHON

vLLM samples completions to token ids and says their log-probabilities; the same tokens are scored by the checkpoint that RUN holds.
"""

import sys
import tempfile
from pathlib import Path

import torch
from check import hold
from vllm_server import own_logprobs, serving

from nmoe.model.policy import load_policy
from nmoe.runs.conversions import export_checkpoint
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

QUESTIONS = ["Reverse: 4153", "Sort: 90817", "Add: 47 + 85", "Reverse: 771209", "Add: 90 + 19", "Sort: 5210"]
SAMPLES, NEW_TOKENS = 4, 40

run, python = Path(sys.argv[1]), sys.argv[2]
directory = resolve_checkpoint(run)
tokenizer, (model, _) = Tokenizer.load(directory), load_policy(directory)
prompts = [Harmony(tokenizer).render_prompt([Message("user", question)]) for question in QUESTIONS]


with tempfile.TemporaryDirectory() as scratch:
    exported = Path(scratch) / "exported"
    export_checkpoint(run, exported)
    differences: list[float] = []
    with serving(python, exported, Path(scratch) / "vllm.log") as server:
        for prompt in prompts:
            body = {
                "model": "nmoe",
                "prompt": prompt,
                "n": SAMPLES,
                "max_tokens": NEW_TOKENS,
                "temperature": 1.0,
                "seed": 0,
            }
            body |= {"logprobs": 0, "return_token_ids": True, "add_special_tokens": False}
            for choice in server.ask("/v1/completions", body)["choices"]:
                theirs = torch.tensor(choice["logprobs"]["token_logprobs"])
                differences += (own_logprobs(model, prompt, choice["token_ids"]) - theirs).abs().tolist()
hold(
    {
        "tokens compared": (len(differences), 100, float("inf")),
        "mean difference of a log-probability": (sum(differences) / len(differences), 0.0, 1e-5),
        "largest": (max(differences), 0.0, 1e-4),
    },
    [],
)
