"""Trains a checkpoint of nmoe by SkyRL, on an environment of nmoe; examples/skyrl/run.sh prepares both:

    python examples/skyrl/main_nmoe.py trainer.policy.model.path=runs/skyrl/model

config.yaml beside this file has the settings, and arguments override them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def overrides(settings: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yields settings as arguments of SkyRL: `trainer.policy.model.path="runs/skyrl/model"`."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={json.dumps(value)}"


def main() -> None:
    import ray
    import skyrl_gym
    import yaml
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    @ray.remote(num_cpus=1)
    def entrypoint(config: SkyRLTrainConfig) -> None:
        # In the process that makes the environments.
        skyrl_gym.register(id="nmoe", entry_point="nmoe.adapters.skyrl_gym:NmoeEnv")
        BasePPOExp(config).run()

    settings = yaml.safe_load(Path(__file__).with_name("config.yaml").read_text())
    config = SkyRLTrainConfig.from_cli_overrides([*overrides(settings), *sys.argv[1:]])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(entrypoint.remote(config))


if __name__ == "__main__":
    main()
