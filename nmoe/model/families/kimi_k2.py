"""Kimi-K2: the decoder of DeepSeek-V3 under another `model_type`, released in FP8.

It is exported as `deepseek_v3`, because transformers has no `kimi_k2`; servers read either.
"""

from __future__ import annotations

from nmoe.model.families import deepseek_v3

MODEL_TYPE = "kimi_k2"
PACKINGS = deepseek_v3.PACKINGS
config_from_hf = deepseek_v3.config_from_hf
config_to_hf = deepseek_v3.config_to_hf
entries = deepseek_v3.entries
ignores = deepseek_v3.ignores
