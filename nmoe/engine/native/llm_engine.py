"""The synchronous engine: requests in, one `step()` at a time. A test can drive it by hand; `NativeEngine` puts asyncio in front.

It runs the learner's own module, so that there is one definition of the model and one set of weights.
"""

# Shapes: B slots, V vocabulary.

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from nmoe.engine.api import Delta, EngineStats, Request
from nmoe.engine.native.block_manager import BlockManager
from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache, cache_size
from nmoe.engine.native.graphs import decode_graphs
from nmoe.engine.native.runner import Runner, Sampled
from nmoe.engine.native.scheduler import PREFILL_TOKENS, Scheduler
from nmoe.engine.native.sequence import RunningBatch, Sequence, SequenceGroup, Status
from nmoe.errors import UserError
from nmoe.model.device import kind_of
from nmoe.model.idle_threads import IDLE
from nmoe.model.ops.cpu.packing import PackedWeights
from nmoe.model.ops.table import make_ready
from nmoe.model.transformer import Transformer
from nmoe.types import FinishReason, Sample, Sampling

# Beyond these, logits divided in fp32 overflow or are all alike. Near the lower one the largest logit has all mass already.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-6, 1e6
_MOST_INTEGER = 2**63 - 1
# OpenAI's limits. Larger ones could make all logits infinite.
_MOST_PENALTY, _MOST_BIAS = 2.0, 100.0

# Bytes of a trained number that come after the engine: its gradient and Adam's two moments, in fp32.
_TRAINED_BYTES = 12


def _most_bytes(model: Transformer) -> int:
    """Returns the largest cache in bytes where no size is given."""
    device = model.embedding.weight.device
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return kind_of(device).cache_bytes(device, _TRAINED_BYTES * trained, trained > 0)


