"""Moonshot's `tiktoken.model` against tiktoken's algorithm, written out over the `regex` package's reading of the pattern."""

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from transformers import AutoTokenizer

from nmoe.errors import UserError
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

# As tokenization_kimi.py of the release has it.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
CORPUS = (
    "The quick brown fox doesn't jump over 1234567 lazy dogs. 你好世界，欢迎使用模型！ mixed 中文and English混合 text\n\n"
    "def add(x, y):\n    return x + y  # sum\n\tpass\r\n  Größe naïve ÉCOLE résumé МОСКВА привет 'LL they'll HTTPServer   end   "
)
TEXTS = [
    *(CORPUS, "", " ", "\n \n", "aaaaaaa", "don't DON'T", "世界the世界", "3.14159e-10"),
    *("🎉🚀 \u200b\u0301x", "<|im_end|>", "x<|im_end|>"),
]
CONFIG: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "eos_token": "<|im_end|>",
    "chat_template": "{{ messages }}",
}


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's merging: again and again the two neighbours that are together the token of the lowest rank, the leftmost first."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def pieces(text: str) -> Iterator[bytes]:
    return (match.group().encode() for match in regex.finditer(PATTERN, text, regex.V1))


def learned(count: int) -> list[bytes]:
    """Bytes and the most frequent pairs of the corpus, one after another."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in piece] for piece in pieces(CORPUS + "aaaa aaaa 世界世界 " * 3)]
    while len(tokens) < count:
        counts: dict[bytes, int] = {}
        for word in words:
            for a, b in itertools.pairwise(word):
                counts[a + b] = counts.get(a + b, 0) + 1
        new = max(counts, key=lambda token: (counts[token], token))
        tokens.append(new)
        for word in words:
            at = 0
            while at + 1 < len(word):
                if word[at] + word[at + 1] == new:
                    word[at : at + 2] = [new]
                at += 1
    return tokens


TOKENS = learned(380)
# In the releases ranks are in no order of bytes.
TOKENS[:256] = TOKENS[128:256] + TOKENS[:128]
IM_END = len(TOKENS) + 2


def write(directory: Path, tokens: list[bytes] = TOKENS, config: dict[str, Any] = CONFIG) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    names = {str(IM_END): {"content": "<|im_end|>", "special": True}}
    return write(tmp_path, config=CONFIG | {"added_tokens_decoder": names})


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_a_text_has_tiktokens_ids(directory: Path, text: str) -> None:
    tokenizer = Tokenizer.load(directory)
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    expected = [id_ for piece in pieces(text) for id_ in merged(piece, ranks)]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_control_tokens_follow_the_ranks(directory: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.vocab_size == len(TOKENS) + 256
    assert tokenizer.special_id("<|im_end|>") == IM_END
    assert tokenizer.special_id(f"<|reserved_token_{IM_END + 1}|>") == IM_END + 1
    assert tokenizer.encode("x<|im_end|>", control_tokens=True)[-1] == IM_END
    assert (tokenizer.chat_template, tokenizer.named_tokens["eos_token"]) == ("{{ messages }}", "<|im_end|>")
    # What is saved is a tokenizer.json, which transformers reads without running code.
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode(CORPUS) == tokenizer.encode(CORPUS)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.encode(CORPUS, add_special_tokens=False) == tokenizer.encode(CORPUS)
    assert theirs.eos_token_id == IM_END


# How Kimi-K2 is released: decoders show calls and thoughts, so these are not special.
SHOWN = {IM_END + 1: "<|tool_calls_section_begin|>", IM_END + 2: "<think>"}
TEMPLATE = (
    "{% for message in messages %}<|im_{{ message.role }}|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


def test_no_text_becomes_a_control_token_that_decoders_show(tmp_path: Path) -> None:
    names = {IM_END: "<|im_end|>", IM_END + 3: "<|im_user|>", IM_END + 4: "<|im_assistant|>", **SHOWN}
    listed = {str(id_): {"content": name, "special": id_ not in SHOWN} for id_, name in names.items()}
    write(tmp_path, config=CONFIG | {"added_tokens_decoder": listed, "chat_template": TEMPLATE})
    read = Tokenizer.load(tmp_path)
    read.save(tmp_path / "saved")
    saved = Tokenizer.load(tmp_path / "saved")
    assert saved.fingerprint == read.fingerprint
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    every = "".join(read.added_tokens)
    assert len(read.added_tokens) == 256
    for tokenizer in (read, saved):
        plain = [id_ for piece in pieces(f"x{every}") for id_ in merged(piece, ranks)]
        assert tokenizer.encode(f"x{every}") == plain
        assert tokenizer.encode(every, control_tokens=True) == [*range(len(TOKENS), len(TOKENS) + 256)]
        assert tokenizer.control_ids == {*range(len(TOKENS), len(TOKENS) + 256)} - SHOWN.keys()
        # The template's own are control tokens; what the user writes is text.
        rendered = ChatTemplate(tokenizer).prompt_ids([Message("user", SHOWN[IM_END + 1])])
        text = tokenizer.encode(SHOWN[IM_END + 1])
        assert rendered[0] == IM_END + 3
        assert rendered[-2:] == [IM_END, IM_END + 4]
        assert max(rendered[1:-2]) < len(TOKENS)
        assert tokenizer.decode(rendered[1:-2]) == tokenizer.decode(text) == SHOWN[IM_END + 1]
        # In a sampled turn they are its form, as their flag says.
        assert ChatTemplate(tokenizer).completion_ids("<think>a")[0] == IM_END + 2
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.decode([IM_END + 1, IM_END], skip_special_tokens=True) == SHOWN[IM_END + 1]
    assert theirs.encode("x<|im_end|><think>", add_special_tokens=False)[-2:] == [IM_END, IM_END + 2]


@pytest.mark.parametrize(
    ("tokens", "config", "message"),
    [
        (
            TOKENS,
            CONFIG | {"auto_map": {}},
            r"tiktoken\.model: how texts are split is said by the code of another package",
        ),
        (
            TOKENS,
            CONFIG | {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}},
            "tokenization_qwen",
        ),
        (TOKENS[1:], CONFIG, r"tiktoken\.model: not a list of different tokens, all bytes among them"),
        ([*TOKENS, TOKENS[-1]], CONFIG, "not a list of different tokens"),
        (
            TOKENS,
            CONFIG | {"added_tokens_decoder": {str(len(TOKENS)): {"content": "a"}}},
            rf"tokenizer_config\.json: another token has the name 'a' of token {len(TOKENS)}",
        ),
        (TOKENS, CONFIG | {"auto_map": None}, "by the code of another package"),
        (TOKENS, CONFIG | {"auto_map": "x"}, r"tokenizer_config\.json: auto_map = 'x' is not a table"),
        (
            TOKENS,
            CONFIG | {"added_tokens_decoder": ["<|im_end|>"]},
            r"added_tokens_decoder = \['<\|im_end\|>'\] is not a table",
        ),
        (
            TOKENS,
            CONFIG | {"added_tokens_decoder": {str(IM_END): "<|im_end|>"}},
            rf"tokenizer_config\.json: {IM_END} = '<\|im_end\|>' is not a table",
        ),
        (
            TOKENS,
            CONFIG | {"added_tokens_decoder": {str(IM_END): {"content": 5}}},
            rf"token {IM_END}: content = 5 and special = True name no token",
        ),
    ],
    ids=[
        "no code",
        "other code",
        "a byte missing",
        "twice",
        "a name twice",
        *("null", "no map", "a list", "a text", "a number"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, tokens: list[bytes], config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer.load(write(tmp_path, tokens, config))


def test_a_torn_file_is_named(directory: Path) -> None:
    (directory / "tiktoken.model").write_text("IQ== 0\nIg==")
    with pytest.raises(UserError, match=r"tiktoken\.model: cannot be read: "):
        Tokenizer.load(directory)
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not a JSON object"):
        Tokenizer.load(directory)
