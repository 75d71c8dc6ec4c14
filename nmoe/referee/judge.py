"""The judge: a checkpoint's own forward pass, by which a server's log-probabilities are right or wrong.

Beside the right weights it computes what a server with a certain fault would: other weights in a part of the model, keys or values
of earlier weights for the first tokens, another output head. A fault is named where one of these fits the samples."""

# Shapes: T packed tokens, N sampled tokens, V vocabulary, D width, J key-value heads, C head width.

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmoe.model.lora import Lora
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.referee.target import Asked, Choice

Weights = Mapping[str, Tensor]
Pairs = Sequence[tuple[Tensor, Tensor]]
# Two cumulative masses this close to top_p, or two shares this close to min_p, may fall on either side of it by rounding.
NEAR = 2e-5
# By so many tokens rounding moves a kept set in half precision at most; in float32 by one.
ROUGH_STEPS = 4


@dataclass
class Seen:
    """A sample that a server gave, with its request. `old` tokens of it, from the first on, may have keys of earlier weights
    in a cache. `raw` says that its log-probabilities are of the untruncated distribution at temperature 1."""

    asked: Asked
    choice: Choice
    old: int = 0
    raw: bool = False


@dataclass(frozen=True)
class Stale:
    """Keys or values of earlier weights: which of the two, and in which of the layers with attention."""

    weights: Weights
    keys: Collection[int]
    values: Collection[int]


class Judge:
    """The model of a checkpoint. `first` are its weights, `present` the ones that the server should have now, `before` the ones
    of the publication before, if there was one; `lora` is its adapter, which alone is published then."""

    def __init__(self, model: Transformer, lora: Lora | None) -> None:
        self.model, self.lora = model.requires_grad_(False).eval(), lora
        self.first: Weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        self.present: Weights = self.first
        self.before: Weights | None = None
        self.tied = model.head is None
        # Is given the seconds of each piece of the referee's own work, by which no server is late.
        self.worked: Callable[[float], None] = lambda _: None
        self._depth = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the time inside as the referee's own."""
        began, self._depth = time.monotonic(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.worked(time.monotonic() - began)

    def put(self, weights: Weights) -> None:
        """Copies weights into the model."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    @property
    def attention_layers(self) -> int:
        return len(self.model.config.attention_layers)

    @property
    def takes_stale(self) -> bool:
        """Whether keys and values of other weights can be put in place of the model's own."""
        config = self.model.config
        return config.latent is None and not config.recurrent_layers

    @torch.no_grad()
    def logits(
        self,
        seen: Sequence[Seen],
        weights: Weights | None = None,
        *,
        head: Tensor | None = None,
        stale: Stale | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> list[Tensor]:
        """Returns the logits `[n, V]` before each sampled token, of each sample, by the routes that came with it, if any did.
        `prompts` replace the samples' own."""
        with self.working():
            if prompts is not None:
                return self._logits(seen, weights, head, stale, prompts)
            # Routes are replayed in all of a forward pass or in none of it.
            found: dict[int, Tensor] = {}
            for routed in (True, False):
                part = [number for number, one in enumerate(seen) if (one.choice.routes is not None) is routed]
                if part:
                    rows = self._logits([seen[number] for number in part], weights, head, stale, None)
                    found |= zip(part, rows, strict=True)
            return [found[number] for number in range(len(seen))]

    def _logits(
        self,
        seen: Sequence[Seen],
        weights: Weights | None,
        head: Tensor | None,
        stale: Stale | None,
        prompts: Sequence[Sequence[int]] | None,
    ) -> list[Tensor]:
        asked = [one.asked.prompt for one in seen] if prompts is None else prompts
        packed = _Packed.of(asked, [one.choice for one in seen], use_routes=prompts is None)
        if packed.inputs_T.numel() == 0:
            return [torch.zeros(0, self.model.config.vocab_size) for _ in seen]
        attend: Any = PackedAttention(packed.lengths, self.model.device, self.model.exact)
        if stale is not None:
            # With the routers' own choice: the record at these tokens is the choice of one version only.
            free = replace(packed, routes_TYK=None)
            sides = []
            for version in (stale.weights, self.present if weights is None else weights):
                sides.append(_Recording(packed.lengths, self.model.device, self.model.exact))
                self._states(free, sides[-1], version)
            old_T = torch.cat(
                [torch.arange(length) < one.old for length, one in zip(packed.lengths, seen, strict=True)]
            )
            attend = _Mixed(packed.lengths, self.model.device, self.model.exact)
            attend.take(sides[0].pairs, sides[1].pairs, old_T, stale)
        states_ND = self._states(packed, attend, self.present if weights is None else weights)[packed.rows_N]
        logits_NV = self.model.logits(states_ND) if head is None else (states_ND @ head.T).float()
        return list(logits_NV.double().split(packed.counts))

    def routes(self, one: Seen) -> Tensor | None:
        """Returns the experts that the model's own routers choose, `[T, layers, K]`, and None for a model without any."""
        if not self.model.config.moe_layers:
            return None
        free = Seen(one.asked, Choice(0, one.choice.tokens, [], None))
        packed = _Packed.of([one.asked.prompt], [free.choice], use_routes=False)
        trace = RouterTrace()
        attend = PackedAttention(packed.lengths, self.model.device, self.model.exact)
        with self.working(), torch.no_grad():
            self.put(self.present)
            self.model(packed.inputs_T, packed.positions_T, attend, trace)
        return trace.routes()

    def _states(self, packed: _Packed, attend: Any, weights: Weights) -> Tensor:
        self.put(weights)
        trace = RouterTrace(replay=packed.routes_TYK)
        states_TD: Tensor = self.model(packed.inputs_T, packed.positions_T, attend, trace)
        return states_TD


@dataclass
class _Packed:
    lengths: tuple[int, ...]
    inputs_T: Tensor
    positions_T: Tensor
    rows_N: Tensor
    counts: list[int]
    routes_TYK: Tensor | None

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], choices: Sequence[Choice], use_routes: bool) -> _Packed:
        inputs, positions, rows, lengths, start = list[int](), list[int](), list[int](), list[int](), 0
        for prompt, choice in zip(prompts, choices, strict=True):
            ids = [*prompt, *choice.tokens[:-1]] if choice.tokens else []
            rows += range(start + len(prompt) - 1, start + len(ids)) if ids else ()
            inputs += ids
            positions += range(len(ids))
            lengths.append(len(ids))
            start += len(ids)
        routes = [choice.routes for choice in choices if choice.tokens]
        fits = use_routes and all(
            one is not None and len(one) == length
            for one, length in zip(routes, [length for length in lengths if length], strict=True)
        )
        return cls(
            tuple(lengths),
            torch.tensor(inputs),
            torch.tensor(positions),
            torch.tensor(rows, dtype=torch.int64),
            [len(choice.tokens) for choice in choices],
            torch.from_numpy(np.concatenate(routes)) if fits and routes else None,
        )


