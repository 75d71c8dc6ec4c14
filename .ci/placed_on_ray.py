"""Trains with engines on a Ray cluster of this machine, once undisturbed and once with an engine's actor killed:

    .venv-ray/bin/python .ci/placed_on_ray.py CONFIG [OVERRIDE...]

The runs are `placed_ray` and `placed_ray_killed`, to be compared with the same run by the local launcher. A cluster without GPUs
has to be refused where some are asked for.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import ray

from nmoe.cluster.parent import run_placed
from nmoe.cluster.ray import RayLauncher, RayProcess, ray_launcher
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import find_configuration
from nmoe.errors import UserError
from nmoe.recipes.setup import run_path
from nmoe.runs.ledger import read_lines

STEPS_BEFORE = 2


def trained(name: str, config: str, overrides: list[str], kills: bool) -> None:
    """Trains one run. Ends the process if an engine's actor is killed and not started again."""
    given = [*overrides, "--placement.launcher=ray", f"--run.name={name}"]
    file = find_configuration(config)
    settings = load_run(file, RLConfig, given)
    metrics, started = run_path(settings) / "metrics.jsonl", list[tuple[str, RayProcess]]()
    start = RayLauncher.start

    def noted(self: RayLauncher, role: str, *rest: object) -> RayProcess:
        process = start(self, role, *rest)  # type: ignore[arg-type]
        started.append((role, process))
        return process

    def kill() -> None:
        while not metrics.exists() or len(read_lines(metrics)) < STEPS_BEFORE:
            time.sleep(0.05)
        ray.kill(dict(started)["server_0"]._actor)

    with patch.object(RayLauncher, "start", noted):
        if kills:
            threading.Thread(target=kill, daemon=True).start()
        run_placed(settings, file, given)
    roles = [role for role, _ in started]
    print(f"{name}: started {', '.join(roles)}")
    if roles.count("server_0") != 1 + kills or roles.count("train_0") != 1:
        sys.exit(f"{name}: a killed engine is started once more, and nothing else is")


def main() -> None:
    config, *overrides = sys.argv[1:]
    # A machine without a network has no address that Ray finds by itself.
    ray.init(_node_ip_address="127.0.0.1", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with ray_launcher(Path(), 4, 2, (1.0, 2.0), True):
            sys.exit("a cluster without GPUs was taken for one of 8")
    except UserError as error:
        print(f"refused: {error}")
    trained("placed_ray", config, overrides, False)
    trained("placed_ray_killed", config, overrides, True)


if __name__ == "__main__":
    main()
