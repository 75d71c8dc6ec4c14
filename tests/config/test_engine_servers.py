"""Settings of engine servers that cannot work are refused before a run starts."""

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import packaged_configuration
from nmoe.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--engine.kind=server", "--engine.weights=adapter"], "the run trains all weights"),
        (["--engine.kind=vllm", "--engine.max_sequences=4"], "vLLM refuses a group of batch.group_size"),
        (["--engine.servers=2"], "needs engine.kind = 'server' or 'vllm'"),
        (["--engine.kind=server", "--engine.tensor_parallel=2"], "needs engine.kind = 'vllm'"),
        (["--engine.kind=sglang", "--engine.weights=group"], 'go by "disk" alone'),
        (["--engine.kind=vllm", "--engine.weights=delta"], 'vLLM keeps them merged and packed; use "disk" or "group"'),
        (
            ["--engine.kind=server", "--engine.weights=group", "--engine.shared_directory=."],
            'is for files, and "group" writes none',
        ),
        (["--engine.kind=server", "--engine.urls=['http://[::1']"], "is no URL of a server"),
        (["--engine.kind=server", "--engine.urls=['http://a:1', 'http://a:1']"], "names a server twice"),
    ],
)
def test_settings_that_cannot_work_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_run(packaged_configuration("sort_grpo"), RLConfig, overrides)
