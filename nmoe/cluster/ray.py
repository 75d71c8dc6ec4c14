"""Starts the processes of a run on a Ray cluster, by the commands that `nmoe.engine.remote.launcher` starts on one machine.

Ray chooses the nodes, reserves their GPUs and starts an actor for each process, which keeps it as a parent does on one machine: a
process ends with its actor, and actors with the run. Weights, requests and logs do not go through Ray.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nmoe.engine.remote.launcher import Command, LocalProcess, free_port
from nmoe.errors import InfrastructureError, UserError
from nmoe.extras import how_to_install
from nmoe.parallel.join import OWN_GPU

# Ray chooses nodes by resources alone, and CPUs are no measure of these processes.
_CPUS = 0.01
# Seconds: of reserving and of starting an actor, of a call, and that a port may stay with the process that was killed there.
_RESERVE_S, _START_S, _CALL_S, _FREE_S = 60.0, 120.0, 20.0, 15.0
# Seconds until a new file has to be there on another node.
_SEEN_S = 10.0
_KILLED = 128 + 9
# Ray's choice of GPUs for a worker overrules the driver's environment.
_OF_THE_NODE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


class Keeper:
    """The actor of one process."""

    def begin(self, command: Sequence[str], env: dict[str, str], at: str, log: str, where: str) -> tuple[str, int]:
        """Starts the command in the directory `where`. Returns the address that it got, and the length of its log before."""
        import ray

        os.chdir(where)
        here = ray.get_runtime_context().get_node_id()
        host = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        earlier = at.rpartition(":")
        port = earlier[2] if earlier[0] == host else str(free_port())
        until = time.monotonic() + _FREE_S
        while _taken(host, int(port)) and time.monotonic() < until:
            time.sleep(0.1)
        placed = Command(command, env).at(host, port)
        own = {name: os.environ[name] for name in _OF_THE_NODE if name in os.environ}
        self._process = LocalProcess(placed.argv, {**placed.env, **own}, f"{host}:{port}", Path(log))
        return self._process.address, self._process.began

    def sees(self, path: str) -> tuple[bool, str]:
        """Whether this node has the file, and the node's name."""
        until = time.monotonic() + _SEEN_S
        while not (seen := Path(path).exists()) and time.monotonic() < until:
            time.sleep(0.1)
        return seen, socket.gethostname()

    def code(self) -> int | None:
        return self._process.code()

    def ask(self) -> None:
        self._process.ask()

    def end(self) -> None:
        self._process.end()

    def kill(self) -> None:
        self._process.kill()


class RayProcess:
    """A process that an actor keeps."""

    def __init__(self, actor: Any, address: str, log: Path, began: int) -> None:
        self.address, self.log, self.began = address, log, began
        self._actor = actor
        self._code: int | None = None

    def code(self) -> int | None:
        if self._code is None:
            self._code = self._call("code")
        return self._code

    def ask(self) -> None:
        self._call("ask")

    def end(self) -> None:
        self._over("end")

    def kill(self) -> None:
        self._over("kill")

    def _over(self, how: str) -> None:
        import ray

        self._call(how)
        if (code := self._call("code")) is not None:
            self._code = code
        with suppress(ray.exceptions.RayError):
            ray.kill(self._actor)  # frees its GPUs for the next one

    def _call(self, name: str) -> Any:
        """Returns an actor's answer, or None if it gives none in time. A dead actor has ended its process."""
        import ray

        if self._code is not None:
            return self._code
        try:
            return ray.get(getattr(self._actor, name).remote(), timeout=_CALL_S)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError:
            self._code = _KILLED
            return self._code


class RayLauncher:
    """Starts processes within a reservation: of GPUs on one node for all ranks that train, and of GPUs for each engine."""

    def __init__(self, logs: Path, group: Any) -> None:
        """`logs` is a directory that all nodes see."""
        self._logs, self._group = logs, group

    def start(self, role: str, command: Command, gpus: float, at: str = "") -> RayProcess:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = 0 if role.startswith("train_") else 1 + int(role.rpartition("_")[2])
        log = self._logs / f"{role}.log"
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        try:
            actor = ray.remote(Keeper).options(num_cpus=_CPUS, num_gpus=gpus, scheduling_strategy=where).remote()
            env = {**os.environ, **command.env} | ({OWN_GPU: "1"} if gpus else {})
            began = actor.begin.remote(list(command.argv), env, at, str(log), os.getcwd())
            address, length = ray.get(began, timeout=_START_S)
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InfrastructureError(f"Ray cannot start {role}: {lines[-1]}") from None
        return RayProcess(actor, address, log, length)