class _Recording(PackedAttention):
    """Attention that notes the keys and values of each layer."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        self.pairs.append((k_TJC.clone(), v_TJU.clone()))
        return super().__call__(layer, q_THC, k_TJC, v_TJU)


class _Mixed(PackedAttention):
    """Attention that reads the keys and values at the first positions from two other passes, of old weights and of new ones."""

    def take(self, old: Pairs, new: Pairs, old_T: Tensor, stale: Stale) -> None:
        self._old, self._new, self._old_T11, self._stale, self._layer = old, new, old_T[:, None, None], stale, 0

    def __call__(self, layer: AttentionLayer, q_THC: Tensor, k_TJC: Tensor, v_TJU: Tensor) -> Tensor:
        number, self._layer = self._layer, self._layer + 1
        k_first, _ = (self._old if number in self._stale.keys else self._new)[number]
        _, v_first = (self._old if number in self._stale.values else self._new)[number]
        k_TJC = torch.where(self._old_T11, k_first, k_TJC)
        v_TJU = torch.where(self._old_T11, v_first, v_TJU)
        return super().__call__(layer, q_THC, k_TJC, v_TJU)


def kept_counts(
    logits_nV: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, near: float = NEAR
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns how many of the likeliest tokens top-k, then top-p, and min_p leave, `[n]`; the ids from the likeliest on,
    `[n, V]`; and whether rounding, which is below `near`, could move that number."""
    scaled_nV = logits_nV / (temperature or 1.0)
    sorted_nV, order_nV = scaled_nV.sort(stable=True, dim=-1, descending=True)
    vocabulary = logits_nV.shape[-1]
    within = torch.arange(vocabulary) < (top_k or vocabulary)
    probs_nV = sorted_nV.masked_fill(~within, float("-inf")).softmax(-1)
    before_nV = probs_nV.cumsum(-1) - probs_nV
    kept_nV = within & ((before_nV < top_p) | (top_p >= 1))
    near_n = ((before_nV - top_p).abs() < near).any(-1) & (top_p < 1)
    if min_p:
        share_nV = (sorted_nV - sorted_nV[:, :1]).exp()
        kept_nV &= share_nV >= min_p
        near_n |= ((share_nV - min_p).abs() < near * min_p).any(-1)
    if 0 < top_k < vocabulary:
        near_n |= (sorted_nV[:, top_k - 1] - sorted_nV[:, top_k]).abs() < near
    return kept_nV.sum(-1).clamp_min(1), order_nV, near_n


