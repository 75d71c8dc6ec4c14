"""The import contract: rooms import downward only, and none the package itself; environments and rollouts know neither the model
nor the learner."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nmoe"

LEVELS = [
    {"cli"},
    {"cluster"},
    {"adapters"},
    {"api"},
    {"referee"},
    {"serve", "dashboard"},
    {"speedrun"},
    {"preflight"},
    {"plan"},
    {"selfplay"},
    {"rl"},
    {"verifier"},
    {"recipes"},
    {"eval"},
    {"rollout"},
    {"rank_checks"},
    {"envs"},
    {"grading"},
    {"sandbox"},
    {"runs", "monitor"},
    {"web"},
    {"learner", "engine"},
    {"data"},
    {"model", "text"},
    {"parallel"},
    {"config", "trajectory", "generation"},
    {"parsing", "gguf_file", "extras", "background"},
    {"types", "errors", "statistics", "cores", "work"},
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# `python -m nmoe` and `python -m nmoe.rl` are the command line.
ENTRY_POINTS = {"nmoe.__main__": "cli", "nmoe.rl.__main__": "cli"}
# Environments and rollouts know tokens and the engine's protocol; what is behind it must not matter to them. Sandboxes and graders
# know nothing of reinforcement learning, nor of models.
NEVER = {
    (room, other) for room in ("envs", "rollout", "sandbox", "grading") for other in ("model", "learner", "parallel")
}


def room_of(module: str) -> str:
    """`nmoe.envs.pools.records` is in the room `envs`."""
    return ENTRY_POINTS.get(module, module.split(".")[1])


def imported_modules(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Every module of nmoe that `source` imports, anywhere in it, `nmoe` itself included; relative imports are resolved from
    `module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            # `from nmoe import model` imports the room, not a name of the package.
            names = [f"nmoe.{alias.name}" for alias in node.names] if base == "nmoe" else [base]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "nmoe")


def breaches(module: str, source: str, is_package: bool = False) -> list[str]:
    """The imports of `source` that the contract forbids, as `importer -> imported`."""
    importer = room_of(module)
    found = []
    for name in imported_modules(module, source, is_package):
        if name == "nmoe":  # its names are the library, which stands above the rooms
            found.append(f"{module} -> {name}")
            continue
        imported = room_of(name)
        downward = LEVEL_OF[importer] < LEVEL_OF[imported]
        if not (downward or importer == imported) or (importer, imported) in NEVER:
            found.append(f"{module} -> {name}")
    return found


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module != "nmoe":
            found.append((module, path))
    return found


def test_every_import_points_downward() -> None:
    sources = modules()
    assert len(sources) > 10, "the package was found"
    assert [
        breach for module, path in sources for breach in breaches(module, path.read_text(), path.name == "__init__.py")
    ] == []


@pytest.mark.parametrize(
    ("module", "source", "forbidden"),
    [
        ("nmoe.envs.environment", "from nmoe.model.transformer import Transformer", True),
        ("nmoe.envs.environment", "def f():\n    import nmoe.learner", True),
        ("nmoe.envs.environment", "from nmoe.engine.api import Engine", False),
        ("nmoe.envs.environment", "from nmoe.runs.ledger import Ledger", False),
        ("nmoe.envs.environment", "from nmoe.types import Problem", False),
        ("nmoe.rollout.collector", "from nmoe.learner.batch import Batch", True),
        ("nmoe.grading.regrade", "from nmoe.envs.tasks import TASKS", True),
        ("nmoe.sandbox.api", "from nmoe.grading.code import verify", True),
        ("nmoe.runs.ledger", "from nmoe.rollout.replay import replay", True),
        ("nmoe.learner.learner", "from nmoe.engine.api import Engine", True),
        ("nmoe.engine.native.runner", "from nmoe.learner.packing import pack", True),
        ("nmoe.engine.native.runner", "from nmoe.model import transformer", False),
        ("nmoe.rl.train", "from nmoe.eval.evaluate import evaluate", False),
        ("nmoe.rl.train", "from nmoe.cli import app", True),
        ("nmoe.recipes.sft", "from nmoe.rl.metrics import rollout_metrics", True),
        ("nmoe.text.harmony", "from nmoe import model", True),
        ("nmoe.cli", "import nmoe", True),
        ("nmoe.text.harmony", "from nmoe import data", True),
        ("nmoe.config.loader", "from ..text import tokenizer", True),
        ("nmoe.config.loader", "from . import base", False),
        ("nmoe.config", "from .base import Section", False),
        ("nmoe.errors", "from nmoe.config import load", True),
        ("nmoe.rl.__main__", "from nmoe.cli import rl", False),
        ("nmoe.envs.environment", "from nmoe.rl.__main__ import rl", True),
        ("nmoe.cli", "import torch\nfrom nmoe.rl import train", False),
    ],
)
def test_the_check_itself(module: str, source: str, forbidden: bool) -> None:
    assert bool(breaches(module, source, is_package=module == "nmoe.config")) is forbidden
