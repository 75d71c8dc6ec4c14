"""The engine's core: a synchronous step machine that a test can drive by hand.

A step is: admit waiting samples to free rows, prefilling new prompts; decode one token for every running row; retire what
finished. It runs the learner's own module, so there is one definition of the model and one set of weights.
"""

# Shapes: B running rows, T packed prompt tokens, Y layers, K chosen experts, V vocabulary.

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmoe.engine.api import Delta, EngineStats, FinishReason, Request, Sample
from nmoe.engine.native.cache import DecodeAttention, KVCache, PrefillAttention
from nmoe.engine.native.random import uniforms
from nmoe.engine.native.rows import Rows
from nmoe.engine.native.sampler import SamplingColumns, sample
from nmoe.errors import UserError
from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer

# Prompts are prefilled together up to this many tokens, so that one admission does not hold a whole batch of keys twice.
_PREFILL_TOKENS = 8192


@dataclass
class _Prompt:
    """A prefilled prompt, kept until all its samples have started."""

    keys_YJLC: Tensor
    values_YJLC: Tensor
    routes_LYK: Tensor | None
    logits_1V: Tensor


@dataclass(eq=False)
class Job:
    """One request on its way: which samples have started, and those that are done."""

    request: Request
    on_token: Callable[[int, Delta], None] | None
    samples: list[Sample | None]
    started: int = 0
    prompt: _Prompt | None = None
    kept: dict[int, list[list[int]]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return all(sample is not None for sample in self.samples)


class EngineCore:
    """Continuous batching over `max_sequences` rows."""

    def __init__(self, model: Transformer, max_sequences: int) -> None:
        weight = model.embedding.weight
        self.model = model
        dtype = torch.float64 if model.exact else weight.dtype
        self.cache = KVCache(model.config, max_sequences, weight.device, dtype)
        self.rows = Rows.allocate(max_sequences, model.config.context_tokens, weight.device)
        self.version = 0
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[Job, int]] = []
        self._generated = self._prefilled = self._steps = 0
        self._busy_s = 0.0

    def add(self, request: Request, on_token: Callable[[int, Delta], None] | None = None) -> Job:
        """Queues a request. Raises UserError at once where it can never fit."""
        context, vocab_size = self.model.config.context_tokens, self.model.config.vocab_size
        wanted = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not request.prompt_ids or request.n < 1 or request.sampling.max_new_tokens < 1:
            raise UserError(f"request {request.request_id}: prompt, n and max_new_tokens must not be empty")
        if wanted > context:
            raise UserError(
                f"request {request.request_id}: prompt of {len(request.prompt_ids)} tokens + max_new_tokens = "
                f"{request.sampling.max_new_tokens} exceeds the model's context of {context} tokens"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            raise UserError(
                f"request {request.request_id}: prompt ids must lie in 0..{vocab_size - 1}, the model's vocabulary"
            )
        job = Job(request, on_token, [None] * request.n)
        self._waiting.append(job)
        return job

    @torch.inference_mode()
    def abort(self, request_id: str) -> list[Job]:
        """Ends a request's samples where they stand, with what they have; returns the jobs that ended."""
        jobs = [job for job in self._waiting if job.request.request_id == request_id]
        self._waiting = deque(job for job in self._waiting if job.request.request_id != request_id)
        ended = [row for row, (job, _) in enumerate(self._running) if job.request.request_id == request_id]
        jobs += [job for job in dict.fromkeys(self._running[row][0] for row in ended) if job not in jobs]
        self._retire(dict.fromkeys(ended, "abort"))
        for job in jobs:
            for index in range(job.started, job.request.n):
                job.samples[index] = Sample([], [], [], "abort")
        return jobs

    def abort_all(self) -> None:
        """Ends every request."""
        for request_id in {job.request.request_id for job in [*self._waiting, *(job for job, _ in self._running)]}:
            self.abort(request_id)

    def commit(self, version: int) -> None:
        """The weights have changed: what is sampled from here on carries `version`. A prompt that still has samples to start is
        prefilled again, or they would start from the old weights under the new number."""
        self.version = version
        for job in self._waiting:
            job.prompt = None

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def stats(self) -> EngineStats:
        waiting = sum(job.request.n - job.started for job in list(self._waiting))  # asked for from any thread
        return EngineStats(self._generated, self._prefilled, self._steps, len(self._running), waiting, self._busy_s)

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """Admits, decodes, retires; returns the jobs that finished."""
        began = time.perf_counter()
        done = self._admit()
        if self._running:
            done += self._decode()
        self._steps += 1
        self._busy_s += time.perf_counter() - began
        return done

    def _admit(self) -> list[Job]:
        free = self.cache.rows - len(self._running)
        admitted: list[tuple[Job, int]] = []
        for job in self._waiting:
            if free == 0:
                break
            count = min(free, job.request.n - job.started)
            admitted.append((job, count))
            free -= count
        if not admitted:
            return []
        self._prefill([job for job, _ in admitted if job.prompt is None])
        first = len(self._running)
        logits = []
        for job, count in admitted:
            logits.append(self._start(job, count))
            if job.started == job.request.n:
                job.prompt = None
                self._waiting.popleft()
        return self._sample(torch.cat(logits), slice(first, len(self._running)))

    def _prefill(self, jobs: list[Job]) -> None:
        batch: list[Job] = []
        tokens = 0
        for job in jobs:
            if batch and tokens + len(job.request.prompt_ids) > _PREFILL_TOKENS:
                self._prefill_batch(batch)
                batch, tokens = [], 0
            batch.append(job)
            tokens += len(job.request.prompt_ids)
        if batch:
            self._prefill_batch(batch)

    def _prefill_batch(self, jobs: list[Job]) -> None:
        device = self.rows.position.device
        lengths = [len(job.request.prompt_ids) for job in jobs]
        ids_T = torch.tensor([token for job in jobs for token in job.request.prompt_ids], device=device)
        positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        attend, trace = PrefillAttention(lengths, device, self.model.exact), RouterTrace()
        x_TD = self.model(ids_T, positions_T, attend, trace)
        last_B = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits_BV = self.model.logits(x_TD[last_B])
        keys_YJTC = torch.stack(attend.keys).transpose(1, 2)
        values_YJTC = torch.stack(attend.values).transpose(1, 2)
        routes_TYK = trace.routes() if trace.chosen_TK else None
        start = 0
        for i, (job, length) in enumerate(zip(jobs, lengths, strict=True)):
            span = slice(start, start + length)
            routes_LYK = None if routes_TYK is None else routes_TYK[span]
            job.prompt = _Prompt(keys_YJTC[:, :, span], values_YJTC[:, :, span], routes_LYK, logits_BV[i : i + 1])
            start += length
        self._prefilled += start

    def _start(self, job: Job, count: int) -> Tensor:
        """Gives `count` more of the job's samples a row each; returns the logits their first token is drawn from, `[count, V]`."""
        assert job.prompt is not None, "a job is prefilled before it starts"
        settings, prompt, first = job.request.sampling, job.prompt, len(self._running)
        rows = slice(first, first + count)
        self.cache.fill(rows, prompt.keys_YJLC, prompt.values_YJLC, prompt.routes_LYK)
        self.rows.position[rows] = len(job.request.prompt_ids)
        self.rows.generated[rows] = 0
        self.rows.limit[rows] = settings.max_new_tokens
        self.rows.temperature[rows] = settings.temperature
        self.rows.top_p[rows] = settings.top_p
        self.rows.top_k[rows] = settings.top_k
        self.rows.set_stop_ids(rows, settings.stop_ids)
        draws = uniforms(settings.seed, job.started + count, settings.max_new_tokens)[job.started :]
        self.rows.uniforms[rows, : settings.max_new_tokens] = torch.from_numpy(draws).to(self.rows.uniforms.device)
        self._running += [(job, index) for index in range(job.started, job.started + count)]
        job.started += count
        return prompt.logits_1V.expand(count, -1)

    def _decode(self) -> list[Job]:
        running = slice(0, len(self._running))
        positions_B = self.rows.position[running]
        attend = DecodeAttention(self.cache, positions_B, int(positions_B.max()) + 1)
        trace = RouterTrace()
        x_BD = self.model(self.rows.last_token[running], positions_B, attend, trace)
        if trace.chosen_TK:
            self.cache.write_routes(positions_B, trace.routes())
        self.rows.position[running] += 1
        return self._sample(self.model.logits(x_BD), running)

    def _sample(self, logits_BV: Tensor, rows: slice) -> list[Job]:
        """Draws the next token of every row in `rows`, records it, and retires the rows that are done."""
        settings = [job.request.sampling for job, _ in self._running[rows]]
        cuts = any(s.top_p < 1 or s.top_k for s in settings)
        columns = SamplingColumns(
            self.rows.temperature[rows],
            self.rows.top_p[rows],
            self.rows.top_k[rows],
            plain=all(s.temperature == 1 for s in settings),
            cuts=cuts,
        )
        uniforms_B = self.rows.uniforms[rows].gather(1, self.rows.generated[rows].unsqueeze(-1)).squeeze(-1)
        tokens_B, logprobs_B, kept_BV = sample(logits_BV, columns, uniforms_B)
        stopped_B, finished_B = self.rows.record(rows, tokens_B, logprobs_B, self.version)
        self._generated += rows.stop - rows.start
        if kept_BV is not None:
            self._record_kept(rows, kept_BV)
        ended = finished_B.nonzero().flatten()
        reasons: dict[int, FinishReason] = {
            rows.start + row: "stop" if stopped else "length"
            for row, stopped in zip(ended.tolist(), stopped_B[ended].tolist(), strict=True)
        }
        if any(job.on_token for job, _ in self._running[rows]):
            self._stream(rows, reasons)
        return self._retire(reasons)

    def _record_kept(self, rows: slice, kept_BV: Tensor) -> None:
        for (job, index), kept_V in zip(self._running[rows], kept_BV, strict=True):
            settings = job.request.sampling
            if settings.top_p < 1 or settings.top_k:
                job.kept.setdefault(index, []).append(kept_V.nonzero().flatten().tolist())

    def _stream(self, rows: slice, reasons: dict[int, FinishReason]) -> None:
        for row in range(rows.start, rows.stop):
            job, index = self._running[row]
            if job.on_token is not None:
                at = int(self.rows.generated[row]) - 1
                token, logprob = int(self.rows.tokens[row, at]), float(self.rows.logprobs[row, at])
                job.on_token(index, Delta(token, logprob, reasons.get(row)))

    def _retire(self, reasons: dict[int, FinishReason]) -> list[Job]:
        """Collects the samples of these rows (ascending) and closes the gaps with the last running rows."""
        if not reasons:
            return []
        finished = list(reasons)
        for row, reason in reasons.items():
            self._collect(row, reason)
        jobs = dict.fromkeys(self._running[row][0] for row in finished)
        left = len(self._running) - len(finished)
        gaps = [row for row in finished if row < left]
        movers = [row for row in range(left, len(self._running)) if row not in reasons]
        if movers:
            targets, sources = torch.tensor(gaps), torch.tensor(movers)
            self.cache.move(targets, sources, int(self.rows.position[sources].max()))
            self.rows.move(targets, sources)
            for target, source in zip(gaps, movers, strict=True):
                self._running[target] = self._running[source]
        del self._running[left:]
        return [job for job in jobs if job.finished]

    def _collect(self, row: int, reason: FinishReason) -> None:
        job, index = self._running[row]
        count = int(self.rows.generated[row])
        routes = None
        if self.cache.routes is not None:
            routes = self.cache.routes[row, : len(job.request.prompt_ids) + count - 1].numpy(force=True).copy()
        job.samples[index] = Sample(
            token_ids=self.rows.tokens[row, :count].tolist(),
            logprobs=self.rows.logprobs[row, :count].tolist(),
            versions=self.rows.versions[row, :count].tolist(),
            finish_reason=reason,
            kept_ids=job.kept.pop(index, None),
            routes=routes,
        )