def processed(
    logits_nV: Tensor,
    tokens: Sequence[int],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    counts_n: Tensor | None = None,
) -> Tensor:
    """Returns the log-probability of each token, `[n]`, among those that top-k, top-p and min_p leave at this temperature, or
    among the `counts_n` likeliest; minus infinity for one that they cut."""
    scaled_nV = logits_nV / (temperature or 1.0)
    target_n1 = torch.tensor(tokens).unsqueeze(-1)
    if counts_n is None and not top_k and top_p >= 1 and not min_p:
        return scaled_nV.log_softmax(-1).gather(-1, target_n1).squeeze(-1)
    if counts_n is None:
        counts_n = kept_counts(logits_nV, temperature, top_k, top_p, min_p)[0]
    order_nV = scaled_nV.argsort(stable=True, dim=-1, descending=True)
    rank_nV = torch.empty_like(order_nV).scatter_(
        -1, order_nV, torch.arange(order_nV.shape[-1]).expand_as(order_nV).clone()
    )
    cut_nV = scaled_nV.masked_fill(rank_nV >= counts_n.unsqueeze(-1), float("-inf"))
    return cut_nV.log_softmax(-1).gather(-1, target_n1).squeeze(-1)


def right_logprobs(one: Seen, logits_nV: Tensor, near: float = NEAR) -> Tensor:
    """Returns the log-probabilities that the server should have given for a sample; of those that rounding below `near` leaves
    open, the nearest to the server's."""
    asked, tokens = one.asked, one.choice.tokens
    if one.raw:
        return processed(logits_nV, tokens, 1.0)
    theirs_n = torch.tensor(one.choice.logprobs[: len(tokens)], dtype=torch.float64)
    if asked.temperature == 0:
        # All mass is on one token; vLLM gives the token's own log-probability instead.
        best_n = processed(logits_nV, tokens, 1.0)
        greedy_n = torch.where(torch.tensor(tokens) == logits_nV.argmax(-1), 0.0, float("-inf")).double()
        near_n = logits_nV.max(-1).values - logits_nV.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1) < near
        greedy_n = torch.where(near_n, 0.0, greedy_n)
        if len(theirs_n) != len(greedy_n) or bool((theirs_n == 0).all()):
            return greedy_n
        return torch.where(greedy_n.isfinite(), best_n, greedy_n)
    rule = (asked.temperature, asked.top_k, asked.top_p, asked.min_p)
    if not asked.top_k and asked.top_p >= 1 and not asked.min_p:
        return processed(logits_nV, tokens, asked.temperature)
    counts_n, _, near_n = kept_counts(logits_nV, *rule, near)
    best = processed(logits_nV, tokens, asked.temperature, counts_n=counts_n)
    if len(theirs_n) == len(best) and bool(near_n.any()):
        most = 1 if near == NEAR else ROUGH_STEPS
        for step in (*range(-most, 0), *range(1, most + 1)):
            other = processed(logits_nV, tokens, asked.temperature, counts_n=(counts_n + step).clamp_min(1))
            nearer = near_n & ((other - theirs_n).abs() < (best - theirs_n).abs())
            best = torch.where(nearer, other, best)
    return best
