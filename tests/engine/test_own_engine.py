"""An engine that a user wrote, named in [engine] kind: the example of the guide trains, and faults are named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tiny_models import DENSE

from nmoe.engine.api import Request
from nmoe.engine.function import FunctionEngine
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.runs.ledger import read_metrics
from nmoe.types import Sample, Sampling

Reinforce = Callable[..., Path]
SMALL = ("--run.steps=2", "--batch.prompts_per_step=4", "--batch.group_size=2")
GUIDE = Path(__file__).parents[2] / "docs/guides/engines.md"
WRONG = """
class Wrong(Counted):
    async def generate(self, request):
        samples = await super().generate(request)
        samples[0].logprobs[0] = 0.5
        return samples


class Silent:
    def __init__(self, settings, model):
        pass

    def run(self, coroutine):
        pass


def unready(settings, model):
    raise OSError("no such host")
"""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """counted.py in the working directory, as the guide prints it, and engines with faults."""
    (printed,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "counted.py").write_text(printed + WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "counted", raising=False)
    return tmp_path


def test_the_engine_of_the_guide_samples_and_reports(reinforce: Reinforce, example: Path) -> None:
    there = read_metrics(reinforce(*SMALL, "--run.name=own", "--engine.kind=counted:Counted"))
    here = read_metrics(reinforce(*SMALL, "--run.name=here"))
    asked = [row["groups"] for row in there]
    assert [row["counted_requests"] for row in there] == [asked[0], sum(asked)]
    for name in ("correctness", "mismatch_abs_max", "grad_norm"):
        assert [row[name] for row in there] == [row[name] for row in here]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "counted:Wrong",
            "engine.kind = 'counted:Wrong': sample 0 of request .* log-probability that is not a finite number",
        ),
        (
            "counted:Silent",
            "engine.kind = 'counted:Silent' has no samples, generate, score, update_weights, forget_prefixes",
        ),
        ("counted:unready", r"cannot be called with \[engine\] and the model: OSError: no such host"),
        ("counted:Missing", "engine.kind.*counted.py has no 'Missing'; it defines Counted"),
        ("nowhere:Engine", "engine.kind.*importing nowhere failed: ModuleNotFoundError"),
        (
            "vlm",
            "engine.kind.*must be one of native, server, vllm, sglang, or an engine of your own .*did you mean 'vllm'",
        ),
    ],
)
def test_an_engine_that_cannot_be_used_is_named(reinforce: Reinforce, example: Path, kind: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        reinforce(*SMALL, f"--engine.kind={kind}")
    assert re.search(message, " ".join(str(caught.value).split()))
    assert caught.value.exit_code == 2


def test_metrics_are_those_of_the_engine_below() -> None:
    class Measured(ScriptedEngine):
        def metrics(self) -> dict[str, float]:
            return {"engines_serving": 3.0, "canary_abs_max": 1e-7}

    def unused(request: Any, engine: Any) -> list[Any]:
        raise AssertionError

    engine = FunctionEngine(Measured([]), unused, lambda: 0, ModelConfig(**DENSE))
    assert engine.metrics() == {"engines_serving": 3.0, "canary_abs_max": 1e-7}


@pytest.mark.parametrize(("sampled", "versions"), [([], None), ([0, 1], [0, 1])])
def test_samples_say_their_versions_where_the_weights_may_change(
    sampled: list[int], versions: list[int] | None
) -> None:
    def generate(request: Request, engine: Any) -> list[Sample]:
        return [Sample([4, 5], [-0.5, -0.5], sampled, "length")]

    engine = FunctionEngine(ScriptedEngine([]), generate, None, ModelConfig(**DENSE))
    request = Request((1, 2), 1, Sampling(max_new_tokens=2), "7/0")
    if versions is None:
        with pytest.raises(UserError, match=r"sample 0 of request '7/0' has no versions.* async\.max_staleness = 0"):
            asyncio.run(engine.generate(request))
    else:
        assert asyncio.run(engine.generate(request))[0].versions == versions
