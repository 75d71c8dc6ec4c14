"""Builds examples/skyrl/config.yaml by SkyRL's own code, and has it check the batch sizes: python .ci/skyrl_config.py WHEEL

The wheel is that of `pip download --no-deps --python-version 3.12 --only-binary=:all: skyrl==0.4.0`. Its module of settings needs
omegaconf and skyrl-gym alone; the function that it asks of the engines is answered here, because those need vLLM. The function
that checks batch sizes is taken out of a module that needs Ray.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "skyrl"))

from main_nmoe import overrides  # noqa: E402

CHECKS = ("validate_batch_sizes",)


def main(wheel: str) -> None:
    folder = tempfile.mkdtemp()
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.startswith("skyrl/train/")])
    package = types.ModuleType("skyrl")
    package.__path__ = [f"{folder}/skyrl"]
    sys.modules["skyrl"] = package
    # Adapters alone are synchronised in another way.
    engines = types.ModuleType("skyrl.backends.skyrl_train.inference_servers.utils")
    engines._uses_lora_weight_sync = lambda config: False  # type: ignore[attr-defined]
    sys.modules[engines.__name__] = engines
    for name in ("skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.inference_servers"):
        sys.modules[name] = types.ModuleType(name)
    from skyrl.train.config.config import SkyRLTrainConfig  # type: ignore[import-not-found]

    settings = yaml.safe_load((ROOT / "examples/skyrl/config.yaml").read_text())
    arguments = list(overrides(settings))
    config = SkyRLTrainConfig.from_cli_overrides([*arguments, "trainer.run_name=mine"])
    assert config.trainer.run_name == "mine", "the command line overrides the file"
    for argument in arguments:
        key, _, value = argument.partition("=")
        found: Any = config
        for name in key.split("."):
            found = getattr(found, name)
        assert key == "trainer.run_name" or found == json.loads(value), f"{key} is {found!r}, and the file says {value}"
    checks = Path(folder, "skyrl/train/utils/utils.py").read_text()
    bodies = [node for node in ast.parse(checks).body if isinstance(node, ast.FunctionDef) and node.name in CHECKS]
    names: dict[str, Any] = {"SkyRLTrainConfig": SkyRLTrainConfig}
    exec(compile(ast.Module(bodies, []), "utils.py", "exec"), names)
    for name in CHECKS:
        names[name](config)
    wrong = SkyRLTrainConfig.from_cli_overrides([*arguments, "trainer.policy_mini_batch_size=96"])
    try:
        names["validate_batch_sizes"](wrong)
    except AssertionError as error:
        print(f"a batch that does not divide is refused: {error}")
    else:
        sys.exit("SkyRL's check refuses nothing")
    print(f"{len(arguments)} settings are SkyRL's, and its batch sizes fit")


if __name__ == "__main__":
    main(*sys.argv[1:])
