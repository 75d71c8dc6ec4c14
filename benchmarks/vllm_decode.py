"""vLLM's side of the decode benchmark: the offline `LLM` class on a CPU, compiled, in an environment of its own."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from decode_workload import NEW_TOKENS, PROMPT_TOKENS, SEQUENCES, Generated, Run, make_prompts
from side import answer
from stopwatch import Stopwatch

_CACHE_GIB = 2  # of keys and values; 256 sequences of 160 tokens take 80 MiB


def environment(threads: int) -> dict[str, str]:
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


def serve(connection: Connection, directory: Path) -> None:
    """Answers what is asked about the checkpoint in `directory`."""
    answer(connection, VllmDecode(directory).generate)
