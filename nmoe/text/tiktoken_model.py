"""Reads `tiktoken.model`, the tokenizer of Moonshot's releases (Kimi-K2, Moonlight), as a byte-level BPE.

The file has a line for each token: its bytes in base 64, and its rank, which is its id. The rules by which a text is split before
tokens are merged, and by which control tokens are numbered, are in code beside the file (`tokenization_kimi.py`), which is not run:
both are written down here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from nmoe.errors import UserError
from nmoe.parsing import json_object

FILE, CONFIG = "tiktoken.model", "tokenizer_config.json"

# Our key of tokenizer_config.json. Where it is false, no text becomes an added token, be that special or not.
IN_TEXT = "added_tokens_in_text"

# Modules of the releases whose rules are the ones below, as `auto_map` names them.
_MODULES = ("tokenization_kimi", "tokenization_moonshot")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECE_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Control tokens follow the last rank, whether tokenizer_config.json names them or not.
_CONTROL_TOKENS = 256

_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# How byte-level BPE writes a byte (GPT-2's release): as itself where it prints, else as the next character from U+0100.
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def read(directory: Path) -> tuple[tokenizers.Tokenizer, str]:
    """Reads a directory with `tiktoken.model`. Returns the tokenizer, and a `tokenizer_config.json` for it that names no code to
    run. Raises UserError, naming the file, if it is broken or from another package."""
    config = json_object(directory / CONFIG)
    named = _table(config, "auto_map", directory).get("AutoTokenizer") or [""]
    module = str(named[0] if isinstance(named, list) else named)
    if not module.startswith(_MODULES):
        raise UserError(
            f"{directory / FILE}: how texts are split is said by the code of {module or 'another package'}, which is not run; "
            "convert the tokenizer to tokenizer.json with transformers"
        )
    ranks = _ranks(directory / FILE)
    backend = tokenizers.Tokenizer(models.BPE(*_vocabulary_and_merges(ranks), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    listed = _table(config, "added_tokens_decoder", directory)
    for id_ in range(len(ranks), len(ranks) + _CONTROL_TOKENS):
        about = _table(listed, str(id_), directory)
        name, special = about.get("content", f"<|reserved_token_{id_}|>"), about.get("special", True)
        if not (isinstance(name, str) and name and isinstance(special, bool)):
            raise UserError(
                f"{directory / CONFIG}: token {id_}: content = {name!r} and special = {special!r} name no token"
            )
        backend.add_tokens([AddedToken(name, special=special, normalized=False)])
        if backend.token_to_id(name) != id_:
            raise UserError(f"{directory / CONFIG}: another token has the name {name!r} of token {id_}")
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "added_tokens_decoder")}
    ours = {"tokenizer_class": "PreTrainedTokenizerFast", IN_TEXT: False}
    return backend, json.dumps(kept | ours, indent=2) + "\n"


def _table(config: dict[str, Any], key: str, directory: Path) -> dict[str, Any]:
    """Returns the table under a key of the configuration; empty if it is missing or null. Raises UserError if it is no table."""
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{directory / CONFIG}: {key} = {found!r} is not a table")
    return found or {}


def _ranks(path: Path) -> list[bytes]:
    """Reads the bytes of each token, in the order of their ranks. Raises UserError if the file is torn, or lacks a byte or a
    rank."""
    found: dict[int, bytes] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                found[int(rank)] = base64.b64decode(token, validate=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    tokens = [found.get(rank, b"") for rank in range(len(found))]
    if len(set(tokens)) != len(tokens) or not {bytes([byte]) for byte in range(256)} <= set(tokens) or b"" in tokens:
        raise UserError(f"{path}: not a list of different tokens, all bytes among them, with the ranks from 0 up")
    return tokens


def _vocabulary_and_merges(tokens: list[bytes]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Converts ranked tokens to a BPE vocabulary and merges: tiktoken merges any two tokens that together are a token, the lowest
    rank first, so that each way to split a token in two is a merge."""
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    written = ["".join(_LETTERS[byte] for byte in token) for token in tokens]
    merges = []
    for token in tokens:
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = sorted((rank_of[a], rank_of[b]) for a, b in cuts if a in rank_of and b in rank_of)
        merges += [(written[a], written[b]) for a, b in pairs]
    return {text: rank for rank, text in enumerate(written)}, merges
