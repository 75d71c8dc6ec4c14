"""Processes on a Ray cluster. Ray is not installed here: a stand-in makes its actors in this process. `.ci/placed_on_ray.py` runs
the real one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from nmoe.cluster import parent
from nmoe.cluster.ray import Keeper, RayLauncher, RayProcess, lacking, ray_launcher
from nmoe.engine.remote.launcher import Command, free_port
from nmoe.errors import InfrastructureError, UserError
from nmoe.parallel import join

# Prints what it was given, and ends when it is asked to.
WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(sys.argv[1], os.environ.get("GIVEN"), os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
time.sleep(60)
"""


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class Actor:
    """An actor in this process, whose worker can be `killed` or `hung`."""

    def __init__(self, made: Any, options: dict[str, Any]) -> None:
        self.made, self.options, self.killed, self.hung = made, options, False, False

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            def answer() -> Any:
                if self.hung:
                    raise GetTimeoutError("no answer")
                if self.killed:
                    raise RayError("The actor died unexpectedly\nits worker was killed")
                return getattr(self.made, name)(*given)

            return answer

        return SimpleNamespace(remote=call)


class Ray:
    """What nmoe uses of Ray."""

    def __init__(self, gpus: list[float], reserves: bool = True) -> None:
        self.gpus, self.actors, self.bundles, self.removed = gpus, list[Actor](), None, 0
        self.reserves, self.broken = reserves, False

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Ray:
        exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
        ray, util, strategies = ModuleType("ray"), ModuleType("ray.util"), ModuleType("ray.util.scheduling_strategies")
        strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
            placement_group_bundle_index
        )
        util.placement_group, util.remove_placement_group = self._reserve, self._remove
        for name, value in {
            "exceptions": exceptions,
            "util": util,
            "is_initialized": lambda: True,
            "nodes": self._nodes,
            "get_runtime_context": lambda: SimpleNamespace(get_node_id=lambda: "0"),
            "remote": lambda kind: SimpleNamespace(
                options=lambda **of: SimpleNamespace(remote=lambda: self._actor(kind, of))
            ),
            "get": lambda answer, timeout: answer(),
            "kill": lambda actor: setattr(actor, "killed", True),
        }.items():
            setattr(ray, name, value)
        for name, module in {"ray": ray, "ray.util": util, "ray.util.scheduling_strategies": strategies}.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self

    def _nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "Alive": True,
                "NodeID": str(number),
                "NodeManagerAddress": "127.0.0.1",
                "Resources": {"CPU": 2.0, "GPU": gpus},
            }
            for number, gpus in enumerate(self.gpus)
        ]

    def _actor(self, kind: Any, options: dict[str, Any]) -> Actor:
        if self.broken:
            raise RayError("a long story\nno space left on node 3")
        self.actors.append(Actor(kind(), options))
        return self.actors[-1]

    def _reserve(self, bundles: list[dict[str, float]]) -> Any:
        self.bundles = bundles
        return SimpleNamespace(wait=lambda seconds: self.reserves)

    def _remove(self, group: Any) -> None:
        self.removed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray([8.0, 4.0]).installed(monkeypatch)


@pytest.fixture
def launcher(ray: Ray, tmp_path: Path) -> Iterator[RayLauncher]:
    with ray_launcher(tmp_path, 4, 2, (1.0, 2.0), shared=True) as made:
        ray.actors.clear()  # of the look for the directory
        yield made
        for actor in ray.actors:
            actor.killed = actor.hung = False
            actor.made.kill()


def until_it_ends(process: RayProcess) -> int:
    until = time.monotonic() + 20
    while (code := process.code()) is None and time.monotonic() < until:
        time.sleep(0.02)
    assert code is not None
    return code


def said(process: RayProcess) -> str:
    until = time.monotonic() + 20
    while not (text := process.log.read_text()[process.began :]) and time.monotonic() < until:
        time.sleep(0.02)
    return text


