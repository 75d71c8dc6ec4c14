"""Writes the keys of other trainers with their defaults as JSON, from their wheels: what `nmoe config import` has to know.

pip download --no-deps trl==1.16.0 openrlhf==0.11.2 verl==0.9.1
pip download --no-deps openrlhf==0.9.3
pip download --no-deps --python-version 3.12 --only-binary=:all: skyrl==0.4.0
pip download --no-deps --python-version 3.12 --only-binary=:all: skyrl-train==0.3.1
python scripts/trainer_keys.py trl-*.whl openrlhf-*.whl verl-*.whl skyrl*.whl > tests/config/trainer_keys.json

TRL's arguments are over those of the installed transformers.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

_TRL = {
    "grpo": ("trainer/grpo_config.py:GRPOConfig", "scripts/grpo.py:GRPOScriptArguments"),
    "rloo": ("trainer/rloo_config.py:RLOOConfig", "scripts/rloo.py:RLOOScriptArguments"),
    "sft": ("trainer/sft_config.py:SFTConfig",),
    "dpo": ("trainer/dpo_config.py:DPOConfig",),
    "reward": ("trainer/reward_config.py:RewardConfig",),
}
_TRL_SHARED = (
    "trainer/base_config.py:_BaseConfig",
    "scripts/utils.py:ScriptArguments",
    "scripts/utils.py:DatasetMixtureConfig",
    "trainer/model_config.py:ModelConfig",
)
_OPENRLHF = {"ppo": "train_ppo_ray", "sft": "train_sft", "dpo": "train_dpo", "rm": "train_rm"}


def value_of(node: ast.expr | None) -> Any:
    """Returns a default as JSON has it: what is computed is given as its source."""
    if node is None:
        return None
    if isinstance(node, ast.Lambda):
        return value_of(node.body)
    try:
        found = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return list(found) if isinstance(found, tuple) else found


def fields_of(source: str, name: str) -> dict[str, Any]:
    """Returns the fields of a dataclass with their defaults."""
    (found,) = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == name]
    fields: dict[str, Any] = {}
    for one in found.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        default = one.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
            given = [word.value for word in default.keywords if word.arg in ("default", "default_factory")]
            default = given[0] if given else None
        fields[one.target.id] = value_of(default)
    return fields


def trl(wheel: zipfile.ZipFile) -> Iterator[tuple[str, dict[str, Any]]]:
    def of(named: str) -> dict[str, Any]:
        path, _, name = named.partition(":")
        return fields_of(wheel.read(f"trl/{path}").decode(), name)

    spec = find_spec("transformers")
    assert spec is not None, "an installed transformers"
    assert spec.origin is not None, "a package with a file"
    shared = fields_of((Path(spec.origin).parent / "training_args.py").read_text(), "TrainingArguments")
    for named in _TRL_SHARED:
        shared |= of(named)
    for program, classes in _TRL.items():
        own: dict[str, Any] = {}
        for named in classes:
            own |= of(named)
        yield f"trl {program}", shared | own


def openrlhf(wheel: zipfile.ZipFile) -> Iterator[tuple[str, dict[str, Any]]]:
    for program, file in _OPENRLHF.items():
        (path,) = [one for one in wheel.namelist() if one.endswith(f"openrlhf/cli/{file}.py")]
        keys: dict[str, Any] = {}
        for one in ast.walk(ast.parse(wheel.read(path).decode())):
            if not isinstance(one, ast.Call) or not ast.unparse(one.func).endswith("add_argument"):
                continue
            words = {word.arg: word.value for word in one.keywords}
            is_switch = "action" in words and value_of(words["action"]) == "store_true"
            default = value_of(words.get("default")) if "default" in words else False if is_switch else None
            text = ast.unparse(one.args[0])
            for prefix in ("actor", "critic") if "{prefix}" in text else ("",):
                name = text.replace("{prefix}", prefix).lstrip("f").strip("'\"").lstrip("-")
                # Of both the actor's and the critic's: the only default that differs.
                keys[name] = (1e-6 if prefix == "actor" else 9e-6) if name.endswith(".adam.lr") and prefix else default
        yield f"openrlhf {program}", keys


def leaves(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*above, str(key)))
    else:
        # YAML reads 1e-3 as text.
        is_number = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?e-?\d+", value)
        yield ".".join(above), float(value) if is_number else value


def verl(wheel: zipfile.ZipFile) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = "verl/trainer/config/"
    ppo = dict(leaves(yaml.safe_load(wheel.read(f"{folder}_generated_ppo_trainer.yaml"))))
    yield "verl ppo", {key: value for key, value in ppo.items() if "_target_" not in key}
    sft = yaml.safe_load(wheel.read(f"{folder}sft_trainer_engine.yaml"))
    optimizer = yaml.safe_load(wheel.read(f"{folder}optim/fsdp.yaml"))
    found = dict(leaves({**sft, "optim": optimizer}))
    yield "verl sft", {key: value for key, value in found.items() if "_target_" not in key and key != "defaults"}


def skyrl(wheel: zipfile.ZipFile) -> Iterator[tuple[str, dict[str, Any]]]:
    if "skyrl_train/config/ppo_base_config.yaml" in wheel.namelist():
        found = yaml.safe_load(wheel.read("skyrl_train/config/ppo_base_config.yaml"))
        yield "skyrl", {key: value for key, value in leaves(found) if key != "defaults"}
        return
    source = wheel.read("skyrl/train/config/config.py").decode()
    classes = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)}

    def below(name: str, above: str, own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the keys of a class; `own` are the defaults that the class above gives it."""
        defaults = fields_of(source, name) | own
        for one in classes[name].body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                kind = ast.unparse(one.annotation).removeprefix("Optional[").removesuffix("]")
                key = f"{above}.{one.target.id}".lstrip(".")
                if kind in classes and kind != "SearchEnvConfig":
                    calls = (node for node in ast.walk(one) if isinstance(node, ast.Call))
                    given = [word for call in calls if ast.unparse(call.func) == kind for word in call.keywords]
                    yield from below(kind, key, {str(word.arg): value_of(word.value) for word in given})
                else:
                    yield key, defaults[one.target.id]

    yield "skyrl", dict(below("SkyRLTrainConfig", "", {}))


def main() -> int:
    readers = {"trl": trl, "openrlhf": openrlhf, "verl": verl, "skyrl": skyrl, "skyrl_train": skyrl}
    found: dict[str, dict[str, Any]] = {}
    for path in map(Path, sys.argv[1:]):
        name, version = path.name.split("-")[:2]
        with zipfile.ZipFile(path) as wheel:
            for program, keys in readers[name](wheel):
                found[f"{program} of {name} {version}"] = keys
    lines = [f"{json.dumps(name)}: {json.dumps(keys, default=str)}" for name, keys in sorted(found.items())]
    print("{\n" + ",\n".join(lines) + "\n}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
