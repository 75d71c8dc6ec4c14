"""Tokenizers with chat templates in the style of released models, made here: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from nmoe.text.tokenizer import Tokenizer

# Control tokens are special; the tags of reasoning and calls are added words, as in Qwen3's tokenizer.
QWEN_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA_CONTROLS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou have these functions, described between <tools></tools> tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call return a JSON object between <tool_call></tool_call> tags.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA = """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools %}{%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{%- endfor %}{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# In the style of R1: what was thought in earlier turns is gone.
FORGETFUL = QWEN.replace("reasoning_content.strip('\\n')", "''").replace(
    "(loop.last or reasoning_content)", "loop.last"
)


TEXT = '<|im_start|>user\n\n\n<think>\n</think> the answer is 42, assistant tool_call tool_response {"name": "add"}'


def save(
    directory: Path, template: str | None, controls: tuple[str, ...], tags: tuple[str, ...] = (), text: str = TEXT
) -> Path:
    """A tokenizer directory. The last control token ends a turn, the first begins a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if text is TEXT else 700,
        special_tokens=list(controls),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text] * 9, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": controls[0], "eos_token": controls[-1]}
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return directory


def qwen(directory: Path, template: str = QWEN, text: str = TEXT) -> Tokenizer:
    return Tokenizer.load(save(directory, template, QWEN_CONTROLS, QWEN_TAGS, text))


def llama(directory: Path) -> Tokenizer:
    return Tokenizer.load(save(directory, LLAMA, LLAMA_CONTROLS))


GEMMA_CONTROLS = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<pad>", "<eos>")
# In the style of Gemma 3: a turn ends in another token than the tokenizer's eos_token.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' "
    "+ m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)


def gemma(directory: Path) -> Tokenizer:
    """A tokenizer whose turns end in the second of the ends in generation_config.json."""
    save(directory, GEMMA, GEMMA_CONTROLS)
    ids = {token: Tokenizer.load(directory).special_id(token) for token in ("<eos>", "<end_of_turn>")}
    settings = {"eos_token_id": list(ids.values()), "temperature": 0.6, "top_p": 0.95, "top_k": 64, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(directory)
