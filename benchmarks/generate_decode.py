"""transformers' side of the decode benchmark: `generate` on one batch, with the settings that are fastest on a CPU."""

# Shapes: B sequences, P prompt tokens, N sampled tokens, V vocabulary.

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from decode_workload import PROMPT_TOKENS, Dtype, Generated, Run, make_prompts
from side import answer
from stopwatch import Stopwatch
from transformers import AutoModelForCausalLM, PreTrainedModel

# SDPA (transformers' own choice) with the cache that is faster, and grouped_mm experts (its own choice as well), measured on two
# Zen 5 cores at 64 sequences, tokens/s, dynamic / static cache: dense fp32 3.9k / 3.4k, bf16 4.3k / 5.4k; MoE bf16 3.0k / 3.4k.
# Eager attention: 2.9k / 3.0k and 5.3k / 5.2k. MoE with eager experts 2.5k, with batched_mm 0.3k.
_CACHE: dict[Dtype, str | None] = {"fp32": None, "bf16": "static"}
_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GenerateDecode:
    """One model per dtype, loaded when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.models: dict[Dtype, PreTrainedModel] = {}

    @torch.inference_mode()
    def generate(self, run: Run) -> Generated:
        if run.dtype not in self.models:
            self.models[run.dtype] = AutoModelForCausalLM.from_pretrained(self.directory, dtype=_DTYPES[run.dtype])
            self.models[run.dtype].generation_config.eos_token_id = None  # or sequences would end early
        prompts = make_prompts(run.sequences, run.seed)
        torch.manual_seed(run.seed)
        with Stopwatch() as watch:
            prompts_BP = torch.tensor(prompts)
            out = self.models[run.dtype].generate(
                prompts_BP,
                attention_mask=torch.ones_like(prompts_BP),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=run.new_tokens,
                cache_implementation=_CACHE[run.dtype],
                return_dict_in_generate=True,
                output_logits=run.logprobs,
            )
            sampled_BN = out.sequences[:, PROMPT_TOKENS:]
            token_ids = sampled_BN.tolist()
        logprobs: list[list[float]] = []
        if run.logprobs:
            logits_BNV = torch.stack(out.logits, 1).float()
            logprobs = logits_BNV.log_softmax(-1).gather(-1, sampled_BN.unsqueeze(-1)).squeeze(-1).tolist()
        return Generated(watch.seconds, watch.cpu_seconds, watch.others_cores, token_ids, logprobs)


def serve(connection: Connection, directory: Path) -> None:
    """Answers what is asked about the checkpoint in `directory`."""
    answer(connection, GenerateDecode(directory).generate)
