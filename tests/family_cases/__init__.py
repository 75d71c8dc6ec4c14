"""The checkpoints that every family is proved on, a case for each feature; families with tests of their own have a file each."""

from family_cases import deepseek_v3, dense, gpt_oss, mixtures, qwen2, qwen3_moe

CASES = [case for file in (dense, qwen2, qwen3_moe, gpt_oss, deepseek_v3, mixtures) for case in file.CASES]