def test_a_process_runs_as_on_one_machine(ray: Ray, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "the driver's")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    process = launcher.start("server_1", Command([sys.executable, "-c", WAITS, "{host}:{port}"]), 2.0)
    assert process.address.startswith("127.0.0.1:")
    assert said(process) == f"{process.address} the driver's 3\n"
    assert ray.actors[0].options == {"num_cpus": 0.01, "num_gpus": 2.0, "scheduling_strategy": 2}
    assert process.code() is None
    process.ask()
    assert until_it_ends(process) == 5

    again = launcher.start(
        "server_1", Command([sys.executable, "-c", WAITS, "{port}"], {"GIVEN": "{port}"}), 2.0, process.address
    )
    assert again.address == process.address
    port = process.address.rpartition(":")[2]
    assert said(again) == f"{port} {port} 3\n", "after the log of the first"
    again.kill()
    assert again.code() == 128 + 9
    assert ray.actors[1].killed, "its GPUs are free"
    elsewhere = launcher.start(
        "train_3", Command([sys.executable, "-c", "import sys; sys.exit(3)"]), 1.0, "10.0.0.7:99"
    )
    assert ray.actors[2].options["scheduling_strategy"] == 0
    assert elsewhere.address != "10.0.0.7:99"
    assert until_it_ends(elsewhere) == 3
    elsewhere.end()
    assert elsewhere.code() == 3


def test_an_actor_that_is_killed_has_ended_and_one_that_hangs_may_go_on(ray: Ray, launcher: RayLauncher) -> None:
    command = Command([sys.executable, "-c", WAITS, "x"])
    hung, killed = launcher.start("server_0", command, 0.0), launcher.start("server_1", command, 0.0)
    assert said(hung)
    ray.actors[0].hung = ray.actors[1].killed = True
    assert hung.code() is None
    assert killed.code() == 128 + 9
    ray.actors[0].hung = False
    hung.end()
    assert hung.code() == 5, "it was asked first"
    ray.broken = True
    with pytest.raises(InfrastructureError, match=r"Ray cannot start server_0: no space left on node 3"):
        launcher.start("server_0", command, 0.0)


def test_gpus_are_reserved_for_all_ranks_on_one_node_and_for_each_engine(ray: Ray, launcher: RayLauncher) -> None:
    assert ray.bundles == [{"CPU": 0.04, "GPU": 4.0}, {"CPU": 0.01, "GPU": 2.0}, {"CPU": 0.01, "GPU": 2.0}]


