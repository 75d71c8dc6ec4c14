"""Times `print(1)` in a sandbox that has to be started (cold) and in a started one (warm).

    python benchmarks/sandbox.py                 both levels, half a minute
    python benchmarks/sandbox.py --level landlock --repeats 50

Cold is from asking for a sandbox that nobody has started to its first output; warm is one more call in the same sandbox. Both are
timed around the host's `await`. `fresh interpreter` is `python -I -S -c 'print(1)'` without any sandbox. The last line printed is
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from machine import machine, versions

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox.process import ProcessSandbox
from nmoe.sandbox.sandboxes import Sandboxes

LEVELS = ("bubblewrap", "landlock")


async def median_ms(repeats: int, act: Callable[[], Awaitable[None]]) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        await act()
        seconds.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(seconds), 2)


async def measure(level: str, repeats: int) -> dict[str, object]:
    sandboxes = Sandboxes(SandboxSettings(level=level, warm=0))  # type: ignore[arg-type]
    opened: list[ProcessSandbox] = []

    async def cold() -> None:
        opened.append(await sandboxes.open())
        assert (await opened[-1].python("print(1)")).stdout == b"1\n"

    async def close() -> None:
        await opened.pop().close()

    # One opens and closes at a time, so that none waits for another's end.
    opening, closing = [], []
    for _ in range(repeats):
        opening.append(await median_ms(1, cold))
        closing.append(await median_ms(1, close))
    async with await sandboxes.open() as sandbox:

        async def warm() -> None:
            assert (await sandbox.python("print(1)")).stdout == b"1\n"

        await warm()
        result = {
            "cold_ms": round(statistics.median(opening), 2),
            "warm_ms": await median_ms(10 * repeats, warm),
            "close_ms": round(statistics.median(closing), 2),
        }
    await sandboxes.close()
    return result


async def bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", "print(1)"], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--level", choices=LEVELS, action="append", help="default: both")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    result: dict[str, object] = {"fresh_interpreter_ms": asyncio.run(median_ms(arguments.repeats, bare))}
    print(f"fresh interpreter without a sandbox: {result['fresh_interpreter_ms']} ms")
    for level in arguments.level or LEVELS:
        measured = asyncio.run(measure(level, arguments.repeats))
        result[level] = measured
        print(
            f"{level}: print(1) {measured['cold_ms']} ms cold, {measured['warm_ms']} ms warm; "
            f"closing {measured['close_ms']} ms (medians)"
        )
    print(json.dumps({**result, "machine": machine(), "versions": versions("nmoe")}))


if __name__ == "__main__":
    main()
