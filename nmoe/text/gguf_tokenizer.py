"""The tokenizer in a GGUF file, made one of Hugging Face's: byte-level BPE (`tokenizer.ggml.model = gpt2`).

llama.cpp keeps tokens, their kinds and merges. How a text is cut before merging has only a name there (`tokenizer.ggml.pre`), and
what it stands for is the rule of the family's own tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from nmoe.errors import UserError, shown
from nmoe.gguf_file import GGUFFile

# Kinds of tokens, `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4

# GPT-2's rule (https://github.com/openai/gpt-2), with digits one by one before it.
_DIGITS_THEN_GPT2 = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _cl100k(digits: str) -> Any:
    """The rule of GPT-4 (https://github.com/openai/tiktoken), with so many digits a piece."""
    return _by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


def _by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The rule of GPT-4o and gpt-oss (https://github.com/openai/tiktoken).
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_RULES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "llama-bpe": _cl100k(r"\p{N}{1,3}"),
    "qwen2": _cl100k(r"\p{N}"),
    "gpt-4o": _by(_O200K),
}
# Their tokenizers take a piece that is a token whole, whether merges lead to it or not.
_WHOLE_PIECES = {"llama-bpe", "gpt-4o"}


def tokenizer_of(file: GGUFFile) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a file, and the files that stand beside its tokenizer.json: its configuration, with the chat template.

    Raises UserError for a kind that is not read.
    """
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    match file.need("tokenizer.ggml.model", str):
        case "gpt2":
            backend = _byte_level(file, tokens)
        case other:
            raise UserError(
                f"{file.path}: tokenizer.ggml.model = {other!r} is not read, only 'gpt2'; name another tokenizer with "
                "model.tokenizer"
            )
    named = _named(file, tokens)
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL or token in named.values()]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    words = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    if file.get("tokenizer.ggml.add_bos_token", bool, False) and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.architecture}.context_length", int),
        **named,
    }
    if (template := file.get("tokenizer.chat_template", str)) is not None:
        config["chat_template"] = template
    return backend, {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n"}


def _byte_level(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    rule = file.get("tokenizer.ggml.pre", str, "default")
    if rule not in _RULES:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre = {rule!r} is not read, only {', '.join(sorted(_RULES))}; name the model's own "
            "tokenizer with model.tokenizer"
        )
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    merges = list[tuple[str, str]]()
    for merge in _strings(file, "tokenizer.ggml.merges"):
        first, _, second = merge.partition(" ")
        if first not in vocabulary or second not in vocabulary:
            raise UserError(f"{file.path}: tokenizer.ggml.merges has {shown(merge)}, which is no pair of tokens")
        merges.append((first, second))
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule in _WHOLE_PIECES)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{file.path}: its tokens and merges are no tokenizer: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _RULES[rule]
    backend.decoder = decoders.ByteLevel()
    return backend


_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def _named(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """The tokens with a role. Raises UserError for an id beyond the vocabulary."""
    found = {}
    for stored, name in _NAMED.items():
        id_ = file.get(f"tokenizer.ggml.{stored}_token_id", int)
        if id_ is None:
            continue
        if not 0 <= id_ < len(tokens):
            raise UserError(
                f"{file.path}: tokenizer.ggml.{stored}_token_id = {id_}, and there are {len(tokens)} tokens"
            )
        found[name] = tokens[id_]
    return found


def _strings(file: GGUFFile, key: str) -> list[str]:
    found = file.need(key, list)
    if not all(isinstance(one, str) for one in found):
        raise UserError(f"{file.path}: {key} is not a list of texts")
    return found