class LLMEngine:
    """Samples by continuous batching: up to `max_sequences` sequences decode at once, over at most `cache_bytes` of cache (0: room
    for all of them at the model's full context, at most 4 GiB on a CPU and on a GPU a share of its free memory). A step computes at
    most `prefill_tokens` tokens of prompts, and beside running sequences at most `beside_tokens`, if that is less. Raises UserError
    if the cache is too small for the model.

    `adapter` names the adapter that the model has whenever the engine steps. Of `shares` engines that share a model, each takes
    an equal part of the cache, and all of them `packs`."""

    def __init__(
        self,
        model: Transformer,
        max_sequences: int,
        cache_bytes: int = 0,
        prefill_tokens: int = PREFILL_TOKENS,
        adapter: str | None = None,
        shares: int = 1,
        packs: PackedWeights | None = None,
        beside_tokens: int | None = None,
    ) -> None:
        weight = model.embedding.weight
        self.model, self.adapter = model, adapter
        make_ready(weight.device)
        room_in_bytes = cache_bytes // shares, _most_bytes(model) // shares
        size = cache_size(model.config, weight.dtype, max_sequences, *room_in_bytes)
        # The decode kernels of an accelerator depend on the batch, and exact numerics run without them.
        self._on_host = kind_of(weight.device).on_host
        recorded = not (self._on_host or model.exact)
        # Recordings need one block and one state slot more, unknown to the block manager, for padding to write to.
        room = size.blocks + recorded, size.state_slots + recorded
        self.cache = PagedCache(model.config, *room, weight.device, weight.dtype)
        context_blocks = -(-model.config.context_tokens // BLOCK_TOKENS)
        self.running = RunningBatch(max_sequences, context_blocks, self.cache)
        blocks = self._manager(size.blocks, size.state_slots)
        self.scheduler = Scheduler(blocks, self.running, prefill_tokens, beside_tokens)
        graphs = decode_graphs(model, self.cache, scratch=(size.blocks, size.state_slots)) if recorded else None
        self.runner = Runner(model, self.cache, self.running, graphs, packs)
        self._generated_tokens = self._prefilled_tokens = 0
        self._busy_s = 0.0
        self.recomputing = (
            False  # whether there are requests, and none has gone on since a commit had all of them computed again
        )

    def _manager(self, blocks: int, state_slots: int) -> BlockManager:
        return BlockManager(blocks, BLOCK_TOKENS, state_slots, self.cache.shares_prefixes)

    def add(
        self,
        request: Request,
        on_deltas: Callable[[list[Delta]], None] | None = None,
        on_sample: Callable[[int, Sample], None] | None = None,
    ) -> SequenceGroup:
        """Queues a request and returns its group of sequences. `on_deltas` is called once in each step that samples for it, with
        all new tokens, and `on_sample` with each sample's index as it ends. Raises UserError if the request is invalid, can never
        run, or has the id of a request that is running."""
        self.check(request)
        return self._queue(SequenceGroup(request, self.scheduler.arrived, on_deltas, on_sample))

    def check(self, request: Request) -> None:
        """Raises UserError if a request for samples is invalid or can never run."""
        settings = request.sampling
        if not request.prompt_ids:
            raise UserError(f"request {request.request_id}: the prompt has no tokens")
        for name, value in (("samples", request.samples), ("max_new_tokens", settings.max_new_tokens)):
            if value < 1:
                raise UserError(f"request {request.request_id}: {name} = {value}: must be at least 1")
        _check_sampling(request.request_id, settings)
        self._check_vocabulary(request)
        self._check_fits(request, len(request.prompt_ids) + settings.max_new_tokens)

    def add_scoring(
        self, token_ids: Iterable[int], temperature: float, request_id: str, adapter: str | None = None
    ) -> SequenceGroup:
        """Queues tokens to be scored, and returns their group, whose `scores` will hold the log-probability of each token but the
        first, given those before it. Raises UserError for fewer than two tokens, for temperature 0, if they can never fit, and as
        `add` for an id in use."""
        settings = Sampling(max_new_tokens=0, temperature=temperature)
        request = Request(tuple(token_ids), 0, settings, request_id, adapter=adapter)
        if len(request.prompt_ids) < 2 or temperature == 0:
            raise UserError(f"request {request_id}: scoring wants two tokens or more and a temperature above 0")
        _check_sampling(request_id, settings)
        self._check_fits(request, len(request.prompt_ids))
        return self._queue(SequenceGroup(request, self.scheduler.arrived))

    def add_likelihoods(
        self, token_ids: Iterable[int], top: int, start: int, request_id: str, adapter: str | None = None
    ) -> SequenceGroup:
        """Queues tokens to be scored, and returns their group, whose `scores` will hold the raw log-probability of each token from
        position `max(1, start)` on, with the `top` likeliest tokens there. Raises UserError as `add` does."""
        request = Request(tuple(token_ids), 0, Sampling(max_new_tokens=0), request_id, top, adapter)
        if not request.prompt_ids:
            raise UserError(f"request {request_id}: there are no tokens to score")
        self._check_vocabulary(request)
        self._check_fits(request, len(request.prompt_ids))
        return self._queue(SequenceGroup(request, self.scheduler.arrived, scored_from=max(1, start)))

    def _queue(self, group: SequenceGroup) -> SequenceGroup:
        request_id, adapter = group.request.request_id, group.request.adapter
        if adapter != self.adapter:
            raise UserError(f"request {request_id}: there is no adapter {adapter!r}; the engine samples from one model")
        if request_id in self.scheduler.groups:
            raise UserError(f"request {request_id}: another request of this id is running; give each its own id")
        self.scheduler.add(group)
        return group

    def _check_vocabulary(self, request: Request) -> None:
        """Raises UserError if `logit_bias` names a token that there is not, or `top_logprobs` is no number of tokens."""
        vocab_size, top = self.model.config.vocab_size, request.top_logprobs
        if bad := [one for one, _ in request.sampling.logit_bias if not 0 <= one < vocab_size]:
            raise UserError(
                f"request {request.request_id}: logit_bias has token {bad[0]}; the model's are 0..{vocab_size - 1}"
            )
        if top is not None and not 0 <= top <= vocab_size:
            raise UserError(f"request {request.request_id}: top_logprobs = {top} must lie in 0..{vocab_size}")

    def _check_fits(self, request: Request, wanted: int) -> None:
        context, vocab_size = self.model.config.context_tokens, self.model.config.vocab_size
        name, prompt = f"request {request.request_id}", f"prompt of {len(request.prompt_ids)} tokens"
        asked = f"{prompt} + max_new_tokens = {request.sampling.max_new_tokens}"
        if wanted > context:
            raise UserError(f"{name}: {asked} exceeds the model's context of {context} tokens")
        blocks = self.scheduler.blocks
        # The last token is sampled and never fed. Two sequences hold the prompt's last block beside their own copies.
        needed = -(-max(wanted - 1, len(request.prompt_ids)) // BLOCK_TOKENS) + (request.samples > 1)
        if needed > blocks.blocks:
            room = blocks.blocks * BLOCK_TOKENS
            raise UserError(f"{name}: {asked} exceeds the cache of {room} tokens; raise [engine] cache_mb")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            raise UserError(f"{name}: prompt ids must lie in 0..{vocab_size - 1}, the model's vocabulary")

    @torch.inference_mode()
    def step(self) -> list[SequenceGroup]:
        """Computes chunks of prompts, starts sequences whose prompt is ready, and decodes one token of every running sequence;
        returns the requests that finished.

        Raises DivergenceError if the model computes NaN or infinity. After this or any other error, or an interrupt, the engine is
        empty and its cache is as new: every request has ended without samples, and the next one starts clean.
        """
        if self._on_host:
            IDLE.look()
        began = time.perf_counter()
        scheduler, runner = self.scheduler, self.runner
        try:
            with runner.active():
                chunks = scheduler.schedule_prefill()
                logits = runner.prefill(chunks)
                finished = scheduler.finish_prefill(chunks, logits, runner.version)
                if (start := scheduler.schedule_start()) is not None:
                    finished += self._postprocess(runner.start(start))
                if (slots := scheduler.schedule_decode()) is not None:
                    finished += self._postprocess(runner.decode(slots))
        except BaseException:
            self._reset()
            raise
        self.recomputing &= slots is None and not finished
        for group in finished:
            del scheduler.groups[group.request.request_id]
        scheduler.steps += 1
        self._prefilled_tokens += sum(chunk.stop - chunk.start for chunk in chunks)
        self._busy_s += time.perf_counter() - began
        return finished

    def _postprocess(self, sampled: Sampled) -> list[SequenceGroup]:
        """Passes new tokens to the callbacks of requests that have one, and ends the sequences that have finished; returns the
        requests that finished."""
        slots, running = sampled.slots, self.running
        self._generated_tokens += slots.stop - slots.start
        for slot, kept in sampled.kept_ids.items():
            sequence = running.sequences[slots.start + slot]
            sequence.kept_ids = sequence.kept_ids or []
            sequence.kept_ids.append(kept)
        ended = sampled.finished_B.nonzero().flatten()
        reasons: dict[Sequence, FinishReason] = {
            running.sequences[slots.start + slot]: "stop" if stopped else "length"
            for slot, stopped in zip(ended.tolist(), sampled.stopped_B[ended].tolist(), strict=True)
        }
        rows = running.streams[slots].nonzero()[0].tolist()
        streaming = [running.sequences[slots.start + row] for row in rows]
        finished = self._finish(reasons)
        if streaming:
            self._stream(sampled, rows, streaming, reasons)
        return finished

    def _stream(
        self, sampled: Sampled, rows: list[int], sequences: list[Sequence], reasons: dict[Sequence, FinishReason]
    ) -> None:
        """Passes the new tokens of these sequences, in these rows, to their requests' callbacks."""
        tokens, logprobs = sampled.tokens_B.tolist(), sampled.logprobs_B.tolist()
        deltas: defaultdict[SequenceGroup, list[Delta]] = defaultdict(list)
        for row, sequence in zip(rows, sequences, strict=True):
            group, index, reason = sequence.group, sequence.index, reasons.get(sequence)
            sample = None if reason is None else group.samples[index]
            deltas[group].append(Delta(tokens[row], logprobs[row], reason, index, sampled.raw.get(row), sample))
        for group, new in deltas.items():
            assert group.on_deltas is not None, "only sequences with a callback stream"
            group.on_deltas(new)

    def _finish(self, reasons: dict[Sequence, FinishReason]) -> list[SequenceGroup]:
        """Ends running sequences and delivers their samples; returns the requests that finished."""
        self.scheduler.retire(list(reasons), self.runner.version)
        for sequence, reason in reasons.items():
            sequence.group.deliver(sequence, reason)
        return [group for group in dict.fromkeys(sequence.group for sequence in reasons) if group.finished]

    @torch.inference_mode()
    def abort(self, request_id: str, index: int | None = None) -> list[SequenceGroup]:
        """Ends a request's sequences, or only the one of this index, with the tokens sampled so far; returns the requests that
        ended."""
        group = self.scheduler.groups.get(request_id)
        if group is None:
            return []
        ending = [
            sequence
            for sequence in group.sequences
            if sequence.status is not Status.FINISHED and index in (None, sequence.index)
        ]
        self._finish({sequence: "abort" for sequence in ending if sequence.status is Status.RUNNING})
        for sequence in ending:
            if sequence.status is Status.FINISHED:
                continue
            self.scheduler.drop(sequence)
            if group.scoring:
                group.aborted = True
            else:
                group.deliver(sequence, "abort")
        if group.on_deltas is not None and ending:
            indices = [sequence.index for sequence in ending]
            group.on_deltas([Delta(None, 0.0, "abort", one, sample=group.samples[one]) for one in indices])
        if not group.finished:
            return []
        del self.scheduler.groups[request_id]
        return [group]

    def abort_all(self) -> None:
        """Ends every request."""
        for request_id in self.request_ids:
            self.abort(request_id)

    def _reset(self) -> None:
        """Drops everything after a step that broke off. Which sequence holds which block is unknown then, and NaN in a block would
        reach its next holder: a masked position has weight 0, and 0 times NaN is NaN."""
        for group in self.scheduler.groups.values():
            group.aborted, group.prompt = True, None
        blocks = self.scheduler.blocks
        self.cache.clear(blocks.touched)
        self.scheduler.clear(self._manager(blocks.blocks, blocks.state_slots))

    @torch.inference_mode()
    def commit(self, version: int, recompute: bool = False) -> None:
        """Notes that the weights have changed: tokens sampled from now on carry `version`. Prompts whose sequences have not started
        are computed again and no earlier prefix is found, or sequences would start from the old weights under the new version.

        Running sequences go on with the keys that they have. With `recompute` they are preempted, so that the new weights compute
        their keys, with the routes by which their tokens were sampled."""
        self.runner.weights_changed(version)
        if recompute:
            self.recomputing = not self.idle
            self.scheduler.preempt_all()
        self.scheduler.drop_prefixes()

    def forget_prefixes(self) -> None:
        """Forgets every cached prefix. Running sequences keep their blocks."""
        self.scheduler.forget_prefixes()

    def free_packed(self) -> None:
        """Frees the packed forms of the weights; the next step packs them again."""
        self.runner.free_packed()

    @property
    def request_ids(self) -> list[str]:
        """The ids of the requests that have not finished."""
        return list(self.scheduler.groups)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def stats(self) -> EngineStats:
        """Returns the engine's totals and present load. Any thread may call this."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        unstarted = sum(max(1, group.unstarted) for group in list(scheduler.waiting))
        return EngineStats(
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            decode_steps=scheduler.steps,
            preemptions=scheduler.preemptions,
            running=len(self.running),
            waiting=unstarted + len(scheduler.preempted),
            cache_use=1 - blocks.available / blocks.blocks,
            busy_s=self._busy_s,
        )


def _check_sampling(request_id: str, settings: Sampling) -> None:
    """Raises UserError, naming the request, for settings without meaning or too large for the columns of the running batch. A
    request is checked before it is queued, because a step samples for all requests at once."""
    temperature, top_p, top_k = settings.temperature, settings.top_p, settings.top_k
    if temperature != 0 and not _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE:
        raise UserError(
            f"request {request_id}: temperature = {temperature} must be 0 (greedy) or lie in {_LEAST_TEMPERATURE:g}.."
            f"{_MOST_TEMPERATURE:g}"
        )
    if not 0 < top_p <= 1:
        raise UserError(f"request {request_id}: top_p = {top_p} must lie in (0, 1]")
    if not 0 <= top_k <= _MOST_INTEGER:
        raise UserError(f"request {request_id}: top_k = {top_k} must be 0 (off) or a positive number of 63 bits")
    if not 0 <= settings.min_p <= 1:
        raise UserError(f"request {request_id}: min_p = {settings.min_p} must lie in [0, 1]")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -_MOST_PENALTY <= (value := getattr(settings, name)) <= _MOST_PENALTY:
            raise UserError(f"request {request_id}: {name} = {value} must lie in -{_MOST_PENALTY:g}..{_MOST_PENALTY:g}")
    if bad := [value for _, value in settings.logit_bias if not -_MOST_BIAS <= value <= _MOST_BIAS]:
        raise UserError(
            f"request {request_id}: logit_bias has {bad[0]}; it must lie in -{_MOST_BIAS:g}..{_MOST_BIAS:g}"
        )
    if len(dict(settings.logit_bias)) < len(settings.logit_bias):
        raise UserError(f"request {request_id}: logit_bias names a token twice")
    if wrong := [stop_id for stop_id in settings.stop_ids if not 0 <= stop_id <= _MOST_INTEGER]:
        raise UserError(
            f"request {request_id}: stop_ids has {wrong[0]}, which is not a token id: they count from 0, in 63 bits"
        )
