"""Checks of found faults: chat models as they are released, what their turns say, and input that nmoe reads."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from found import Result, check

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))


@check(23, "40 completions of a model whose turns end in the second id of eos_token_id", "0 go on behind their end")
def second_end() -> Result:
    import torch
    from chat_templates import GEMMA, GEMMA_CONTROLS, save

    import nmoe
    from nmoe.model.checkpoint import save_model
    from nmoe.model.config import ModelConfig
    from nmoe.model.transformer import Transformer
    from nmoe.text.tokenizer import Tokenizer

    directory = save(Path("gemma"), GEMMA, GEMMA_CONTROLS)
    tokenizer = Tokenizer.load(directory)
    ends = [tokenizer.special_id(token) for token in ("<eos>", "<end_of_turn>")]
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
    model = Transformer(ModelConfig(**shape, context_tokens=256, vocab_size=tokenizer.vocab_size)).initialize(0)
    with torch.no_grad():  # nearly uniform over the vocabulary
        model.embedding.weight.mul_(0.1)
    model.generation = {"eos_token_id": ends}
    save_model(model, directory)
    found = [one for many in nmoe.generate(directory, ["hi"] * 40, max_new_tokens=100, seed=1) for one in many]
    late = sum(bool(set(ends) & set(one.token_ids[:-1])) for one in found)
    return f"{late} go on behind their end", late == 0


@check(23, "supervised sequences of a conversation under such a template", "both turns learned up to <end_of_turn>")
def second_end_is_learned() -> Result:
    from chat_templates import GEMMA, GEMMA_CONTROLS, save

    from nmoe.text.conversation import ChatMessage
    from nmoe.text.renderers import IGNORED, ChatRenderer
    from nmoe.text.tokenizer import Tokenizer

    directory = save(Path("gemma"), GEMMA, GEMMA_CONTROLS)
    ids = [Tokenizer.load(directory).special_id(token) for token in ("<eos>", "<end_of_turn>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = Tokenizer.load(directory)
    turns = [("user", "1?"), ("assistant", "one"), ("user", "2?"), ("assistant", "two")]
    (rendered,) = ChatRenderer(tokenizer).supervise(tuple(ChatMessage(*turn) for turn in turns))
    said = tokenizer.decode([label for label in rendered.labels if label != IGNORED])
    return said, said == "one<end_of_turn>two<end_of_turn>"


@check(
    24, "a conversation of two turns whose generation prompt opens <think>", "both learned behind a sampling's prompt"
)
def opened_reasoning() -> Result:
    from chat_templates import QWEN, QWEN_CONTROLS, QWEN_TAGS, save

    from nmoe.text.conversation import ChatMessage
    from nmoe.text.renderers import IGNORED, ChatRenderer
    from nmoe.text.tokenizer import Tokenizer
    from nmoe.types import Message

    plain = "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
    template = QWEN.replace(plain, plain.replace("assistant\\n", "assistant\\n<think>\\n"))
    tokenizer = Tokenizer.load(save(Path("thinking"), template, QWEN_CONTROLS, QWEN_TAGS))
    renderer = ChatRenderer(tokenizer)
    turns = [("user", "1?"), ("assistant", "one"), ("user", "2?"), ("assistant", "two")]
    prompts = [renderer.prompt_ids([Message(*turn) for turn in turns[:count]]) for count in (1, 3)]
    sampled = 0
    for one in renderer.supervise(tuple(ChatMessage(*turn) for turn in turns)):
        labels = [IGNORED, *one.labels]
        starts = [place for place, label in enumerate(one.labels) if label != IGNORED and labels[place] == IGNORED]
        sampled += sum(one.ids[:start] in prompts for start in starts)
    return f"{sampled} of 2 learned behind a sampling's prompt", sampled == 2


@check(13, "</think> without <think> under a template that opens none", "not well-formed")
def unopened_reasoning() -> Result:
    from nmoe.text.renderers.chat import read_turn

    formed = read_turn("hm</think>42").well_formed
    return "well-formed" if formed else "not well-formed", not formed


@check(13, "calls whose JSON strings hold </tool_call>, <tool_call> or </think>", "4 of 4 read")
def tags_in_strings() -> Result:
    from nmoe.text.renderers.chat import read_turn

    read = 0
    for code in ("print(1)", "print('</tool_call>')", "s = '<tool_call>'", "# </think> ends it"):
        body = json.dumps({"name": "python", "arguments": {"code": code}})
        turn = read_turn(f"<think>go</think>\n<tool_call>\n{body}\n</tool_call>")
        read += [one.strip() for one in turn.calls] == [body] and turn.well_formed and not turn.content
    return f"{read} of 4 read", read == 4


@check(
    25, "an example and a pair whose inputs fill the context", "both kept, and both left out of a context of one less"
)
def lengths() -> Result:
    from chat_templates import QWEN, QWEN_CONTROLS, QWEN_TAGS, save

    from nmoe.config.tables.recipes import DatasetSettings
    from nmoe.data.examples import read_examples
    from nmoe.data.pairs import completion_pair, read_pairs
    from nmoe.errors import UserError
    from nmoe.text.renderers import ChatRenderer
    from nmoe.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(save(Path("qwen"), QWEN, QWEN_CONTROLS, QWEN_TAGS))
    renderer = ChatRenderer(tokenizer)
    asked, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo!"}
    Path("sft.jsonl").write_text(json.dumps({"messages": [asked, said]}))
    pair = {"prompt": [asked], "chosen": [said], "rejected": [{**said, "content": "no!"}]}
    Path("dpo.jsonl").write_text(json.dumps(pair))
    sft, dpo = (DatasetSettings(path=f"{name}.jsonl") for name in ("sft", "dpo"))
    inputs = read_examples(sft, renderer, tokenizer, 10**6).lengths[0]
    kept = []
    for context in (inputs, inputs - 1):
        reads = partial(read_examples, sft, renderer, tokenizer), partial(read_pairs, dpo, renderer, completion_pair)
        for read in reads:
            try:
                read(context)
                kept.append(True)
            except UserError:
                kept.append(False)
    names = ["the example", "the pair"]
    lines = [" and ".join(n for n, k in zip(names, kept[i : i + 2], strict=True) if k) or "nothing" for i in (0, 2)]
    return f"kept at n: {lines[0]}; at n - 1: {lines[1]}", kept == [True, True, False, False]


@check(14, "the gold inside other text in 14 data sets of reasoning-gym", "nothing paid")
def gold_inside_text() -> Result:
    from nmoe.grading import gym

    gym.warm_up()
    names = (
        "leg_counting gcd gsm_symbolic quantum_lock sokoban kakurasu survo knights_knaves letter_jumble time_intervals"
    )
    names += " spell_backward word_sorting tower_of_hanoi acre"
    paid = {}
    for name in names.split():
        gold = gym._dataset(name, "{}", 1, 4)[2]["answer"]
        more = (gold + "0", gold + " junk", "junk " + gold, gold + ", xyzzy", gold.split(" ")[0] + " junk")
        most = max(gym.score(name, "{}", 1, 4, 2, text) for text in more if text != gold)
        if most > 0:
            paid[name] = round(most, 2)
    full = sum(one == 1 for one in paid.values())
    return (f"{len(paid)} of 14 pay, {full} of them in full" if paid else "nothing paid"), not paid


@check(14, "200,000 brackets in a replay bundle, a TOML, metrics and a config.json", "4 of 4 refused by name")
def deep_brackets() -> Result:
    from nmoe.config.commands import RLConfig
    from nmoe.config.loader import load
    from nmoe.errors import UserError
    from nmoe.model.checkpoint import read_config
    from nmoe.rollout.bundle import read_bundle
    from nmoe.runs.record import read_run

    deep = "[" * 200_000
    for name in ("bundle.json", "config.json"):
        Path(name).write_text(deep)
    Path("x.toml").write_text(f"a = {deep}")
    Path("config.toml").write_text(f"a = {deep}")
    readers = {
        "bundle.json": read_bundle,
        "config.json": read_config,
        "config.toml": read_run,
        "x.toml": lambda path: load(path / "x.toml", RLConfig, []),
    }
    refused = 0
    for name, read in readers.items():
        try:
            read(Path())
        except UserError as error:
            refused += name in str(error)
        except RecursionError:
            pass
    return f"{refused} of 4 refused by name", refused == 4


@check(14, "<script> in an alert and a name, and a fence in the configuration, in report.md", "no markup")
def markup_in_reports() -> Result:
    from markdown_it import MarkdownIt

    from nmoe.runs.report import write_report

    attack = "<script>alert(1)</script> ![x](http://e/x)\n```\n<img src=x>"
    Path("config.toml").write_text(f"a = '''\n{attack}'''\n")
    Path("metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    Path("provenance.json").write_text(json.dumps({"argv": [], "resumed": []}))
    Path("alerts.jsonl").write_text(json.dumps({"step": 1, "message": attack}) + "\n")
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(write_report(Path()).read_text())
    tokens += [child for token in tokens for child in token.children or ()]
    found = sum(token.type in ("html_block", "html_inline", "link_open") for token in tokens)
    found += sum(token.type == "image" and "http" in str(token.attrs["src"]) for token in tokens)
    return f"{found} pieces of markup" if found else "no markup", found == 0


@check(14, "a config.json with a billion layers, and others with absurd widths", "5 of 5 refused by name")
def absurd_shapes() -> Result:
    import signal

    from nmoe.errors import UserError
    from nmoe.model.checkpoint import load_model, save_model
    from nmoe.model.config import ModelConfig
    from nmoe.model.transformer import Transformer

    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
    save_model(Transformer(ModelConfig(**shape, context_tokens=64, vocab_size=50)).initialize(0), Path())
    raw = json.loads(Path("config.json").read_text())

    def give_up(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    seen = []
    for name in ("layers", "hidden_size", "vocab_size", "intermediate_size", "context_tokens"):
        Path("config.json").write_text(json.dumps(raw | {name: 2**31 - 1}))
        signal.alarm(5)
        try:
            load_model(Path())
        except UserError as error:
            seen.append("config.json" in str(error))
        except Exception:
            seen.append(False)
        signal.alarm(0)
    return f"{sum(seen)} of 5 refused by name", seen == [True] * 5
