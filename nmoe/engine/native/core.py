"""The engine's core: a synchronous step machine that a test can drive by hand.

A step is: compute keys of prompts, a bounded number of tokens at a time; start samples whose prompt is ready; decode one token for
every running row; retire what finished. It runs the learner's own module, so there is one definition of the model and one set of
weights.

Memory is blocks of the paged cache. Where they run out, the youngest gives way to the oldest: it loses its blocks, keeps its
tokens, and goes on later from recomputed keys. The oldest therefore always ends, and so does everything after it.
"""

# Shapes: B running rows, T packed tokens, V vocabulary.

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nmoe.engine.api import Delta, EngineStats, Request
from nmoe.engine.native.attend import Piece
from nmoe.engine.native.blocks import BlockPool
from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache, bytes_per_block
from nmoe.engine.native.graphs import decode_graphs
from nmoe.engine.native.jobs import Job, Paused, Prefill, Prompt
from nmoe.engine.native.limits import check_sampling
from nmoe.engine.native.random import uniforms
from nmoe.engine.native.rows import Rows
from nmoe.engine.native.runner import Runner
from nmoe.errors import UserError
from nmoe.model.transformer import Transformer
from nmoe.types import FinishReason, Sample, Sampling

# Prompt tokens computed in one step, so that one long prompt holds up those that decode for no longer than this.
PREFILL_TOKENS = 8192

# Newcomers fewer than one to so many running rows wait for others, for at most so many steps.
GATHER_SHARE, GATHER_STEPS = 16, 8

# The default bound of the cache's memory.
_CACHE_BYTES = 4 * 2**30