def gpus_of_nodes() -> list[float]:
    """Returns the number of GPUs of each node of the Ray cluster that runs, or of this machine if none does. Raises UserError if
    there is no Ray."""
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError(f'placement.launcher = "ray" needs Ray: {how_to_install("ray")}') from None
    if not ray.is_initialized():
        try:
            ray.init(log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"placement: no Ray cluster can be reached: {str(error).strip().splitlines()[0]}") from None
    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]


def _refuse_unless_seen(logs: Path, group: Any, bundles: int) -> None:
    """Raises UserError if a node of the reservation does not see the directory of logs, where its processes write and the driver
    reads."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=logs, prefix=".seen_") as file:
        for bundle in range(bundles):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actor = ray.remote(Keeper).options(num_cpus=_CPUS, num_gpus=0, scheduling_strategy=where).remote()
            try:
                seen, node = ray.get(actor.sees.remote(os.path.abspath(file.name)), timeout=_START_S)
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise InfrastructureError(f"Ray cannot look for the run's directory on a node: {lines[-1]}") from None
            finally:
                with suppress(ray.exceptions.RayError):
                    ray.kill(actor)
            if not seen:
                raise UserError(
                    f"placement: node {node} of the Ray cluster does not see {logs.absolute()}, where the driver reads; name a "
                    "run.directory that all nodes see under one path"
                )


@contextmanager
def ray_launcher(
    logs: Path, ranks: int, engines: int, gpus_each: tuple[float, float], shared: bool
) -> Iterator[RayLauncher]:
    """Reserves GPUs on the Ray cluster that runs, or on this machine if none does: on one node for all ranks that train, and for
    each engine, with `gpus_each` of a rank and of an engine. `shared` says whether weights reach other nodes. Raises UserError,
    before anything is started, if the cluster does not have them, or its nodes do not see `logs`."""
    nodes = gpus_of_nodes()
    import ray

    of_ranks, of_engine = ranks * gpus_each[0], gpus_each[1]
    if (fault := lacking(nodes, of_ranks, engines, of_engine)) is not None:
        raise UserError(f"placement: {fault}")
    if len(nodes) > 1 and not shared:
        raise UserError(
            "placement: the Ray cluster has several nodes; name a directory that all of them see in engine.shared_directory, or "
            'set engine.weights = "group"'
        )
    group = ray.util.placement_group(
        [{"CPU": _CPUS * ranks, "GPU": of_ranks}, *([{"CPU": _CPUS, "GPU": of_engine}] * engines)]
    )
    try:
        if not group.wait(_RESERVE_S):
            raise UserError(
                f"placement: Ray could not reserve {of_ranks + engines * of_engine:g} GPUs within {_RESERVE_S:.0f} s, because "
                "other jobs have them, or nodes have too few left each; wait, or lower placement.engines or learner_gpus"
            )
        if len(nodes) > 1:
            _refuse_unless_seen(logs, group, 1 + engines)
        yield RayLauncher(logs, group)
    finally:
        ray.util.remove_placement_group(group)


def lacking(nodes: Sequence[float], of_ranks: float, engines: int, of_engine: float) -> str | None:
    """Returns why nodes with so many GPUs each cannot have all ranks on one and each engine on one; None if they may."""
    wanted = of_ranks + engines * of_engine
    if sum(nodes) >= wanted and max(nodes, default=0.0) >= max(of_ranks, of_engine):
        return None
    has = " and ".join(f"{gpus:g}" for gpus in nodes) or "none"
    return (
        f"{of_ranks:g} GPUs of one node to train on and {engines} engines of {of_engine:g} are {wanted:g} GPUs, and the nodes of "
        f"the Ray cluster have {has}; lower placement.engines, tensor_parallel or learner_gpus, or add nodes"
    )


def _taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