@pytest.mark.parametrize(
    ("nodes", "of_ranks", "engines", "of_engine", "message"),
    [
        ([8.0], 4.0, 2, 2.0, None),
        ([4.0, 2.0, 2.0], 4.0, 2, 2.0, None),
        ([0.0], 0.0, 2, 0.0, None),
        (
            [4.0, 2.0],
            4.0,
            2,
            2.0,
            "4 GPUs of one node to train on and 2 engines of 2 are 8 GPUs, .* cluster have 4 and 2; lower",
        ),
        ([2.0] * 4, 4.0, 2, 2.0, "4 GPUs of one node .* cluster have 2 and 2 and 2 and 2; lower"),
        ([], 1.0, 1, 1.0, "cluster have none"),
    ],
)
def test_what_a_cluster_lacks_is_named(
    nodes: list[float],
    of_ranks: float,
    engines: int,
    of_engine: float,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = lacking(nodes, of_ranks, engines, of_engine)
    assert (found is None) == (message is None)
    if message is not None:
        made = Ray(nodes).installed(monkeypatch)
        each = of_ranks, of_engine
        with pytest.raises(UserError, match=message), ray_launcher(Path(), 1, engines, each, shared=True):
            pass
        assert (made.bundles, made.actors) == (None, []), "before anything is reserved or started"


def test_a_cluster_that_is_busy_or_shares_no_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Ray([8.0], reserves=False).installed(monkeypatch)
    with (
        pytest.raises(UserError, match=r"could not reserve 8 GPUs within 60 s"),
        ray_launcher(Path(), 4, 2, (1.0, 2.0), True),
    ):
        pass
    assert busy.removed == 1
    Ray([8.0, 8.0]).installed(monkeypatch)
    with (
        pytest.raises(UserError, match=r"has several nodes; name a directory"),
        ray_launcher(Path(), 4, 2, (1.0, 2.0), False),
    ):
        pass


def test_a_node_that_does_not_see_the_directory_of_the_run_is_named(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ray_launcher(tmp_path / "run/engines", 4, 2, (1.0, 2.0), True):
        assert [actor.options["scheduling_strategy"] for actor in ray.actors] == [0, 1, 2]
        assert all(actor.killed for actor in ray.actors)
        assert list((tmp_path / "run/engines").iterdir()) == []
    monkeypatch.setattr(Keeper, "sees", lambda _, path: (len(ray.actors) < 5, "far"))
    with (
        pytest.raises(
            UserError, match=rf"node far of the Ray cluster does not see {tmp_path}/run/engines, .* run.directory"
        ),
        ray_launcher(tmp_path / "run/engines", 4, 2, (1.0, 2.0), True),
    ):
        pass
    assert (ray.removed, len(ray.actors)) == (2, 5)


def test_without_ray_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UserError, match=r'placement.launcher = "ray" needs Ray: pip install'),
        ray_launcher(Path(), 1, 1, (0.0, 0.0), True),
    ):
        pass
    assert "RAY_ADDRESS" not in os.environ


def test_a_port_that_a_killed_process_still_has_is_waited_for(ray: Ray, launcher: RayLauncher) -> None:
    port = free_port()
    holds = "import socket, sys, time\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\ntime.sleep(1.5)"
    first = launcher.start("server_0", Command([sys.executable, "-c", holds, "{port}"]), 0.0, f"127.0.0.1:{port}")
    until = time.monotonic() + 20
    while not _listens(port) and time.monotonic() < until:
        time.sleep(0.02)
    second = launcher.start("server_0", Command([sys.executable, "-c", holds, "{port}"]), 0.0, first.address)
    assert until_it_ends(first) == until_it_ends(second) == 0, "the second one could listen there"


@pytest.mark.parametrize("shown", [True, False])
def test_a_rank_that_is_shown_its_gpu_alone_takes_it(
    ray: Ray, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    taken = list[Any]()

    def begin(backend: str, **_: object) -> None:
        taken.append(backend)
        raise InterruptedError

    prints = [sys.executable, "-c", "import os\nprint(os.environ.get('NMOE_OWN_GPU'), flush=True)"]
    own = said(launcher.start("train_1", Command(prints), 1.0 if shown else 0.0)).strip()
    assert own == ("1" if shown else "None")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "NMOE_OWN_GPU": own}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr(join, "_meet", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", begin)
    with pytest.raises(InterruptedError):
        join.join([])
    assert taken == ([0, "cpu:gloo,cuda:nccl"] if shown else ["gloo"])


@pytest.mark.parametrize(
    ("by", "asked", "gpus", "device"),
    [
        ("ray", "auto", [0.0, 8.0], "cuda"),
        ("ray", "auto", [0.0], "cpu"),
        ("ray", "cuda", [8.0], "cuda"),
        ("ray", "cpu", [8.0], "cpu"),
        ("local", "auto", [8.0], "cpu"),
    ],
)
def test_the_device_is_the_clusters_not_the_drivers(
    by: str, asked: str, gpus: list[float], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ray(gpus).installed(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # on the driver's machine
    config: Any = SimpleNamespace(placement=SimpleNamespace(launcher=by), model=SimpleNamespace(device=asked))
    assert parent.device_of(config).type == device


def _listens(port: int) -> bool:
    return any(f":{port:04X} 00000000:0000 0A" in line for line in Path("/proc/net/tcp").read_text().splitlines())