class EngineCore:
    """Continuous batching over `max_sequences` rows and at most `cache_bytes` of cache (0: room for all rows at the model's full
    context, at most 4 GiB)."""

    def __init__(
        self, model: Transformer, max_sequences: int, cache_bytes: int = 0, prefill_tokens: int = PREFILL_TOKENS
    ) -> None:
        weight = model.embedding.weight
        self.model = model
        self.max_sequences, self.prefill_tokens = max_sequences, prefill_tokens
        dtype = model.embedding.weight.dtype
        context = -(-model.config.context_tokens // BLOCK_TOKENS)
        one = bytes_per_block(model.config, dtype)
        # One block more per row for the copy of a prompt's last block that each sample starts with.
        blocks = cache_bytes // one if cache_bytes else min(max_sequences * (context + 1), _CACHE_BYTES // one)
        if blocks < 1:
            raise UserError(f"a cache of {cache_bytes} bytes holds not even one block of this model ({one} bytes)")
        # On a GPU one block more, which the pool knows nothing of, for rows of padding to write to.
        on_gpu = weight.device.type == "cuda"
        self.cache = PagedCache(model.config, blocks + on_gpu, weight.device, dtype)
        self.pool = BlockPool(blocks, BLOCK_TOKENS)
        self.rows = Rows(max_sequences, context, weight.device)
        graphs = decode_graphs(model, self.cache, scratch=blocks) if on_gpu else None
        self.runner = Runner(model, self.cache, self.rows, graphs)
        self.version = 0
        self._gathering = 0  # the step at which those that came since are taken up; 0 where nobody waits to be
        self._waiting: deque[Job] = deque()  # with samples still to start, or tokens to score
        self._paused: list[Paused] = []  # oldest first
        self._prefills: list[Prefill] = []  # oldest first
        self._running: list[tuple[Job, int]] = []
        self._ids: set[str] = set()  # of the requests that are not finished
        self._jobs = self._generated = self._prefilled = self._hits = self._steps = self._preemptions = 0
        self._busy_s = 0.0

    def add(
        self,
        request: Request,
        on_token: Callable[[int, Delta], None] | None = None,
        on_sample: Callable[[int, Sample], None] | None = None,
    ) -> Job:
        """Queues a request. Raises UserError at once where it can never run. The callbacks hear of every token, and of every sample
        as it ends."""
        settings = request.sampling
        if not request.prompt_ids or request.n < 1 or settings.max_new_tokens < 1:
            raise UserError(f"request {request.request_id}: prompt, n and max_new_tokens must not be empty")
        check_sampling(request.request_id, settings)
        self._check_fits(request, len(request.prompt_ids) + settings.max_new_tokens)
        return self._queue(Job(request, self._jobs, on_token, [None] * request.n, on_sample=on_sample))

    def add_scoring(self, token_ids: Sequence[int], temperature: float, request_id: str) -> Job:
        """Queues tokens to be scored: the job's `scores` will hold the log-probability of each but the first, given those before
        it. Raises UserError at once where they can never fit."""
        settings = Sampling(max_new_tokens=0, temperature=temperature)
        request = Request(tuple(token_ids), 0, settings, request_id)
        if len(token_ids) < 2 or temperature == 0:
            raise UserError(f"request {request_id}: scoring wants two tokens or more and a temperature above 0")
        check_sampling(request_id, settings)
        self._check_fits(request, len(token_ids))
        return self._queue(Job(request, self._jobs, None, []))

    def _queue(self, job: Job) -> Job:
        name = job.request.request_id
        if name in self._ids:
            raise UserError(f"request {name}: another request of this id is running; give each an id of its own")
        self._ids.add(name)
        self._jobs += 1
        self._waiting.append(job)
        return job

    def _check_fits(self, request: Request, wanted: int) -> None:
        context, vocab_size = self.model.config.context_tokens, self.model.config.vocab_size
        name, prompt = f"request {request.request_id}", f"prompt of {len(request.prompt_ids)} tokens"
        asked = f"{prompt} + max_new_tokens = {request.sampling.max_new_tokens}"
        if wanted > context:
            raise UserError(f"{name}: {asked} exceeds the model's context of {context} tokens")
        # The last token is sampled and never fed. Two samples hold the prompt's last block beside their own copies.
        needed = self.pool.blocks_for(max(wanted - 1, len(request.prompt_ids))) + (request.n > 1)
        if needed > self.pool.blocks:
            room = self.pool.blocks * BLOCK_TOKENS
            raise UserError(f"{name}: {asked} exceeds the cache of {room} tokens; raise [engine] cache_mb")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            raise UserError(f"{name}: prompt ids must lie in 0..{vocab_size - 1}, the model's vocabulary")

    @torch.inference_mode()
    def abort(self, request_id: str) -> list[Job]:
        """Ends a request's samples where they stand, with what they have; returns the jobs that ended."""
        jobs = [job for job in self._live() if job.request.request_id == request_id]
        self._waiting = deque(job for job in self._waiting if job not in jobs)
        for task in [task for task in self._prefills if task.job in jobs]:
            self._drop_prefill(task)
        self._retire({row: "abort" for row, (job, _) in enumerate(self._running) if job in jobs})
        for paused in [paused for paused in self._paused if paused.job in jobs]:
            self._paused.remove(paused)
            self._collect_paused(paused)
        for job in jobs:
            self._drop_prompt(job)
            job.aborted = True
            self._ids.discard(request_id)
            for index in range(job.started, job.request.n):
                job.deliver(index, Sample([], [], [], "abort"))
        return jobs

    def abort_all(self) -> None:
        """Ends every request."""
        for request_id in dict.fromkeys(job.request.request_id for job in self._live()):
            self.abort(request_id)

    def _live(self) -> list[Job]:
        """Every job that is not finished, each once."""
        tasks: list[Paused | Prefill] = [*self._paused, *self._prefills]
        return list(dict.fromkeys([*self._waiting, *(t.job for t in tasks), *(job for job, _ in self._running)]))

    def commit(self, version: int) -> None:
        """The weights have changed: what is sampled from here on carries `version`. What was computed of prompts that have not
        started is computed again, and no prefix of before is found, or samples would start from the old weights under the new
        number. Running sequences go on over the keys they have."""
        self.version = version
        self.runner.weights_changed()
        for task in list(self._prefills):
            self._drop_prefill(task)
        for job in self._waiting:
            self._drop_prompt(job)
        self.pool.forget()

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._paused or self._prefills)

    def stats(self) -> EngineStats:
        waiting = sum(max(1, job.request.n - job.started) for job in list(self._waiting))  # asked for from any thread
        return EngineStats(
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            prefix_hit_tokens=self._hits,
            decode_steps=self._steps,
            preemptions=self._preemptions,
            running=len(self._running),
            waiting=waiting + len(self._paused),
            cache_use=1 - self.pool.available / self.pool.blocks,
            busy_s=self._busy_s,
        )

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """Prefills, starts, decodes, retires; returns the jobs that finished.

        Raises DivergenceError where the model computes what is not finite. After that or any other error, or an interrupt, the
        core is empty and its cache is as new: every request has ended without samples, and the next one starts clean.
        """
        began = time.perf_counter()
        try:
            done = self._step()
        except BaseException:
            self._give_up()
            raise
        self._ids.difference_update(job.request.request_id for job in done)
        self._steps += 1
        self._busy_s += time.perf_counter() - began
        return done

    def _step(self) -> list[Job]:
        with self.runner.active():
            if self._worth_admitting():
                self._admit()
            done = self._prefill()
            done += self._start()
            if self._running:
                self._make_room_to_decode()
                done += self._decode()
        return done

    def _give_up(self) -> None:
        """Drops everything after a step that broke off: who holds which block can not be known, and NaN in a block would reach
        whoever holds it next, since a masked position has weight 0 and 0 times NaN is NaN."""
        for job in self._live():
            job.aborted, job.prompt = True, None
        self._waiting.clear()
        self._paused.clear()
        self._prefills.clear()
        self._running.clear()
        self._ids.clear()
        self._gathering = 0
        self.cache.clear(self.pool.touched)
        self.pool = BlockPool(self.pool.blocks, BLOCK_TOKENS)

    # Prompts

    def _worth_admitting(self) -> bool:
        """Whether to take up what waits now. A prompt that comes alone costs a pass of its own beside many running rows, so that
        there newcomers gather for a few steps: the answers of tools come one by one."""
        newcomers = len(self._waiting) + len(self._paused)
        if not self._prefills and newcomers * GATHER_SHARE < len(self._running):
            if self._gathering == 0:
                self._gathering = self._steps + GATHER_STEPS if newcomers else 0
            if newcomers == 0 or self._steps < self._gathering:
                return False
        self._gathering = 0
        return True

    def _admit(self) -> None:
        """Takes up what waits, oldest first and paused sequences before new ones, as rows and blocks allow."""
        wanted = sum(task.job.request.n - task.job.started if task.paused is None else 1 for task in self._prefills)
        ready = sum(job.request.n - job.started for job in self._waiting if job.prompt)
        free = self.max_sequences - len(self._running) - wanted - ready
        taken = {task.job for task in self._prefills if task.paused is None}
        queue: list[tuple[Job, Paused | None]] = [(paused.job, paused) for paused in self._paused]
        queue += [(job, None) for job in self._waiting if job.prompt is None and job not in taken]
        tokens = sum(len(task.token_ids) - task.done for task in self._prefills)
        for job, paused in queue:
            if free <= 0 or tokens >= self.prefill_tokens or not self._admit_one(job, paused):
                return
            tokens += len(self._prefills[-1].token_ids) - self._prefills[-1].done
            free -= max(1, job.request.n - job.started) if paused is None else 1

    def _admit_one(self, job: Job, paused: Paused | None) -> bool:
        token_ids = list(job.request.prompt_ids)
        if paused is not None:
            token_ids += paused.token_ids[:-1]
        # The last token's logits are wanted, so it at least is computed; scores are wanted of all.
        most = 0 if job.scoring else len(token_ids) if paused else len(token_ids) - 1
        blocks = self.pool.find(token_ids, most)
        missing = self.pool.blocks_for(len(token_ids)) - len(blocks)
        # A block in reserve for every running row, or they would soon take these back.
        if missing + len(self._running) > self.pool.available and (self._running or self._prefills):
            self.pool.release(blocks)
            return False
        order = (job.order, paused.index if paused else job.started)
        if missing > self.pool.available and not self._free_blocks(missing, order):
            self.pool.release(blocks)
            return False
        done = len(blocks) * BLOCK_TOKENS
        self._hits += done
        if paused is not None:
            self._paused.remove(paused)
        task = Prefill(job, paused, token_ids, blocks + self.pool.take(missing), done)
        insort(self._prefills, task, key=lambda task: task.order)
        return True

    def _prefill(self) -> list[Job]:
        """Computes up to `prefill_tokens` of the tasks' tokens; returns the scoring jobs that finished."""
        budget = self.prefill_tokens
        chosen: list[tuple[Prefill, int]] = []
        for task in self._prefills:
            count = min(budget, len(task.token_ids) - task.done)
            # A prefix that was found may be all that a paused sequence needs.
            if count or task.done == len(task.token_ids):
                chosen.append((task, task.done + count))
                budget -= count
        work = [(task, stop) for task, stop in chosen if stop > task.done]
        self._compute([pair for pair in work if pair[0].replay is None])
        self._compute([pair for pair in work if pair[0].replay is not None])
        done = []
        for task, _ in chosen:
            if task.done == len(task.token_ids):
                self._prefills.remove(task)
                if task.paused is not None:
                    self._resume(task, task.paused)
                elif task.job.scoring:
                    task.job.scores = task.scores
                    self.pool.release(task.blocks)
                    self._waiting.remove(task.job)
                    done.append(task.job)
        return done

    def _compute(self, chosen: list[tuple[Prefill, int]]) -> None:
        """Runs each task's tokens up to the given one through the model."""
        if not chosen:
            return
        chosen.sort(key=lambda pair: pair[0].done > 0)  # stable: whole beginnings first, as the attention wants them
        pieces = [Piece(task.blocks, task.done, stop) for task, stop in chosen]
        token_ids = [token for task, stop in chosen for token in task.token_ids[task.done : stop]]
        replays = [task.replay[task.done : stop] for task, stop in chosen if task.replay is not None]
        x_TD = self.runner.prefill(pieces, token_ids, torch.cat(replays) if replays else None)
        self._prefilled += len(token_ids)
        start = 0
        last: list[tuple[Prefill, int]] = []
        for task, stop in chosen:
            end = start + stop - task.done
            if task.job.scoring:
                targets, temperature = task.token_ids[task.done + 1 : stop + 1], task.job.request.sampling.temperature
                task.scores += self.runner.scores(x_TD[start:end], targets, temperature)
            elif stop == len(task.token_ids):
                if task.paused is None or task.paused.versions[0] == self.version:
                    self.pool.remember(task.token_ids, task.blocks)
                if task.paused is None:
                    last.append((task, end - 1))
            task.done, start = stop, end
        if last:
            logits_BV = self.runner.logits(x_TD, [row for _, row in last])
            for i, (task, _) in enumerate(last):
                task.job.prompt = Prompt(task.blocks, logits_BV[i : i + 1])

    def _drop_prefill(self, task: Prefill) -> None:
        """Gives a task's blocks back; it will be taken up again from the queue."""
        self._prefills.remove(task)
        self.pool.release(task.blocks)
        if task.paused is not None:
            self._pause(task.paused)

    def _drop_prompt(self, job: Job) -> None:
        if job.prompt is not None:
            self.pool.release(job.prompt.blocks)
            job.prompt = None

    # Rows

    def _start(self) -> list[Job]:
        """Gives samples of ready prompts a row each, and draws their first tokens."""
        first = len(self._running)
        logits: list[Tensor] = []
        for job in list(self._waiting):
            free = self.max_sequences - len(self._running)
            if free == 0 or job.prompt is None:
                break
            count = self._start_samples(job, min(free, job.request.n - job.started), job.prompt.blocks)
            if count:
                logits.append(job.prompt.logits_1V.expand(count, -1))
            if job.started < job.request.n:
                break
            job.prompt = None
            self._waiting.popleft()
        return self._sample(torch.cat(logits), slice(first, len(self._running))) if logits else []

    def _start_samples(self, job: Job, count: int, blocks: list[int]) -> int:
        """Starts up to `count` of the job's samples, as many as there are blocks for; returns how many."""
        length = len(job.request.prompt_ids)
        whole, partial = length // BLOCK_TOKENS, length % BLOCK_TOKENS
        # The last sample takes the prompt's own last block; the others copy it.
        copies = count - (job.started + count == job.request.n) if partial else 0
        if copies > self.pool.available and not self._running:
            self._free_blocks(copies, (job.order, job.started))
        if copies > self.pool.available:
            count = copies = self.pool.available
        if count == 0:
            return 0
        targets = self.pool.take(copies)
        if targets:
            self.cache.copy([blocks[-1]] * copies, targets)
        settings = job.request.sampling
        rows = slice(len(self._running), len(self._running) + count)
        self.rows.make_room(settings.max_new_tokens)
        for i, row in enumerate(range(rows.start, rows.stop)):
            if job.started + i + 1 == job.request.n:
                self.rows.set_blocks(row, blocks)
            else:
                self.pool.hold(blocks[:whole])
                self.rows.set_blocks(row, blocks[:whole] + targets[i : i + 1])
        self.rows.generated[rows] = 0
        self._set_columns(job, rows, job.started)
        self._running += [(job, index) for index in range(job.started, job.started + count)]
        job.started += count
        return count

    def _set_columns(self, job: Job, rows: slice, first: int) -> None:
        """What the rows of the job's samples from `first` on need, whether they start or go on."""
        settings, columns = job.request.sampling, self.rows.columns
        self.rows.position[rows] = len(job.request.prompt_ids)
        self.rows.limit[rows] = settings.max_new_tokens
        columns["temperature"][rows] = settings.temperature
        columns["top_p"][rows] = settings.top_p
        columns["top_k"][rows] = settings.top_k
        self.rows.set_stop_ids(rows, settings.stop_ids)
        draws = uniforms(settings.seed, first + rows.stop - rows.start, settings.max_new_tokens)[first:]
        columns["uniforms"][rows, : settings.max_new_tokens] = torch.from_numpy(draws).to(self.rows.device)

    def _resume(self, task: Prefill, paused: Paused) -> None:
        """A paused sequence whose keys are back goes on where it was."""
        row, count = len(self._running), len(paused.token_ids)
        self.rows.make_room(paused.job.request.sampling.max_new_tokens)
        self._set_columns(paused.job, slice(row, row + 1), paused.index)
        self.rows.set_blocks(row, task.blocks)
        self.rows.position[row] += count - 1
        self.rows.generated[row] = count
        self.rows["last_token"][row] = paused.token_ids[-1]
        for name in ("token_ids", "logprobs", "versions"):
            column = self.rows["tokens" if name == "token_ids" else name]
            column[row, :count] = torch.tensor(getattr(paused, name), dtype=column.dtype, device=column.device)
        self._running.append((paused.job, paused.index))

    def _make_room_to_decode(self) -> None:
        """A block for every row that has filled its last; where there are none left, the youngest give way."""
        used = len(self._running)
        full = (self.rows.position[:used] >= self.rows.held[:used] * BLOCK_TOKENS).nonzero()[0].tolist()
        sequences = sorted((self._running[row] for row in full), key=_order)
        for sequence in sequences:
            if sequence not in self._running:
                continue  # gave way to an older one
            if not self.pool.available and not self._free_blocks(1, _order(sequence)):
                self._preempt(sequence)
                continue
            row = self._running.index(sequence)
            self.rows.table[row, self.rows.held[row]] = self.pool.take(1)[0]
            self.rows.held[row] += 1

    def _free_blocks(self, count: int, order: tuple[int, int]) -> bool:
        """Has what is younger than `order` give way, youngest first, until `count` blocks are available."""
        while self.pool.available < count:
            younger: list[tuple[tuple[int, int], Callable[[], None]]] = []
            for sequence in self._running:
                younger.append((_order(sequence), lambda sequence=sequence: self._preempt(sequence)))  # type: ignore[misc]
            for task in self._prefills:
                younger.append((task.order, lambda task=task: self._drop_prefill(task)))  # type: ignore[misc]
            for job in self._waiting:
                if job.prompt is not None:
                    younger.append(((job.order, job.started), lambda job=job: self._drop_prompt(job)))  # type: ignore[misc]
            youngest, give_way = max(younger, key=lambda entry: entry[0], default=(order, lambda: None))
            if youngest <= order:
                return False
            give_way()
        return True

    def _preempt(self, sequence: tuple[Job, int]) -> None:
        """Takes a running sequence's blocks; what it has sampled is kept."""
        row = self._running.index(sequence)
        job, index = sequence
        count, position = int(self.rows.generated[row]), int(self.rows.position[row])
        blocks = self.rows.blocks(row)
        paused = Paused(
            job,
            index,
            self.rows["tokens"][row, :count].tolist(),
            self.rows["logprobs"][row, :count].tolist(),
            self.rows["versions"][row, :count].tolist(),
            self.cache.read_routes(blocks, position),
        )
        self.pool.release(blocks)
        self._close([row])
        self._pause(paused)
        self._preemptions += 1

    def _pause(self, paused: Paused) -> None:
        insort(self._paused, paused, key=lambda paused: (paused.job.order, paused.index))

    def _decode(self) -> list[Job]:
        running = slice(0, len(self._running))
        if not self._running:
            return []
        return self._sample(self.runner.decode(running), running)

    def _sample(self, logits_BV: Tensor, rows: slice) -> list[Job]:
        """Draws the next token of every row in `rows`, records it, and retires the rows that are done."""
        settings = [job.request.sampling for job, _ in self._running[rows]]
        stopped_B, finished_B, kept_BV = self.runner.sample(logits_BV, rows, settings, self.version)
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
                token, logprob = int(self.rows["tokens"][row, at]), float(self.rows["logprobs"][row, at])
                job.on_token(index, Delta(token, logprob, reasons.get(row)))

    def _retire(self, reasons: dict[int, FinishReason]) -> list[Job]:
        """Collects the samples of these rows; returns the jobs that are finished."""
        for row, reason in reasons.items():
            self._collect(row, reason)
        jobs = dict.fromkeys(self._running[row][0] for row in reasons)
        self._close(sorted(reasons))
        return [job for job in jobs if job.finished]

    def _close(self, closed: list[int]) -> None:
        """Closes the gaps that these rows (ascending) leave with the last running rows."""
        left = len(self._running) - len(closed)
        gaps = [row for row in closed if row < left]
        movers = [row for row in range(left, len(self._running)) if row not in closed]
        if movers:
            self.rows.move(gaps, movers)
            for target, source in zip(gaps, movers, strict=True):
                self._running[target] = self._running[source]
        del self._running[left:]

    def _collect(self, row: int, reason: FinishReason) -> None:
        job, index = self._running[row]
        count, blocks = int(self.rows.generated[row]), self.rows.blocks(row)
        token_ids = self.rows["tokens"][row, :count].tolist()
        fed = len(job.request.prompt_ids) + count - 1
        routes = self.cache.read_routes(blocks, fed)
        sample = Sample(
            token_ids=token_ids,
            logprobs=self.rows["logprobs"][row, :count].tolist(),
            versions=self.rows["versions"][row, :count].tolist(),
            finish_reason=reason,
            kept_ids=job.kept.pop(index, None),
            routes=None if routes is None else routes.numpy(),
        )
        # A next turn may begin with this one. Keys from before a weight update are no longer what the prefix gives.
        if sample.versions[0] == self.version:
            self.pool.remember([*job.request.prompt_ids, *token_ids[:-1]], blocks)
        self.pool.release(blocks)
        job.deliver(index, sample)

    def _collect_paused(self, paused: Paused) -> None:
        job, index = paused.job, paused.index
        routes = None if paused.routes_LYK is None else paused.routes_LYK.numpy()
        kept = job.kept.pop(index, None)
        job.deliver(index, Sample(paused.token_ids, paused.logprobs, paused.versions, "abort", kept, routes))


def _order(sequence: tuple[Job, int]) -> tuple[int, int]:
    job, index = sequence
    return job.order, index
