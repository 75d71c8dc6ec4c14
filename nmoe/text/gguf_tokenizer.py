"""Converts the tokenizer in a GGUF file to Hugging Face's: byte-level BPE (`tokenizer.ggml.model = gpt2`), or SentencePiece's BPE
(`llama`).

llama.cpp keeps tokens, their types, and merges or scores. The rule by which a text is cut before merging has only a name there
(`tokenizer.ggml.pre`), which stands for the rule of the family's tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from nmoe.errors import UserError, shown
from nmoe.gguf_file import GGUFFile

# Kinds of tokens, `tokenizer.ggml.token_type`.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# SentencePiece writes spaces so.
_SPACE = "\u2581"


def _by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# GPT-2 (https://github.com/openai/gpt-2), with digits one by one before it where they are cut first.
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS_FIRST = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])

# GPT-4 and GPT-4o (https://github.com/openai/tiktoken), with the number of digits per piece left open.
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
)
_ONE, _UP_TO_THREE = r"\p{N}", r"\p{N}{1,3}"


@dataclass(frozen=True)
class _Rule:
    """How a model family's tokenizer cuts a text before merging. `whole`: a piece that is a token becomes that token, even if no
    merges lead to it. `opened`: a text begins with the `bos_token` unless the file says otherwise."""

    cut: Any
    whole: bool = False
    opened: bool = False
    normalizer: Any = None


_RULES = {
    "default": _Rule(_GPT2),
    "gpt-2": _Rule(_GPT2),
    "smollm": _Rule(_DIGITS_FIRST),
    "qwen2": _Rule(_by(_CL100K.replace("DIGITS", _ONE)), normalizer=normalizers.NFC()),
    "llama-bpe": _Rule(_by(_CL100K.replace("DIGITS", _UP_TO_THREE)), whole=True, opened=True),
    "gpt-4o": _Rule(_by(_O200K.replace("DIGITS", _UP_TO_THREE).replace("SUFFIX", f"{_SUFFIX}?")), whole=True),
    "tekken": _Rule(_by(_O200K.replace("DIGITS", _ONE).replace("SUFFIX", "")), whole=True, opened=True),
}


def tokenizer_of(file: GGUFFile) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Returns the tokenizer of a GGUF file, and the text of the files to save with it: `tokenizer_config.json`, with the chat
    templates.

    Raises UserError for a tokenizer of a type that is not supported, and for a file whose values do not fit together.
    """
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise UserError(f"{file.path}: {len(tokens)} tokens, and {len(kinds)} kinds of them; fetch the file again")
    match file.need("tokenizer.ggml.model", str):
        case "gpt2":
            backend, opened = _byte_level(file, tokens)
        case "llama":
            backend, opened = _sentence_piece(file, tokens, kinds), True
        case other:
            raise UserError(
                f"{file.path}: tokenizer.ggml.model = {other!r} is not read, only 'gpt2' and 'llama'; name a directory with the "
                "model's tokenizer.json by model.tokenizer"
            )
    named = _named(file, tokens)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    # SentencePiece's runs of spaces are words among others: the pieces of a run depend on its length alone.
    words = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED and token.strip(" ")]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    if file.get("tokenizer.ggml.add_bos_token", bool, opened) and "bos_token" in named:
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
    if (template := _templates(file)) is not None:
        config["chat_template"] = template
    return backend, {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n"}


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Builds a byte-level BPE tokenizer; returns it, and whether a text begins with its `bos_token` unless the file says otherwise.
    Raises UserError for an unknown rule of cutting, and for merges that do not fit the tokens."""
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in _RULES:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} is not read, only {', '.join(sorted(_RULES))}; name a directory with the "
            "model's tokenizer.json by model.tokenizer"
        )
    rule = _RULES[name]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    merges = list[tuple[str, str]]()
    for merge in _strings(file, "tokenizer.ggml.merges"):
        first, _, second = merge.partition(" ")
        if first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
            raise UserError(
                f"{file.path}: tokenizer.ggml.merges has {shown(merge)}, which is no pair of tokens that make one"
            )
        merges.append((first, second))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole))
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer
    backend.pre_tokenizer = rule.cut
    backend.decoder = decoders.ByteLevel()
    return backend, rule.opened


def _sentence_piece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """Builds a SentencePiece BPE tokenizer. SentencePiece joins the pair whose token has the highest score; here each pair of
    tokens that makes a token is a merge, ranked by that score. Raises UserError for scores or an unknown token that do not fit the
    tokens."""
    scores = file.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise UserError(f"{file.path}: {len(tokens)} tokens, and {len(scores)} scores; fetch the file again")
    unknown = file.get("tokenizer.ggml.unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise UserError(f"{file.path}: tokenizer.ggml.unknown_token_id = {unknown}, and there are {len(tokens)} tokens")
    words = [
        token.replace(" ", _SPACE) if kind in (_NORMAL, _USER_DEFINED) else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    vocabulary = {word: id_ for id_, word in enumerate(words)}
    joined = {word for word, kind in zip(words, kinds, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    pairs = [
        (-scores[vocabulary[word]], -cut, cut - len(word), word[:cut], word[cut:])
        for word in joined
        for cut in range(1, len(word))
        if word[:cut] in joined and word[cut:] in joined
    ]
    # Of equal scores the longer first half goes first, as where Hugging Face converts SentencePiece's models.
    merges = [(first, second) for *_, first, second in sorted(pairs)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=words[unknown], fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def _named(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """Returns the tokens with a role, such as `{"eos_token": "</s>"}`. Raises UserError for an id beyond the vocabulary."""
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


def _templates(file: GGUFFile) -> str | list[dict[str, str]] | None:
    """Returns the chat template; a list of named templates, in Hugging Face's form, if there are several; None if there is none."""
    default = file.get("tokenizer.chat_template", str)
    others = {
        name: file.need(f"tokenizer.chat_template.{name}", str)
        for name in file.get("tokenizer.chat_templates", list, [])
    }
    if not others:
        return str(default) if default is not None else None
    if default is not None:
        others = {"default": default} | others
    return [{"name": name, "template": template} for name, template in others.items()]


def _strings(file: GGUFFile, key: str) -> list[str]:
    found = file.need(key, list)
    if not all(isinstance(one, str) for one in found):
        raise UserError(f"{file.path}: {key} is not a list of texts")
    return found
