"""Adapters over one base, which clients ask for by name."""

from __future__ import annotations

from pathlib import Path

import torch
from served_client import serving

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.model.checkpoint import fingerprint, load_model
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.peft_format import save_adapter
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sampling

TEXT = "/v1/completions"


def test_an_adapter_is_served_under_its_name(checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = load_model(checkpoint).requires_grad_(False)
    model.set_numerics("exact")
    lora = Lora(model, LoraSettings(rank=4, alpha=8), choose(model, ()), str(checkpoint), fingerprint(checkpoint))
    lora.initialize(0)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    directory = tmp_path / "adapter"
    directory.mkdir()
    save_adapter(lora, directory)
    engine = NativeEngine(model, 1)
    prompt = tuple(tokenizer.encode("One"))
    request = Request(prompt, 1, Sampling(9, seed=4, stop_ids=tokenizer.end_ids), "a")
    (sample,) = engine.run(engine.generate(request))
    raw = engine.run(engine.likelihoods(prompt, 0))
    body = {"prompt": list(prompt), "max_tokens": 9, "seed": 4, "return_token_ids": True}
    with serving(checkpoint, "--numerics", "exact", "--adapter", f"mine={directory}") as server:
        assert [one["id"] for one in server.http.get("/v1/models").json()["data"]] == ["tiny", "mine"]
        (choice,) = server.ask(TEXT, model="mine", **body)["choices"]
        assert choice["token_ids"] == sample.token_ids
        (base,) = server.ask(TEXT, model="tiny", **body)["choices"]
        assert base["token_ids"] != sample.token_ids
        scores = server.ask(TEXT, model="mine", prompt=list(prompt), echo=True, logprobs=0, max_tokens=0)
        assert scores["choices"][0]["logprobs"]["token_logprobs"] == [one and one.logprob for one in raw]
