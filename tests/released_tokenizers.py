"""Released tokenizers, which scripts/real_tokenizers.py puts into the cache; each is loaded once a process, here and in
transformers, because they are large."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import real_tokenizers as script

from nmoe.text.tokenizer import Tokenizer

# The settings that the authors publish beside the weights, which the packages do not hold: the ends of a turn, in their order.
ENDS = {
    "qwen3": [151645, 151643],
    "gemma3": [1, 106],
    "llama3_1": [128001, 128008, 128009],
    "deepseek_v3": 1,
    "gptoss": [200002, 199999, 200012],
}


def directory(name: str) -> Path:
    """Where the tokenizer lies. Skips the test where it does not."""
    place = script.place(name)
    if not (place / "tokenizer.json").exists():
        pytest.skip(f"there is no {place}; fetch it by: python scripts/real_tokenizers.py {name}")
    return place


@functools.cache
def _ours(place: Path, name: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as checkpoint:
        (Path(checkpoint) / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS[name]}))
        return Tokenizer.load(place, Path(checkpoint))


@functools.cache
def _theirs(place: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(place)


def ours(name: str) -> Tokenizer:
    """The tokenizer, with the ends of its checkpoint's generation settings."""
    return _ours(directory(name), name)


def theirs(name: str) -> Any:
    """The same files in transformers."""
    return _theirs(directory(name))
