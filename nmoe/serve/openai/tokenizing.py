"""vLLM's routes of the tokenizer: `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from __future__ import annotations

from typing import Any

from nmoe.serve.openai.chat import only, read_prompt
from nmoe.serve.openai.completions import encoded
from nmoe.serve.openai.model import Served
from nmoe.web.openai.fields import Fields


def tokenize(served: Served, fields: Fields) -> dict[str, Any]:
    """Encodes a prompt, or the messages of a chat."""
    served.named(fields.text("model", ""))
    with_names = fields.boolean("return_token_strs")
    if fields.has("messages"):
        only(fields, "add_generation_prompt", True)
        token_ids = read_prompt(served, fields).token_ids
    else:
        prompt = fields.text("prompt")
        if prompt is None:
            fields.refuse("prompt", prompt, "must be a text")
        token_ids, _ = encoded(served, prompt, fields.boolean("add_special_tokens", True))
    fields.finish()
    reply: dict[str, Any] = {"count": len(token_ids), "max_model_len": served.context_tokens, "tokens": token_ids}
    return reply | ({"token_strs": [served.names.name(one) for one in token_ids]} if with_names else {})


def detokenize(served: Served, fields: Fields) -> dict[str, Any]:
    """Decodes tokens."""
    served.named(fields.text("model", ""))
    token_ids = fields.ids("tokens")
    if token_ids is None:
        fields.refuse("tokens", token_ids, "must be a list of token ids")
    fields.finish()
    return {"prompt": served.tokenizer.decode(token_ids or [])}


def tokenizer_info(served: Served) -> dict[str, Any]:
    """Describes the tokenizer: its tokens with a role, and its chat template."""
    tokenizer = served.tokenizer
    about = {name: tokenizer.named_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    about |= {"chat_template": tokenizer.chat_template, "tokenizer_class": "PreTrainedTokenizerFast"}
    return about | {"vocab_size": tokenizer.vocab_size, "model_max_length": served.context_tokens}
