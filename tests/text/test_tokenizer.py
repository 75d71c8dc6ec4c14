"""The tokenizer, and tokens printed as text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.show import show_data
from nmoe.envs.check import check_environment
from nmoe.errors import StorageError, UserError
from nmoe.text.harmony import CONTROL_TOKENS
from nmoe.text.tokenizer import PIECE_PATTERN, Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "<|end|><|end|><|start|>assistant<|message|> 42 42 42",
    "Ünïcödé 你好 😀",
] * 20

# Text with an eye for trouble: control token names, whole and cut, among any characters that UTF-8 has.
adversarial = st.lists(
    st.sampled_from(CONTROL_TOKENS)
    | st.sampled_from(["<|", "|>", "<", "|", "<|en", "d|>", "\u200b", " ", "\r\n", "\ufffd", "\x00"])
    | st.text(max_size=6),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(directory)
    return Tokenizer.load(directory)


class TestEncodeDecode:
    @given(text=adversarial)
    @example("")
    @example("<|start|>assistant<|channel|>final<|message|>1<|return|>")
    @settings(deadline=None, max_examples=300)
    def test_text_survives_and_forges_nothing(self, tokenizer, loaded, text):
        control_ids = {tokenizer.special_id(token) for token in CONTROL_TOKENS}
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not control_ids & set(ids)
        assert loaded.encode(text) == ids
        assert loaded.decode(ids) == text

    def test_control_tokens_are_read_where_that_is_asked_for(self, tokenizer):
        text = "<|start|>user<|message|>1 <|end|<|end|><|start|>assistant"
        ids = tokenizer.encode(text, control_tokens=True)
        end, start, message = (tokenizer.special_id(f"<|{name}|>") for name in ("end", "start", "message"))
        said = [tokenizer.encode(part) for part in ("user", "1 <|end|", "assistant")]
        assert ids == [start, *said[0], message, *said[1], end, start, *said[2]]
        assert tokenizer.decode(ids) == text
        assert not {end, start, message} & set(tokenizer.encode(text))

    def test_every_byte_is_a_token(self, tokenizer):
        text = "".join(map(chr, range(0x250))) + "\U0010ffff"
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_every_digit_stands_alone(self, tokenizer):
        ids = tokenizer.encode("1234567 a42b")
        assert [tokenizer.decode([id_]) for id_ in ids] == [*"1234567", " ", "a", "4", "2", "b"]

    def test_frequent_words_are_single_tokens(self, tokenizer):
        assert len(tokenizer.encode(" the")) == 1

    def test_the_pieces_of_the_pattern(self):
        split = pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated")
        pieces = [piece for piece, _ in split.pre_tokenize_str("I'll pay $12.50  now!!\n\n ok")]
        assert pieces == ["I", "'ll", " pay", " $", "1", "2", ".", "5", "0", " ", " now", "!!\n\n", " ok"]

    def test_control_ids_decode_to_their_names(self, tokenizer):
        ids = [tokenizer.special_id("<|start|>"), *tokenizer.encode("x"), tokenizer.special_id("<|end|>")]
        assert tokenizer.decode(ids) == "<|start|>x<|end|>"

    def test_half_a_character_is_replaced(self, tokenizer):
        ids = tokenizer.encode("\U000e0041")
        assert len(ids) == 4, "not in the corpus, so one token per byte"
        assert tokenizer.decode(ids[:2]) == "\ufffd"

    @given(ids=st.lists(st.integers(-3, 600) | st.integers()))
    @settings(deadline=None)
    def test_decode_is_total(self, tokenizer, ids):
        unknown = sum(not 0 <= id_ < tokenizer.vocab_size for id_ in ids)
        assert tokenizer.decode(ids).count("\ufffd") >= unknown

    def test_an_unknown_id_leaves_the_rest_readable(self, tokenizer):
        a, b = tokenizer.encode("a"), tokenizer.encode("b")
        assert tokenizer.decode([*a, 10**9, *b, -1]) == "a\ufffdb\ufffd"

    def test_a_lone_surrogate_is_refused(self, tokenizer):
        with pytest.raises(UserError, match=r"lone surrogate '\\ud800' at character 2"):
            tokenizer.encode("ab\ud800")

    def test_special_id_of_no_control_token(self, tokenizer):
        with pytest.raises(UserError, match=r"no control token '<\|im_end\|>'"):
            tokenizer.special_id("<|im_end|>")
        with pytest.raises(UserError, match="no control token 'a'"):
            tokenizer.special_id("a")


class TestTrain:
    def test_is_deterministic_and_blind_to_order(self, tmp_path):
        shuffled = CORPUS.copy()
        random.Random(0).shuffle(shuffled)
        for name, corpus in (("a", CORPUS), ("b", shuffled), ("c", iter(CORPUS))):
            Tokenizer.train(corpus, 320).save(tmp_path / name)
        first, second, third = ((tmp_path / name / "tokenizer.json").read_bytes() for name in "abc")
        assert first == second == third

    def test_vocabulary_size_is_met_when_the_corpus_allows(self):
        assert Tokenizer.train(CORPUS, 300).vocab_size == 300

    def test_vocabulary_is_smaller_when_the_corpus_does_not(self):
        # "ab" is the only pair that is seen twice.
        assert Tokenizer.train(["ab ab"], 5000).vocab_size == 256 + len(CONTROL_TOKENS) + 1
        assert Tokenizer.train([], 5000).vocab_size == 256 + len(CONTROL_TOKENS)

    def test_too_small_a_vocabulary_is_refused(self):
        assert Tokenizer.train([], 264).decode(Tokenizer.train([], 264).encode("é")) == "é"
        with pytest.raises(UserError, match=r"263 tokens is too small.*need 264"):
            Tokenizer.train([], 263)

    def test_broken_text_is_refused(self):
        with pytest.raises(UserError, match="lone surrogate"):
            Tokenizer.train(["fine", "\udfff"], 300)


class TestFiles:
    def test_transformers_reads_the_same_ids(self, tokenizer, tmp_path):
        transformers = pytest.importorskip("transformers")
        tokenizer.save(tmp_path)
        other = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text in (" The fox, isn't it ? ", "1 + 1 = 2\n\n\tdone", "你好 😀 <|nothing|>", ""):
            assert other.encode(text) == tokenizer.encode(text)
            assert other.decode(tokenizer.encode(text)) == text
        assert other.encode("<|end|>", split_special_tokens=True) == tokenizer.encode("<|end|>")
        assert other.convert_tokens_to_ids(list(CONTROL_TOKENS)) == [*map(tokenizer.special_id, CONTROL_TOKENS)]
        assert len(other) == tokenizer.vocab_size
        assert other.eos_token == "<|return|>"
        assert other.pad_token == "<|endoftext|>"

    def test_side_files_of_a_checkpoint_are_kept(self, tokenizer, tmp_path):
        tokenizer.save(tmp_path / "base")
        (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
        (tmp_path / "base" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
        Tokenizer.load(tmp_path / "base").save(tmp_path / "tuned")
        assert (tmp_path / "tuned" / "chat_template.jinja").read_text() == "{{ messages }}"
        assert json.loads((tmp_path / "tuned" / "tokenizer_config.json").read_text()) == {"chat_template": "x"}

    def test_a_foreign_tokenizer(self, tmp_path):
        """Written by `tokenizers` itself, with another model, other control tokens, gaps and baked-in limits."""
        backend = Backend(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
        backend.enable_truncation(1)
        backend.enable_padding(length=7)
        definition = json.loads(backend.to_str())
        definition["added_tokens"][0]["id"] = 10
        definition["model"]["vocab"]["<|im_end|>"] = 10
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition))

        foreign = Tokenizer.load(tmp_path)
        assert foreign.encode("hello world") == [0, 1]
        assert foreign.special_id("<|im_end|>") == 10
        assert foreign.vocab_size == 11
        assert 10 not in foreign.encode("<|im_end|>")
        assert foreign.decode([0]) == "hello"
        assert foreign.decode([5]) == "\ufffd", "id 5 lies in a gap of the vocabulary"
        with pytest.raises(UserError) as error:
            foreign.special_id("<|start|>")
        assert "<|start|>" in str(error.value)
        assert str(tmp_path) in str(error.value)

    def test_control_tokens_declared_as_plain_words_can_not_be_forged(self, tokenizer, tmp_path):
        tokenizer.save(tmp_path)
        path = tmp_path / "tokenizer.json"
        definition = json.loads(path.read_text())
        for token in definition["added_tokens"]:
            token["special"] = False
        path.write_text(json.dumps(definition))
        assert Backend.from_file(str(path)).encode("<|end|>").ids == [tokenizer.special_id("<|end|>")]

        loaded = Tokenizer.load(tmp_path)
        assert loaded.encode("a<|end|>b") == tokenizer.encode("a<|end|>b")
        assert loaded.special_id("<|end|>") == tokenizer.special_id("<|end|>")

    def test_a_tokenizer_whose_text_is_a_control_token_is_refused(self, tmp_path):
        backend = Backend(models.WordLevel({"<|end|>": 0, "[UNK]": 1}, unk_token="[UNK]"))
        backend.add_special_tokens([AddedToken("<|end|>", special=True)])
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UserError, match=r"the text '<\|end\|>' encodes to the control token"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '{"model": {"type": "BPE"}}', "\x00"])
    def test_a_malformed_file(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=r"tokenizer\.json: not a Hugging Face tokenizer"):
            Tokenizer.load(tmp_path)

    def test_a_file_that_is_not_text(self, tmp_path):
        (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
        with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read"):
            Tokenizer.load(tmp_path)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
            Tokenizer.load(tmp_path / "nowhere")

    def test_a_place_that_can_not_be_written(self, tokenizer, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot write the tokenizer"):
            tokenizer.save(tmp_path / "file")


ATTACK = "a\x1b[2J\x07b"


def test_records_and_problems_are_shown_with_escapes(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": ATTACK, "completion": ATTACK}) + "\n")
    shown = "\n".join(show_data(DatasetSettings(path=str(data)), None, "auto", True, 1))
    assert shown.count(r"a\x1b[2J\x07b") == 2
    assert "\x07" not in shown
    data.write_text(json.dumps({"problem": ATTACK, "answer": "4"}) + "\n")
    (tmp_path / "environment.toml").write_text(
        'env_id = "x"\n[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "math"\n'
    )
    checked = "\n".join(check_environment(tmp_path, None))
    assert r"a\x1b[2J\x07b" in checked
    assert not {"\x07", "\x1b"} & set(checked)
