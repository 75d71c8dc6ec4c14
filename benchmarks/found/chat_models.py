"""Checks of found faults: chat models as they are released, what their turns say, and input that nmoe reads."""

from __future__ import annotations

import json
import sys
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
