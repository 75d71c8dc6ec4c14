"""Reads a checkpoint's generation_config.json: the tokens that end a turn, and the sampling settings of the model's authors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.gguf_file import is_gguf, read_header
from nmoe.parsing import json_object

FILE = "generation_config.json"

# The checkpoint decides which tokens end a generation; old checkpoints say so in config.json.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# What authors who sample may set, with the value that holds where they leave it out. transformers then has 50 for `top_k`, which
# no author chose.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None}


def read_generation(directory: Path) -> dict[str, Any]:
    """Reads the generation settings of a checkpoint from its generation_config.json.

    Without this file, returns the token ids in config.json, as transformers does; for a GGUF file, the ids in its
    metadata; an empty dictionary if there is none of these. Raises UserError, with the path, for a file that is not a
    JSON object.
    """
    if is_gguf(directory):
        return _of_gguf(directory)
    path = directory / FILE
    if path.exists():
        return json_object(path)
    path = directory / "config.json"
    raw = json_object(path) if path.exists() else {}
    return {name: raw[name] for name in TOKEN_IDS if raw.get(name) is not None}


# The ends of a text, of a turn, and of a message that calls a tool. Many files name only one of them; llama.cpp then knows the end
# of a turn by its name, as Llama 3 and Gemma 3 have it.
_GGUF_ENDS = ("eos", "eot", "eom")
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
_GGUF_IDS = {"bos_token_id": "bos", "pad_token_id": "padding"}


def _of_gguf(path: Path) -> dict[str, Any]:
    file = read_header(path)
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    ids = {name: file.get(f"tokenizer.ggml.{stored}_token_id", int) for name, stored in _GGUF_IDS.items()}
    stored = [file.get(f"tokenizer.ggml.{end}_token_id", int) for end in _GGUF_ENDS]
    named = [tokens.index(end) for end in _TURN_ENDS if end in tokens]
    ends = list(dict.fromkeys(end for end in (*stored, *named) if end is not None))
    ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return {name: value for name, value in ids.items() if value is not None}


def end_ids_of(generation: Mapping[str, Any], where: object) -> tuple[int, ...]:
    """Returns the token ids in `eos_token_id` of generation settings, which may be one id or a list.

    Raises UserError for any other value; `where` names the checkpoint in the message.
    """
    named = generation.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise UserError(
                f"{where}: eos_token_id is {json.dumps(named)[:80]}; it is a token's id or a list of such ids"
            )
    return tuple(dict.fromkeys(ids))


def ends_in(directory: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a turn, from a checkpoint's files. Raises UserError if they cannot be read."""
    return end_ids_of(read_generation(directory), directory / FILE)


def sampling_notes(directory: Path, temperature: float, top_p: float = 1.0, top_k: int = 0) -> list[str]:
    """Returns a line with the sampling settings that a checkpoint's authors use and that differ from the given ones.

    Returns an empty list if none differ, or if the checkpoint has no generation_config.json.
    """
    path = directory / FILE
    if not path.exists():
        return []
    used = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    theirs = _sampling_of(read_generation(directory))
    if 0 in (temperature, theirs.get("temperature")):
        # Greedy decoding looks at no other setting.
        theirs = {name: value for name, value in theirs.items() if name == "temperature"}
    other = {name: value for name, value in theirs.items() if value != used[name]}
    if not other:
        return []
    said = ", ".join(f"{name} {value:g}" for name, value in other.items())
    here = ", ".join(f"{name} {used[name]:g}" for name in other)
    return [f"sampling: {path} has {said}; here it is {here}"]


def _sampling_of(generation: Mapping[str, Any]) -> dict[str, float]:
    """Returns the authors' sampling settings from generation settings, with transformers' defaults for missing ones.

    For greedy decoding this is temperature 0; the result is empty if the settings do not say how to sample.
    """
    samples = generation.get("do_sample")
    if samples is False:
        return {"temperature": 0.0}
    given = {name: generation[name] for name in _SAMPLING if type(generation.get(name)) in (int, float)}
    if not given and samples is not True:
        return {}
    return {name: value for name, value in (_SAMPLING | given).items() if value is not None}
