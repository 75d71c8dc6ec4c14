"""Publications of weights that the judge knows: whole, torn, with tensors missing; and back to the first ones."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe.engine.remote.weights import Format, Transport, Update, prepared
from nmoe.model.checkpoint import checkpoint_tensors
from nmoe.model.lora import Lora
from nmoe.model.transformer import Transformer
from nmoe.referee.client import Client, Exchange, UnansweredError, shown_bytes
from nmoe.referee.judge import Judge, Weights
from nmoe.referee.target import Served, SGLang

# Of a weight's own spread: enough to move log-probabilities far beyond rounding, too little to make them all alike.
_CHANGE = 0.15


class _Source:
    """The judge's model as the learner that publishes, without the tensors `left_out`."""

    def __init__(self, model: Transformer, lora: Lora | None, left_out: Collection[int] = ()) -> None:
        self.model, self.lora, self._left_out = model, lora, left_out

    def weights(self, format: Format) -> Iterator[tuple[str, Tensor]]:
        for number, (name, _, make) in enumerate(checkpoint_tensors(self.model, own_format=format == "nmoe")):
            if number not in self._left_out:
                yield name, make()


def moved(judge: Judge, seed: int) -> dict[str, Tensor]:
    """Returns a judge's present weights with each published one moved a little."""
    generator = torch.Generator().manual_seed(seed)
    published = None if judge.lora is None else {id(one) for one in judge.lora.parameters()}
    weights = {}
    for name, parameter in judge.model.named_parameters():
        now = judge.present[name]
        if published is not None and id(parameter) not in published:
            weights[name] = now
            continue
        spread = now.float().std() if now.numel() > 1 else now.float().abs().mean()
        if not float(spread):
            spread = now.float().abs().mean().clamp_min(0.02)
        weights[name] = (now.float() + _CHANGE * spread * torch.randn(now.shape, generator=generator)).to(now.dtype)
    return weights


class Press:
    """Publishes to one server. `version` is the last one that was sent; `keep` is a directory for copies of all updates, or None.
    `refused` says that the last update was refused or broke off, after which a server may want a whole one; `paused` that the
    server may be paused."""

    def __init__(self, judge: Judge, client: Client, served: Served, keep: Path | None) -> None:
        self.judge, self.client, self._keep = judge, client, keep
        self.format: Format = "nmoe" if served.engine == "nmoe" else "hf"
        self.sglang = isinstance(served.route, SGLang)
        said = served.version or ""
        self.version = int(said) if said.isascii() and said.isdecimal() and len(said) < 16 else 0
        self.transport: Transport = "disk" if judge.lora is None else "adapter"
        self.refused = self.paused = self._joined = False

    def drawn(self, seed: int) -> dict[str, Tensor]:
        """Returns the present weights with each published one moved a little."""
        with self.judge.working():
            return moved(self.judge, seed)

    def ready(self, weights: Weights, left_out: Collection[int] = ()) -> Update:
        """Writes weights where the server reads them."""
        with self.judge.working():
            self.judge.put(weights)
            source = _Source(self.judge.model, self.judge.lora, left_out)
            return prepared(source, self.format, self.version + 1, transport=self.transport)

    async def send(self, update: Update, *, deadline_s: float | None = None) -> list[Exchange]:
        """Sends an update, and returns the exchanges of its steps; the first that was refused is the last of them."""
        self.refused = True
        self.version = update.version
        info = dict(update.info)
        if self._keep is not None and update.directory is not None:
            kept = self._keep / f"weights_{update.version}_{len(list(self._keep.glob('weights_*')))}"
            shutil.copytree(update.directory, kept)
            info["path"] = str(kept)
        version = str(update.version)
        steps: list[tuple[str, dict[str, Any]]]
        if self.sglang:
            body = {"model_path": info["path"], "weight_version": version, "flush_cache": True}
            steps = [("/update_weights_from_disk", body)]
        else:
            steps = [
                *([] if self._joined else [("/init_weight_transfer_engine", {"init_info": {}})]),
                ("/start_weight_update", {}),
                ("/update_weights", {"update_info": info}),
                ("/finish_weight_update", {"weight_version": version}),
            ]
        # An update without a pause ends a vLLM; nmoe's server samples on.
        pauses = self.format == "hf"
        if pauses:
            steps.insert(0, self._pause)
        done = []
        self.paused |= pauses
        try:
            for path, step in steps:
                done.append(await self.client.call("POST", path, step, deadline_s))
                if done[-1].status != 200:
                    self.refused = done[-1].status not in (404, 405)  # else it takes no weights at all
                    return done
            self._joined, self.refused = True, False
        finally:
            if pauses:
                await self.resume()
        return done

    @property
    def _pause(self) -> tuple[str, dict[str, Any]]:
        if self.sglang:
            return "/pause_generation", {"mode": "retract"}
        return "/pause?mode=keep&clear_cache=true", {}

    async def pause(self) -> Exchange:
        self.paused = True
        got = await self.client.call("POST", *self._pause)
        self.paused = got.status not in (404, 405)
        return got

    async def resume(self, deadline_s: float | None = None) -> Exchange:
        got = await self.client.call("POST", "/continue_generation" if self.sglang else "/resume", {}, deadline_s)
        self.paused &= got.status not in (200, 404, 405)
        return got

    async def resumed(self, deadline_s: float | None = None) -> str:
        """Resumes a server that may be paused. Returns why it may be paused still, or an empty text."""
        if not self.paused:
            return ""
        try:
            last = await self.resume(deadline_s)
        except UnansweredError as error:
            return f"it may be paused: {error}"
        return (
            f"it may be paused: {last.path} has status {last.status}: {shown_bytes(last.reply)}" if self.paused else ""
        )

    async def restore(self) -> str:
        """Resumes the server and publishes the first weights, if it may have others. Returns why it may be as it was not, or an
        empty text."""
        reasons = (await self._restore_weights(), await self.resumed())
        return "; ".join(reason for reason in reasons if reason)

    async def _restore_weights(self) -> str:
        if not self.refused and self.judge.present is self.judge.first:
            return ""
        update = self.ready(self.judge.first)
        try:
            last = (await self.send(update))[-1]
        except UnansweredError as error:
            return str(error)
        finally:
            update.discard()
        return f"{last.path} has status {last.status}: {shown_bytes(last.reply)}" if self.refused else ""
