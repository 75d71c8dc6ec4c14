"""The machine that a benchmark ran on: its parts, its speed at a fixed piece of work, and who else used it meanwhile.

`python benchmarks/machine.py` prints the calibration: CPU seconds for a fixed piece of plain torch, so that times from two machines
can be compared. The work is a forward and a backward pass of a small decoder block and a vocabulary's head, in fp32, on one thread:
products of widths like the speedrun's, a softmax, and operations on single elements. It uses no code of nmoe, so that no change
here changes it.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import torch
from torch.nn import functional as F

ROUNDS = 7
PASSES = 8
TOKENS, WIDTH, HIDDEN, VOCABULARY, HEADS = 2048, 96, 256, 704, 4


def calibration_s() -> float:
    """Median CPU seconds of ROUNDS rounds of PASSES passes each, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        states_TD = torch.randn(TOKENS, WIDTH, generator=generator)
        shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (VOCABULARY, WIDTH)]
        weights = [(torch.randn(shape, generator=generator) / 10).requires_grad_() for shape in shapes]
        targets_T = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        _work(states_TD, weights, targets_T)
        rounds = []
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(PASSES):
                _work(states_TD, weights, targets_T)
            rounds.append(time.process_time() - began)
        return statistics.median(rounds)
    finally:
        torch.set_num_threads(threads)


def _work(x_TD: torch.Tensor, weights: list[torch.Tensor], targets_T: torch.Tensor) -> None:
    mix, out, up, down, head = weights
    q, k, v = (
        part.view(-1, 64, HEADS, WIDTH // HEADS).transpose(1, 2) for part in F.linear(x_TD, mix).chunk(3, dim=-1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x_TD = x_TD + F.linear(attended.transpose(1, 2).reshape(-1, WIDTH), out)
    x_TD = x_TD + F.linear(F.silu(F.linear(F.rms_norm(x_TD, (WIDTH,)), up)), down)
    F.cross_entropy(F.linear(x_TD, head), targets_T).backward()
    for weight in weights:
        weight.grad = None


def machine() -> dict[str, object]:
    """Processor, cores, torch's threads, operating system, and how fast that was at a fixed piece of work just now, by which
    times of two machines compare."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "calibration_s": round(calibration_s(), 4),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by package."""
    return {name: version(name) for name in packages}


class Stopwatch:
    """`with Stopwatch() as watch: work()`, then `watch.seconds`, `watch.cpu_seconds` of this process, and `watch.others_cores`: how
    many cores everybody but this process used meanwhile, other guests of the host included (steal). Sides that spin while they
    wait show here. NaN where /proc does not say.
    """

    def __enter__(self) -> Stopwatch:
        self._busy_s, self._own_s, self._began = _machine_busy_s(), time.process_time(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu_seconds = time.process_time() - self._own_s
        self.others_cores = (_machine_busy_s() - self._busy_s - self.cpu_seconds) / self.seconds


def _machine_busy_s() -> float:
    """Seconds that all cores have worked since boot: user, nice, system, irq, softirq and steal of /proc/stat (proc(5))."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return float("nan")
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    print(f"calibration: {calibration_s():.3f} CPU seconds (torch {torch.__version__})")
