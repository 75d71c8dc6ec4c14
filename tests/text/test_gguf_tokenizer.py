"""Tokenizers in GGUF files: the same ids, texts and ends as the tokenizers that they were made from."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import released_tokenizers
from gguf import TokenType as Kind
from gguf_files import add_tokenizer, finish

from nmoe.errors import UserError
from nmoe.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world! 123",
    "  multiple   spaces\n\n\tand tabs \r\n",
    "Don't I'LL we've; 3.14159 2024年 東京 naïve café é",
    "def f(x):\n    return x**2  # 12345678\n\n\n",
    "🙂👍🏽 ﷽ \u0300a <|im_end|> <think> <end_of_turn> </s>",
    "a" * 50 + " " * 40 + "b",
    "ALLCAPS CamelCaseWord iPhone 'S",
    "\n" * 5,
    "<table><tr>",
    "http://x.y/z?q=1//\n/",
    "ｆｕｌｌ ﬁ Å",
    " ",
    "",
    "x\u00a0y\u3000z ▁ _",
]


def test_a_byte_level_tokenizer_has_its_ids_names_and_templates(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    # nmoe's own rule is that of Qwen's.
    add_tokenizer(writer, tmp_path, "qwen2")
    templates = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]
    writer.add_chat_template(templates)
    ours = Tokenizer.load(finish(writer))
    assert ours.same_ids(tokenizer)
    assert ours.added_tokens == tokenizer.added_tokens
    assert ours.named_tokens == tokenizer.named_tokens
    assert ours.control_ids == tokenizer.control_ids
    assert ours.chat_template == "{{ messages }}"
    for text in TEXTS:
        # Qwen composes characters first.
        assert ours.encode(text) == tokenizer.encode(unicodedata.normalize("NFC", text))
    ours.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/tokenizer_config.json").read_text())["chat_template"] == templates


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ12345", "ĠDON", "'", "T", "ĊĊ", "Ġx"]),
        ("smollm", ["a", "ĠĠ", "1", "2", "3", "4", "5", "ĠDON", "'", "T", "ĊĊ", "Ġx"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠDON", "'T", "ĊĊ", "Ġx"]),
        ("llama-bpe", ["a", "Ġ", "Ġ", "123", "45", "ĠDON", "'T", "ĊĊ", "Ġx"]),
        ("gpt-4o", ["a", "Ġ", "Ġ", "123", "45", "ĠDON'T", "ĊĊ", "Ġx"]),
        ("tekken", ["a", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠDON", "'T", "ĊĊ", "Ġx"]),
    ],
)
def test_a_text_is_cut_by_the_rule_that_the_file_names(rule: str, pieces: list[str], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    backend = Tokenizer.load(finish(writer))._backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  12345 DON'T\n\n x")] == pieces


# "he" and "ll" have higher scores than "el" and "hel": SentencePiece joins the pair whose token has the highest.
SPM = [
    ("<unk>", 0, Kind.UNKNOWN),
    ("<s>", 0, Kind.CONTROL),
    ("</s>", 0, Kind.CONTROL),
    *((f"<0x{byte:02X}>", 0, Kind.BYTE) for byte in range(256)),
    *((one, -20 - at, Kind.NORMAL) for at, one in enumerate("▁helo")),
    ("he", -2, Kind.NORMAL),
    ("el", -3, Kind.NORMAL),
    ("ll", -1, Kind.NORMAL),
    ("hel", -4, Kind.NORMAL),
    ("▁he", -6, Kind.NORMAL),
    ("llo", -7, Kind.NORMAL),
    ("[tool]", 0, Kind.USER_DEFINED),
    ("  ", 0, Kind.USER_DEFINED),
    ("<end_of_turn>", 0, Kind.CONTROL),
]


def spm(path: Path, **keys: bool) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    tokens, scores, kinds = zip(*SPM, strict=True)
    writer.add_token_list(tokens)
    writer.add_token_scores([float(score) for score in scores])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    return Tokenizer.load(finish(writer))


def test_sentence_pieces_are_joined_by_score_and_other_characters_are_bytes(tmp_path: Path) -> None:
    ours = spm(tmp_path / "model.gguf", add_space_prefix=False)

    def pieces(text: str) -> list[str]:
        return [SPM[one][0] for one in ours.encode(text)]

    assert pieces("hello") == ["he", "llo"]
    assert pieces("hel") == ["hel"]
    assert pieces("hello hello") == ["he", "llo", "▁he", "llo"]
    assert pieces("oé") == ["o", "<0xC3>", "<0xA9>"]
    assert pieces("o   o") == ["o", "  ", "▁", "o"]
    assert pieces("[tool]</s>") == ["[tool]", "<0x3C>", "<0x2F>", "<0x73>", "<0x3E>"]
    for text in ("hello hello", "oé  \n🙂   hel", ""):
        assert ours.decode(ours.encode(text)) == text
    assert ours.opening_ids == (1,)
    # Gemma's files name the end of a text alone; a turn ends as its template ends it.
    assert ours.end_ids == (2, len(SPM) - 1)


def test_llama_2_puts_a_space_before_a_text(tmp_path: Path) -> None:
    ours = spm(tmp_path / "model.gguf", add_bos_token=False)
    assert [SPM[one][0] for one in ours.encode("hello")] == ["▁he", "llo"]
    assert ours.decode(ours.encode("hello hello")) == "hello hello"
    assert ours.opening_ids == ()


def test_smollm2_has_known_ids(smollm2_gguf: Path) -> None:
    ours = Tokenizer.load(smollm2_gguf)
    assert ours.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert ours.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert ours.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert ours.encode("a  12") == [81, 256, 33, 34]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rule"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe"), ("gptoss", "gpt-4o"), ("gemma3", None)]
)
def test_released_tokenizers_have_their_ids(name: str, rule: str | None, tmp_path: Path) -> None:
    theirs = released_tokenizers.ours(name)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_tokenizer(writer, released_tokenizers.directory(name), rule)
    ours = Tokenizer.load(finish(writer))
    assert ours.same_ids(theirs)
    assert ours.opening_ids == theirs.opening_ids
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text)), text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer.ggml.model = 'rwkv' is not read, only 'gpt2' and 'llama'"),
        ({"tokenizer.ggml.pre": "bloom"}, r"tokenizer.ggml.pre = 'bloom' is not read, only default, gpt-2,"),
        (
            {"tokenizer.ggml.merges": ["b a"]},
            r"tokenizer.ggml.merges has 'b a', which is no pair of tokens that make one",
        ),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer.ggml.tokens is not a list of texts"),
        ({"tokenizer.ggml.token_type": [1]}, r"3 tokens, and 1 kinds of them"),
        ({"tokenizer.ggml.eos_token_id": 7}, r"tokenizer.ggml.eos_token_id = 7, and there are 3 tokens"),
        ({"tokenizer.chat_template": 7}, r"tokenizer.chat_template = 7 is not of the type that belongs there"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    } | keys
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    with pytest.raises(UserError, match=said):
        Tokenizer.load(finish(writer))
