"""The decode benchmark's sides of other systems: transformers' `generate`, and vLLM on a CPU.

`generate` runs on one batch, with the settings that are fastest on a CPU. vLLM is the offline `LLM` class, compiled, in .venv-vllm.
"""

# Shapes: B sequences, P prompt tokens, N sampled tokens, V vocabulary.

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from decode_workload import NEW_TOKENS, PROMPT_TOKENS, SEQUENCES, Dtype, Generated, Run, make_prompts
from machine import Stopwatch
from side import answer
from transformers import AutoModelForCausalLM, PreTrainedModel

# SDPA (transformers' own choice) with the cache that is faster, and grouped_mm experts (its own choice as well), measured on two
# Zen 5 cores at 64 sequences, tokens/s, dynamic / static cache: dense fp32 3.9k / 3.4k, bf16 4.3k / 5.4k; MoE bf16 3.0k / 3.4k.
# Eager attention: 2.9k / 3.0k and 5.3k / 5.2k. MoE with eager experts 2.5k, with batched_mm 0.3k.
_CACHE: dict[Dtype, str | None] = {"fp32": None, "bf16": "static"}
_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CACHE_GIB = 2  # of keys and values; 256 sequences of 160 tokens take 80 MiB


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


def serve_generate(connection: Connection, directory: Path) -> None:
    """Answers what is asked about the checkpoint in `directory`."""
    answer(connection, GenerateDecode(directory).generate)


def vllm_environment(threads: int) -> dict[str, str]:
    """What the process has to start with, the fastest of what was tried: with the engine in a process of its own (the default) the
    dense model decodes 6.9k tokens/s at 64 sequences instead of 11k on two cores. Preloading Intel's OpenMP or tcmalloc, as its
    documentation advises, made no difference that stood out of the noise between runs (about 10%)."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


class VllmDecode:
    """One engine for every number of sequences."""

    def __init__(self, directory: Path) -> None:
        from vllm import LLM  # only this side's environment has it

        self.llm = LLM(
            model=str(directory),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_num_seqs=max(SEQUENCES),
            # All prompts in one step.
            max_num_batched_tokens=max(SEQUENCES) * PROMPT_TOKENS,
            max_model_len=PROMPT_TOKENS + NEW_TOKENS,
            disable_log_stats=True,
        )

    def generate(self, run: Run) -> Generated:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=run.new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if run.logprobs else None,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(run.sequences, run.seed)]
        with Stopwatch() as watch:
            outputs = [output.outputs[0] for output in self.llm.generate(prompts, sampling, use_tqdm=False)]
            token_ids = [list(output.token_ids) for output in outputs]
        logprobs: list[list[float]] = []
        if run.logprobs:
            logprobs = [
                [by_id[token].logprob for token, by_id in zip(output.token_ids, output.logprobs, strict=True)]
                for output in outputs
            ]
        return Generated(watch.seconds, watch.cpu_seconds, watch.others_cores, token_ids, logprobs)


def serve_vllm(connection: Connection, directory: Path) -> None:
    """Answers what is asked about the checkpoint in `directory`."""
    answer(connection, VllmDecode(directory).generate)
