"""Grades an answer against its gold: compares in layers (text, number, form, symbolic value), the symbolic layer in worker
processes.

    verdict = await grade_answer(gold, answer)      # in a rollout
    for verdict in grade_answers(pairs): ...        # in a command

Both share one pool of workers in this process, which starts with the first answer that needs it. docs/guides/grading.md states
the rules, row by row, and each row is tested.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from nmoe.grading.math.equivalence import settle
from nmoe.grading.math.question import DEFAULT, AnswerOrder, Policy, Units
from nmoe.grading.workers.pool import Reply, WorkerPool
from nmoe.types import Verdict

# Enough that every worker has its next batch ready.
_IN_FLIGHT = 256

_REMEMBERED = 4096

_lock = threading.Lock()
_pool: WorkerPool | None = None
_Key = tuple[str, str, AnswerOrder, Units, str | None]
_replies: OrderedDict[_Key, Future[Reply]] = OrderedDict()


def symbolic_workers() -> WorkerPool:
    """Returns the pool of processes that compare expressions symbolically, shared within this process."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = WorkerPool("nmoe.grading.math.symbolic:equal")
        return _pool


async def grade_answer(gold: str, answer: str, policy: Policy = DEFAULT) -> Verdict:
    """Grades the raw text `answer` against the raw text `gold` and returns the verdict; never raises because of an answer."""
    verdict = settle(gold, answer, policy)
    if verdict is not None:
        return verdict
    return symbolic_verdict(await asyncio.wrap_future(_submit(gold, answer, policy)))


def grade_answers(pairs: Iterable[tuple[str, str]], policy: Policy = DEFAULT) -> Iterator[Verdict]:
    """Grades pairs (gold, answer) under one policy and yields the verdicts in order. Blocks; keeps a few hundred pairs in
    flight.
    """
    return grade_each((gold, answer, policy) for gold, answer in pairs)


def grade_each(answers: Iterable[tuple[str, str, Policy]]) -> Iterator[Verdict]:
    """Grades answers, each given as (gold, answer, policy), and yields the verdicts in order. Blocks; keeps a few hundred in
    flight.
    """
    waiting: deque[Verdict | Future[Reply]] = deque()
    for gold, answer, policy in answers:
        waiting.append(settle(gold, answer, policy) or _submit(gold, answer, policy))
        while waiting and (isinstance(waiting[0], Verdict) or waiting[0].done() or len(waiting) > _IN_FLIGHT):
            yield _verdict(waiting.popleft())
    for one in waiting:
        yield _verdict(one)


def _submit(gold: str, answer: str, policy: Policy) -> Future[Reply]:
    """Submits a pair for symbolic comparison and returns the future reply. Equal pairs share one comparison, because samples of a
    group often give the same answer.
    """
    key = gold, answer, *policy.arguments
    pool = symbolic_workers()
    with _lock:
        shared = _replies.get(key)
        if shared is None:
            shared = _replies[key] = pool.submit(*key)
            if len(_replies) > _REMEMBERED:
                _replies.popitem(last=False)
        else:
            _replies.move_to_end(key)
    mine: Future[Reply] = Future()  # one per caller, so that cancelling it cancels no other caller
    shared.add_done_callback(lambda done: _pass_on(key, done, mine))
    return mine


def _pass_on(key: _Key, done: Future[Reply], mine: Future[Reply]) -> None:
    failed = done.cancelled() or done.exception() is not None or done.result().status == "lost"
    if failed:
        with _lock:
            _replies.pop(key, None)
    if done.cancelled():
        mine.cancel()
    elif mine.set_running_or_notify_cancel():
        error = done.exception()
        if error is None:
            mine.set_result(done.result())
        else:
            mine.set_exception(error)


def forget_replies() -> None:
    """Makes every pair be compared again, for a measurement of the comparison itself."""
    with _lock:
        _replies.clear()


def _verdict(one: Verdict | Future[Reply]) -> Verdict:
    return one if isinstance(one, Verdict) else symbolic_verdict(one.result())


def symbolic_verdict(reply: Reply) -> Verdict:
    """Converts a worker's reply to a verdict."""
    if reply.status == "value":
        return _EQUAL if reply.value else _DIFFERENT
    if reply.status == "lost":
        return Verdict("error", 0.0, "symbolic", reply.value)
    return Verdict.of(False, "symbolic", f"{reply.status}: {reply.value}")


_EQUAL = Verdict.of(True, "symbolic", "the same value")
_DIFFERENT = Verdict.of(False, "symbolic", "not shown to be the same value")
