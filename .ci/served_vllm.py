"""Holds what `nmoe serve` answers against vLLM, which serves the same checkpoint:

    python .ci/served_vllm.py VLLM_PYTHON

A mixture of experts with drawn weights, as `nmoe export` writes one, is served by both in fp32. Twenty conversations and twenty
prompts are decoded greedily: prompt ids of the chat template, sampled ids and texts have to be the same, and the log-probabilities
of prompts, asked for as lm-eval does, within 1e-3. `logit_bias` forbids tokens that are no plain text, because each server shows
them in its own way.
"""

from __future__ import annotations

import random
import sys
import tempfile
from math import inf
from pathlib import Path
from typing import Any

from check import hold
from served import draw, serving
from vllm_server import serving as serving_by_vllm

from nmoe.text.tokenizer import Tokenizer

PROMPTS, NEW_TOKENS, CONTEXT = 20, 24, 256
WORDS = ("sort", "the", "seven", "numbers", "Oslo", "rain", "who", "is", "there", "42", "why?", "hello,", "a", "b", "c")
# Neither the vocabulary nor the experts' width fills the blocks that vLLM pads them to.
SHAPE = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "experts": 4, "expert_width": 40}


def difference(one: list[float | None], other: list[float | None]) -> float:
    """Returns the largest difference of two lists of log-probabilities; infinity if one lacks what the other has."""
    if [value is None for value in one] != [value is None for value in other]:
        return inf
    return max(abs(a - b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)


def main(python: str) -> None:
    draws = random.Random(0)
    texts = [" ".join(draws.choices(WORDS, k=draws.randrange(2, 14))) for _ in range(PROMPTS)]
    same = dict.fromkeys(("prompt ids of a chat", "ids of a chat", "texts of a chat", "ids", "texts"), 0)
    largest, compared = 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        directory = draw(place / "drawn", context_tokens=CONTEXT, **SHAPE)
        tokenizer = Tokenizer.load(directory)
        shown = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        ends = [tokenizer.special_id("<|im_end|>")]
        bias = {
            str(token): -100
            for token, text in enumerate(shown)
            if token not in ends and not (text.isascii() and text.isprintable() and "<" not in text)
        }
        greedy: dict[str, Any] = {
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            "logit_bias": bias,
        }
        with (
            serving(directory, "--numerics", "exact", "--threads", "1") as ours,
            serving_by_vllm(python, directory, place / "vllm.log", "--logprobs-mode", "raw_logprobs") as theirs,
        ):
            for number, text in enumerate(texts):
                messages = [{"role": "user", "content": text}]
                if number % 3 == 0:
                    messages = [{"role": "system", "content": "Be brief."}, *messages]
                if number % 4 == 0:
                    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
                a, b = (
                    ask("/v1/chat/completions", {"model": model, "messages": messages} | greedy)
                    for ask, model in ((lambda path, body: ours.ask(path, **body), "tiny"), (theirs.ask, "nmoe"))
                )
                same["prompt ids of a chat"] += a["prompt_token_ids"] == b["prompt_token_ids"]
                one, other = a["choices"][0], b["choices"][0]
                same["ids of a chat"] += one["token_ids"] == other["token_ids"]
                same["texts of a chat"] += one["message"]["content"] == other["message"]["content"]
                body = {"prompt": text, **greedy}
                one = ours.ask("/v1/completions", model="tiny", **body)["choices"][0]
                other = theirs.ask("/v1/completions", {"model": "nmoe", **body})["choices"][0]
                same["ids"] += one["token_ids"] == other["token_ids"]
                same["texts"] += one["text"] == other["text"]
                body = {
                    "prompt": [a["prompt_token_ids"]],
                    "echo": True,
                    "logprobs": 1,
                    "max_tokens": 1,
                    "temperature": 0,
                }
                one = ours.ask("/v1/completions", model="tiny", **body)["choices"][0]["logprobs"]
                other = theirs.ask("/v1/completions", {"model": "nmoe", **body})["choices"][0]["logprobs"]
                largest = max(largest, difference(one["token_logprobs"], other["token_logprobs"]))
                compared += len(one["token_logprobs"])
    figures = {f"{name} that are the same": (float(count), PROMPTS, PROMPTS) for name, count in same.items()}
    figures["log-probabilities of prompts"] = (compared, 200, inf)
    figures["their largest difference"] = (largest, 0.0, 1e-3)
    hold(figures, [])


if __name__ == "__main__":
    main(sys.argv[1])
