"""The tokenizer: byte-level BPE, trained here or loaded from Hugging Face files. Text cannot forge control tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from nmoe import generation
from nmoe.errors import MissingInputError, StorageError, UserError
from nmoe.gguf_file import is_gguf, read_header
from nmoe.parsing import json_of
from nmoe.text import tiktoken_model
from nmoe.text.conversation import TAGS
from nmoe.text.gguf_tokenizer import tokenizer_of
from nmoe.text.harmony import CONTROL_TOKENS, END_OF_TEXT, RETURN

# The pattern of GPT-4's cl100k_base (https://github.com/openai/tiktoken), but each digit is its own piece: numbers
# then have one spelling, and arithmetic does not depend on how digits happened to be grouped.
PIECE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
SMALLEST_VOCABULARY = len(CONTROL_TOKENS) + 256

# A pair seen once is a quirk of the corpus, not of the language.
_MIN_PAIR_COUNT = 2

_MODEL_FILE = "tokenizer.json"
# Kept as they are, so that a fine-tuned checkpoint leaves with the chat template that its base came with.
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level tokenizer's names stands for: printable bytes are themselves, and the
    others follow from U+0100 on (GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Converts text to token ids and back. `decode(encode(text)) == text` for every tokenizer made by `train`.

        >>> import nmoe
        >>> tokenizer = nmoe.Tokenizer.load(checkpoint)
        >>> tokenizer.decode(tokenizer.encode("2 + 2 = 4"))
        '2 + 2 = 4'

    `vocab_size` is one more than the largest id: the rows an embedding needs. Safe to share between threads.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, side_files: Mapping[str, str], origin: str, ends: Sequence[int] = ()
    ) -> None:
        """Wraps a tokenizer of Hugging Face's library, so that text cannot become control tokens. `side_files` are saved together
        with the model file; `origin` names this tokenizer in errors. `ends` are the tokens that end a turn in the generation
        settings of the checkpoint. Raises UserError if the text of a control token of Harmony's encodes to the token itself."""
        self._side_files = dict(side_files)
        self._origin = origin
        self._named_ends = tuple(ends)
        added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        # Some checkpoints declare control tokens as plain added words, which text would match.
        plain = [name for name in CONTROL_TOKENS if name in added and not added[name].special]
        # Moonshot's and DeepSeek's declare the tokens of roles and calls so, in order that a decoder shows them. `save` writes
        # their flags as they were.
        matched = self._config.get(tiktoken_model.IN_TEXT, True)
        words = [name for name in added if not added[name].special and name not in plain]
        shown = [name for name in words if _has_bars(name) or not matched]
        # Control tokens that the definition does not call special.
        decoded = backend.get_added_tokens_decoder()
        self.shown_ids = frozenset(id_ for id_, token in decoded.items() if token.content in shown)
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*plain, *shown)])
        backend.encode_special_tokens = True
        # Both can be baked into a tokenizer.json; one loses text silently and the other invents tokens.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        template = self.chat_template or ""
        self._special_ids = {
            token.content: id_
            for id_, token in backend.get_added_tokens_decoder().items()
            if token.special or _is_structure(token.content, template)
        }
        self._known_ids = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self._known_ids, default=-1) + 1
        for token in CONTROL_TOKENS:
            if token in self._special_ids and self._special_ids[token] in self.encode(token):
                raise UserError(
                    f"{origin}: the text {token!r} encodes to the control token itself; use another tokenizer"
                )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Trains a byte-level BPE on `texts`: all bytes, the control tokens, and the most frequent merges, up to `vocab_size`
        tokens.

        The same texts, in any order, give the same tokenizer. A corpus with fewer repeated pairs than needed gives a smaller
        vocabulary. Raises UserError for a vocabulary too small for all bytes and control tokens, and for a text with a lone
        surrogate, which is no character.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(
                f"a vocabulary of {vocab_size} tokens is too small: "
                f"256 bytes and {len(CONTROL_TOKENS)} control tokens need {SMALLEST_VOCABULARY}"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=_MIN_PAIR_COUNT,
            special_tokens=list(CONTROL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(_checked(texts), trainer)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": RETURN,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        return cls(backend, {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}, "the trained tokenizer")

    @classmethod
    def load(cls, directory: Path, checkpoint: Path | None = None) -> Tokenizer:
        """Loads a tokenizer from the Hugging Face files in `directory`, else from its `tiktoken.model`, or from a GGUF file. A turn
        also ends at the tokens that the generation settings in `directory` and in `checkpoint` name.

        Raises UserError, naming the file, when tokenizer.json is missing or cannot be read.
        """
        path, ends = directory / _MODEL_FILE, generation.ends_in(directory)
        if checkpoint is not None:
            ends = (*ends, *generation.ends_in(checkpoint))
        if is_gguf(directory):
            backend, side_files = tokenizer_of(read_header(directory))
            return cls(backend, side_files, str(directory), ends)
        if not path.exists() and (directory / tiktoken_model.FILE).exists():
            backend, config = tiktoken_model.read(directory)
            others = {name: _read(directory / name) for name in _SIDE_FILES if (directory / name).exists()}
            return cls(backend, others | {tiktoken_model.CONFIG: config}, str(directory), ends)
        definition = _read(path)
        try:
            backend = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises plain Exception for any fault of the file
            raise UserError(f"{path}: not a Hugging Face tokenizer: {error}") from error
        side_files = {name: _read(directory / name) for name in _SIDE_FILES if (directory / name).exists()}
        return cls(backend, side_files, str(directory), ends)

    def save(self, directory: Path) -> None:
        """Writes the tokenizer as Hugging Face files, for `load` and for transformers' AutoTokenizer. If the directory has a
        generation_config.json that names tokens that end a turn, the missing ones are added to it; otherwise they are written there
        only if the checkpoint's generation settings named any (`generation_ends`). Raises StorageError if the files cannot be
        written."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files = {_MODEL_FILE: self._definition(pretty=True), **self._side_files}
            has_settings = (directory / generation.FILE).exists()
            settings = generation.read_generation(directory) if has_settings else {}
            there = generation.ends_in(directory) if has_settings else ()
            if (there or self.generation_ends) and not set(self.end_ids).issubset(there):
                settings["eos_token_id"] = list(dict.fromkeys([*there, *self.end_ids]))
                files[generation.FILE] = json.dumps(settings, indent=2) + "\n"
            for name, text in files.items():
                (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write the tokenizer to {directory}: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that identify the whole definition, chat template and ends of a turn included. Saving and loading
        does not change them."""
        parts = [self._definition(), *(f"{name}\0{text}" for name, text in sorted(self._side_files.items()))]
        if own := set(self.end_ids) - set(self._own_end):
            parts.append(f"{generation.FILE}\0{sorted(own)}")
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def _definition(self, pretty: bool = False) -> str:
        """Returns the content of tokenizer.json."""
        text = self._backend.to_str(pretty=pretty)
        if not self.shown_ids:
            return text
        definition = json_of(text)
        for token in definition["added_tokens"]:
            token["special"] = token["id"] not in self.shown_ids
        return json.dumps(definition, ensure_ascii=False, indent=2 if pretty else None)

    def same_ids(self, other: Tokenizer) -> bool:
        """Returns whether both tokenizers have the same tokens under the same ids; their templates may differ."""
        return self._backend.get_vocab(with_added_tokens=True) == other._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def opening_ids(self) -> Sequence[int]:
        """The tokens that the tokenizer's post-processor puts before a text, such as Llama 3's `<|begin_of_text|>`; often none."""
        return tuple(self._backend.encode("", add_special_tokens=True).ids)

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """Encodes `text` as content: "<|end|>" gives ordinary tokens, and nothing is added before or after.

        With `control_tokens`, names of control tokens in the text become those tokens, as in transformers by default. Use it for
        prompts that you write yourself, never for text from elsewhere, which could forge a turn. Raises UserError for a lone
        surrogate, which is no character and has no bytes.
        """
        if control_tokens:
            pieces = self._names.split(text)
            return [
                id_
                for piece in pieces
                for id_ in ([self._special_ids[piece]] if piece in self._special_ids else self.encode(piece))
            ]
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # how the library refuses a surrogate
            _check_unicode(text)
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids`, control tokens as their names. Never raises: bytes that are not UTF-8 and ids outside the vocabulary
        become U+FFFD."""
        if self._known_ids.issuperset(ids):
            return self._backend.decode(ids, skip_special_tokens=False)
        text, known = "", list[int]()
        for id_ in ids:
            if id_ in self._known_ids:
                known.append(id_)
            else:
                text += self.decode(known) + "\ufffd"
                known = []
        return text + self.decode(known)

    def bytes_of(self, id_: int) -> bytes:
        """Returns the bytes that a token stands for, which may be a part of a character; U+FFFD's for an id without a token."""
        name = self._backend.id_to_token(id_)
        if name is None:
            return "\ufffd".encode()
        if id_ in self._added_ids:
            return name.encode()
        if self._is_byte_level:
            return bytes(map(_BYTE_OF.__getitem__, name)) if _BYTE_OF.keys() >= set(name) else name.encode()
        # SentencePiece's spaces, and its tokens of single bytes.
        byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
        return name.replace("\u2581", " ").encode() if byte is None else bytes.fromhex(byte[1])

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json_of(self._backend.to_str()).get("decoder"))

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """A pattern that finds the names of control tokens, the longest first if one begins another."""
        names = sorted(filter(None, self._special_ids), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)")

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids by name of all tokens that stand for structure and not for text, control tokens among them. Added tokens that are
        text, such as Gemma's for two line breaks, are left out."""
        return dict(self._special_ids)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of the tokens that the definition calls special, which are never part of a text."""
        special = {id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}
        return frozenset(special - self.shown_ids)

    @cached_property
    def _own_end(self) -> tuple[int, ...]:
        name = self.named_tokens.get("eos_token")
        return () if name is None or not self.has_special(name) else (self._special_ids[name],)

    @cached_property
    def generation_ends(self) -> tuple[int, ...]:
        """The tokens that end a turn in the checkpoint's generation settings (`eos_token_id`, often a list), in their order.

        Only structural tokens count: an id that is a piece of text here is the leftover of another tokenizer, such as the default 2
        of a new model's configuration.
        """
        added = set(self._special_ids.values())
        return tuple(one for one in self._named_ends if one in added)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn: the tokenizer's `eos_token`, and the ends in the checkpoint's generation settings."""
        return tuple(dict.fromkeys([*self._own_end, *self.generation_ends]))

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the template that came with the tokenizer (the one named "default" if there are several); None
        without one."""
        if "chat_template.jinja" in self._side_files:
            return self._side_files["chat_template.jinja"]
        template = self._config.get("chat_template")
        if isinstance(template, list):
            template = {one["name"]: one["template"] for one in template}.get("default")
        return template

    @cached_property
    def named_tokens(self) -> dict[str, str]:
        """The tokens with a role, by role: `{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}`."""
        named = {key: value for key, value in self._config.items() if key.endswith("_token")}
        named = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
        return {key: value for key, value in named.items() if isinstance(value, str)}

    @cached_property
    def _config(self) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json_of(self._side_files.get("tokenizer_config.json", "{}"))
        except ValueError as error:
            raise UserError(f"{self._origin}/tokenizer_config.json: not JSON: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"{self._origin}/tokenizer_config.json: not a JSON object")
        return config

    def has_special(self, token: str) -> bool:
        """Returns whether there is a control token of this name."""
        return token in self._special_ids

    def special_id(self, token: str) -> int:
        """Returns the id of a control token. Raises UserError if the tokenizer has none of that name."""
        if token not in self._special_ids:
            remedy = "use one with the Harmony control tokens, such as gpt-oss's or one trained by nmoe"
            if token in CONTROL_TOKENS and token != END_OF_TEXT and self.chat_template is not None:
                remedy = 'it has a chat template: write format = "chat", or leave `format` out'
            raise UserError(f"{self._origin}: the tokenizer has no control token {token!r}; {remedy}")
        return self._special_ids[token]


def _has_bars(name: str) -> bool:
    """Returns whether a token's name has the form of a control token, such as <|im_end|>, also with full-width bars as in
    DeepSeek's."""
    return name[1:2] in ("|", "\uff5c") and name[-2:-1] == name[1]


def _is_structure(name: str, template: str) -> bool:
    """Returns whether an added token that has no bars and is not called special is structure nevertheless: the chat template writes
    it, or it is a tag of reasoning or calls. Other added tokens are text: Gemma has runs of line breaks and tags of HTML."""
    return name in TAGS or bool(name.strip() and name in template)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        message = f"{path}: no such file; a tokenizer directory holds {_MODEL_FILE}"
        raise MissingInputError(message, str(path.parent)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        _check_unicode(text)
        yield text


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, "
            f"which is not a character: {text[max(0, error.start - 20) : error.start + 20]!r}; repair the data"
        ) from error
