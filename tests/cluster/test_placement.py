"""A placement that cannot work is refused before anything is started."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nmoe.cluster import parent
from nmoe.cluster.base import checkpoint_as_it_is
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.errors import UserError
from nmoe.plan.engine_plan import engine_plan
from nmoe.recipes.run_loop import Run
from nmoe.runs.directory import is_free
from nmoe.work import WORK

PLACED = ("--engine.kind=server", "--placement.engines=2")


Configured = Callable[..., RLConfig]


@pytest.fixture
def configured(base: Path, workshop: Path) -> Configured:
    return lambda *overrides: load_run(workshop / "rl.toml", RLConfig, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--placement.engines=2"], "starts engine servers"),
        ([*PLACED, "--engine.servers=2"], "give placement.engines"),
        (["--engine.kind=vllm", "--placement.engines=2", "--engine.memory_share=0.5"], "give placement.memory_share"),
        ([*PLACED, "--placement.least_engines=3"], "are more than the engines = 2"),
        ([*PLACED, "--placement.launcher=ray", "--placement.layout=colocated"], "shares no GPU between processes"),
    ],
)
def test_settings_that_cannot_work_are_named(configured: Configured, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        configured(*overrides)


REWARDS = """[{name = "f", type = "function", call = "json:dumps", timeout_s = 40, weight = 1.0},
 {name = "h", type = "http", url = "http://a:1", timeout_s = 7, retries = 2, weight = 1.0}]"""


@pytest.mark.parametrize(
    ("overrides", "beside_s"),
    [
        ([], 600),
        (["--environment.budget.wall_s=3600"], 3600),
        (["--environment.budget.wall_s=50", f"--environment.rewards={REWARDS}"], 50 + 40 + 3 * (7 + 30)),
        (["--eval=[{every_steps = 2}]"], 600),
        (['--eval=[{every_steps = 2, environment.path = "compare", environment.budget.wall_s = 900}]'], 900),
    ],
)
def test_a_piece_of_work_takes_as_long_as_the_environments_allow(
    configured: Configured, overrides: list[str], beside_s: float
) -> None:
    limits = ("--engine.token_s=0.5", "--sampling.max_new_tokens=64")
    assert parent.piece_s(configured(*PLACED, *limits, *overrides)) == 0.5 * 64 + beside_s


def test_a_run_has_a_parent_unless_it_has_the_addresses_of_engines(configured: Configured) -> None:
    assert configured(*PLACED).has_parent
    assert not configured(*PLACED, "--engine.urls=['http://a:1']").has_parent
    assert not configured("--engine.kind=server").has_parent


def test_a_shared_directory_that_is_not_there_is_named(configured: Configured, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"engine.shared_directory=.*/none: no such directory; make it, or leave it out"
    ):
        configured(*PLACED, f"--engine.shared_directory={tmp_path}/none").engine.shared()
    assert configured(*PLACED, f"--engine.shared_directory={tmp_path}").engine.shared() == tmp_path
    assert configured(*PLACED).engine.shared() is None


def test_ranks_that_torchrun_started_are_refused(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="starts its ranks itself; start it without torchrun"):
        parent.run_placed(configured(*PLACED), tmp_path, [])


def test_a_machine_with_too_little_memory_is_refused(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(*PLACED, "--placement.learner_gpus=2")
    engines = engine_plan(config)
    assert engines is not None
    of_engine, of_rank = sum(engines.of_gpu(1)), parent.plan(config, 2, 2).total
    monkeypatch.setattr(parent, "memory_of", lambda _: (2 * of_engine + 2 * of_rank, 0))
    parent.refuse_what_does_not_fit(config)
    monkeypatch.setattr(parent, "memory_of", lambda _: (2 * of_engine + 2 * of_rank - 1, 0))
    with pytest.raises(UserError, match=r"placement: 2 ranks of .* and 2 engines of .*; lower placement.engines"):
        parent.refuse_what_does_not_fit(config)
    monkeypatch.setattr(parent, "memory_of", lambda _: (0, 0))
    parent.refuse_what_does_not_fit(config)


@pytest.mark.parametrize(
    ("layout", "ranks", "engines", "each", "there", "message"),
    [
        ("disaggregated", 4, 2, 2, 8, None),
        (
            "disaggregated",
            4,
            2,
            2,
            7,
            "4 GPUs to train on and 4 for engines, disaggregated, are 8, and this machine has 7",
        ),
        ("colocated", 4, 2, 2, 4, None),
        ("colocated", 2, 2, 2, 3, "2 GPUs to train on and 4 for engines, colocated, are 4, and this machine has 3"),
    ],
)
def test_gpus_are_counted(
    configured: Configured,
    layout: str,
    ranks: int,
    engines: int,
    each: int,
    there: int,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    config = configured(
        *("--engine.kind=vllm", f"--placement.layout={layout}", f"--placement.learner_gpus={ranks}"),
        *(f"--placement.engines={engines}", f"--placement.tensor_parallel={each}", "--placement.memory_share=0.5"),
    )
    if message is None:
        parent.refuse_what_does_not_fit(config)
        return
    with pytest.raises(UserError, match=message):
        parent.refuse_what_does_not_fit(config)


def test_a_gpu_with_too_little_memory_is_refused(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both share it where they are colocated."""
    config = configured("--engine.kind=vllm", "--placement.memory_share=0.5", "--placement.layout=colocated")
    rank = parent.plan(config, 1, 1).total
    monkeypatch.setattr(parent, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    def refused(memory: int) -> str:
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
        with pytest.raises(UserError) as error:
            parent.refuse_what_does_not_fit(config)
        return str(error.value)

    assert refused(2 * rank - 2).startswith("placement: a rank needs ")
    assert refused(2**16).startswith("placement: an engine does not fit engine.memory_share = 0.5 of ")


def test_a_plan_counts_the_engines_of_a_placement(configured: Configured) -> None:
    planned = engine_plan(configured("--engine.kind=vllm", "--placement.engines=3", "--placement.tensor_parallel=2"))
    assert planned is not None
    assert planned.gpus == 6


@pytest.mark.parametrize(
    ("overrides", "as_it_is"),
    [
        ((), True),
        (("--engine.kind=vllm",), False),  # it knows no checkpoint of nmoe's own
        (("--model.context_tokens=128",), False),
        (("--lora.rank=2",), False),
        (("--lora.rank=2", "--engine.weights=disk"), True),
        (("--lora.path=elsewhere", "--engine.weights=disk"), False),
    ],
)
def test_engines_load_the_checkpoint_where_the_run_begins_with_it(
    configured: Configured, base: Path, overrides: tuple[str, ...], as_it_is: bool
) -> None:
    config = configured(*PLACED, *overrides)
    found = checkpoint_as_it_is(config)
    assert (found is not None) == as_it_is
    if found is not None:
        assert found.parent == base / "checkpoints"


def test_logs_of_engines_do_not_take_the_name_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run/engines").mkdir(parents=True)
    (tmp_path / "run/engines/server_0.log").touch()
    assert is_free(tmp_path / "run")
    (tmp_path / "run/other").touch()
    assert not is_free(tmp_path / "run")


def test_a_run_says_what_it_does_to_its_parent_alone(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    directory: Any = SimpleNamespace(path=tmp_path, ledger=None, start_step=0)
    progress: Any = None
    activity = tmp_path / "engines" / "activity"
    Run(configured("--engine.kind=server"), directory, progress, 9, None).does("step", 3)
    assert not activity.exists()
    placed = Run(configured(*PLACED, "--engine.urls=['http://a:1']"), directory, progress, 9, None)
    placed.does("step", 3)
    said, done = activity.read_text().split("\n")
    assert (said, int(done)) == ("step 3", WORK.done())
    placed.does("evaluation", 3)
    assert activity.read_text().startswith("evaluation 3\n")


def test_a_run_reports_again_and_again_how_much_it_has_done(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the writing of a checkpoint, which has no pieces."""
    monkeypatch.setattr("nmoe.recipes.run_loop._REPORT_S", 0.01)
    (tmp_path / "engines").mkdir()
    directory: Any = SimpleNamespace(path=tmp_path, ledger=None, start_step=0)
    progress: Any = None
    run = Run(configured(*PLACED, "--engine.urls=['http://a:1']"), directory, progress, 9, None)

    def reported() -> int:
        _, _, done = (tmp_path / "engines" / "activity").read_text().partition("\n")
        return int(done or 0)

    def until(done: int) -> None:
        end = time.monotonic() + 20
        while reported() < done:
            assert time.monotonic() < end
            time.sleep(0.01)

    with run._reporting():
        run.does("checkpoint", 3)
        first = reported()
        for _ in range(7):
            WORK.pieces += 1
        until(first + 7)
        (tmp_path / "large").write_bytes(bytes(5 * 2**20))
        until(first + 12)
    time.sleep(0.05)
    WORK.pieces += 1
    last = reported()
    time.sleep(0.05)
    assert reported() == last  # the run has ended
