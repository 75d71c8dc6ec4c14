"""The import contract: rooms import downward only, and `rl` knows neither the model nor the learner."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nmoe"

LEVELS = [
    {"cli", "rl/__main__"},
    {"recipes", "eval", "serve"},
    {"rl", "runs"},
    {"learner", "engine"},
    {"model", "parallel", "text", "data"},
    {"config"},
    {"errors"},
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Of rooms on one level, those that may know each other all the same.
BESIDE = {("rl", "runs"), ("rl/__main__", "cli"), ("data", "text")} | {
    (importer, imported) for importer in LEVELS[1] for imported in LEVELS[1]
}
# Environments know tokens and the engine's protocol; what is behind it must not matter to them.
NEVER = {("rl", "model"), ("rl", "learner")}


def room_of(module: str) -> str:
    """`nmoe.rl.pools.jsonl` is in room `rl`; `nmoe.rl.__main__` is an entry point above all rooms."""
    return "rl/__main__" if module == "nmoe.rl.__main__" else module.split(".")[1]


def imported_modules(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Every module of nmoe that `source` imports, anywhere in it; relative imports are resolved from `module`."""
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
        yield from (name for name in names if name.startswith("nmoe."))


def breaches(module: str, source: str, is_package: bool = False) -> list[str]:
    """The imports of `source` that the contract forbids, as `importer -> imported`."""
    importer = room_of(module)
    found = []
    for name in imported_modules(module, source, is_package):
        imported = room_of(name)
        downward = LEVEL_OF[importer] < LEVEL_OF[imported]
        allowed = downward or importer == imported or (importer, imported) in BESIDE
        if not allowed or (importer, imported) in NEVER:
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
        ("nmoe.rl.environment", "from nmoe.model.transformer import Transformer", True),
        ("nmoe.rl.environment", "def f():\n    import nmoe.learner", True),
        ("nmoe.rl.environment", "from nmoe.engine.api import Engine", False),
        ("nmoe.rl.environment", "from nmoe.runs.ledger import Ledger", False),
        ("nmoe.rl.environment", "from nmoe.rl.problem import Problem", False),
        ("nmoe.runs.ledger", "from nmoe.rl.problem import Problem", True),
        ("nmoe.learner.learner", "from nmoe.engine.api import Engine", True),
        ("nmoe.engine.native.runner", "from nmoe.learner.packing import pack", True),
        ("nmoe.engine.native.runner", "from nmoe.model import transformer", False),
        ("nmoe.recipes.grpo", "from nmoe.eval.evaluate import evaluate", False),
        ("nmoe.recipes.grpo", "from nmoe.cli import app", True),
        ("nmoe.text.harmony", "from nmoe import model", True),
        ("nmoe.config.run", "from ..text import tokenizer", True),
        ("nmoe.config.run", "from . import base", False),
        ("nmoe.config", "from .base import Section", False),
        ("nmoe.errors", "from nmoe.config import load", True),
        ("nmoe.rl.__main__", "from nmoe.cli import rl", False),
        ("nmoe.rl.environment", "from nmoe.rl.__main__ import rl", True),
        ("nmoe.cli", "import torch\nfrom nmoe.recipes import grpo", False),
    ],
)
def test_the_check_itself(module: str, source: str, forbidden: bool) -> None:
    assert bool(breaches(module, source, is_package=module == "nmoe.config")) is forbidden
