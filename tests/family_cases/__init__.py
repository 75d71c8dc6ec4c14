"""The checkpoints that every family is proved on, one file per family: its features switched on, for each of them a case."""

from family_cases import deepseek_v3, gpt_oss, llama, qwen3, qwen3_moe

CASES = [*llama.CASES, *qwen3.CASES, *qwen3_moe.CASES, *gpt_oss.CASES, *deepseek_v3.CASES]
