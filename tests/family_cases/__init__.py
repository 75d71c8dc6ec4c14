"""The checkpoints that every family is proved on, one file per family: its features switched on, for each of them a case."""

from family_cases import (
    deepseek_v3,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)

_FAMILIES = (llama, qwen3, qwen3_moe, gpt_oss, deepseek_v3, qwen2, mistral, mixtral, glm4_moe, gemma3_text, qwen3_next)
CASES = [case for family in _FAMILIES for case in family.CASES]
