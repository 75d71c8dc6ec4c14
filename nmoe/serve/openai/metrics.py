"""The figures of a server in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from nmoe.engine.api import EngineStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts durations by the bucket that they fall into."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for limit, count in zip((*_SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """What a server has answered since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.prompt_tokens = 0
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, stats: EngineStats, admitted: int) -> str:
        """Returns all figures, the engine's among them."""
        requests = [
            f'nmoe_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self.requests.items())
        ]
        blocks = [
            ("nmoe_requests_total", "counter", "Requests answered, by route and status.", requests),
            _one("nmoe_prompt_tokens_total", "counter", "Tokens of the prompts of requests.", self.prompt_tokens),
            _one("nmoe_generated_tokens_total", "counter", "Tokens sampled.", stats.generated_tokens),
            _one("nmoe_prefix_hit_tokens_total", "counter", "Tokens found in the cache.", stats.prefix_hit_tokens),
            _one("nmoe_preemptions_total", "counter", "Samples that lost their place for a while.", stats.preemptions),
            _one("nmoe_engine_busy_seconds_total", "counter", "Seconds in which the engine computed.", stats.busy_s),
            _one("nmoe_requests_open", "gauge", "Requests that run or wait.", admitted),
            _one("nmoe_running", "gauge", "Samples that are computed.", stats.running),
            _one("nmoe_waiting", "gauge", "Samples that wait.", stats.waiting),
            _one("nmoe_cache_use", "gauge", "Share of the key-value cache that is held.", stats.cache_use),
            _histogram("nmoe_first_token_seconds", "Time to the first token of a request.", self.first_token),
            _histogram("nmoe_request_seconds", "Time to the end of a request.", self.whole),
        ]
        lines = [
            line
            for name, kind, help_, samples in blocks
            for line in (f"# HELP {name} {help_}", f"# TYPE {name} {kind}", *samples)
        ]
        return "\n".join(lines) + "\n"


def _one(name: str, kind: str, help_: str, value: float) -> tuple[str, str, str, list[str]]:
    return name, kind, help_, [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"]


def _histogram(name: str, help_: str, histogram: Histogram) -> tuple[str, str, str, list[str]]:
    return name, "histogram", help_, list(histogram.lines(name))
