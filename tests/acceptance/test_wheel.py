"""The package as it is installed: what its wheel holds, and what runs from it in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index"]

# The speedrun's first stage on a few documents and without the verifier's, with the settings of all stages loaded; and a step of
# its second.
SPEEDRUN = """
import sys
from importlib import import_module
from pathlib import Path

from nmoe.config.loader import load_run
from nmoe.config.commands import PretrainConfig
from nmoe.recipes.pretrain import pretrain

speedrun = import_module("nmoe.speedrun.scratch")
speedrun.TOKENIZER_DOCUMENTS, speedrun.CORPUS_DOCUMENTS, speedrun.TOOL_DOCUMENTS = 200, 200, 20
speedrun.write_domain = lambda out, seed: None
out = Path("out")
out.mkdir()
speedrun.Scratch(out, 0, True, False)
print(speedrun.Scratch(out, 0, False, False).tokenizer_and_corpus()["documents"])
values = {
    "run.directory": "out", "run.steps": 1, "optimizer.warmup_steps": 0, "data.held_out_documents": 20,
    "model.tokenizer": "out/tokenizer", "data.documents": "out/corpus.jsonl",
}
config = load_run(Path("speedrun_base"), PretrainConfig, [f"--{key}={value}" for key, value in values.items()])
print(pretrain(config))
print("slow imports:", {"torch._dynamo", "torch.distributed.fsdp", "scipy.stats"} & set(sys.modules))
print({module.__file__ for name, module in sys.modules.items() if name.startswith("nmoe") and module.__file__})
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, in which the build leaves its files."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "nmoe", source / "nmoe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", made, source], check=True)
    (built,) = made.glob("nmoe-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    subprocess.run([*PIP, "install", *OFFLINE, "--target", site, wheel], check=True)
    return site


@pytest.fixture
def installed(site: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a program in an empty folder with the installed package instead of the checkout; returns what it prints."""

    def installed(*command: str | Path) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return installed


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    """Sources of the kernels, environments with their data, configurations, and the mark that the package has types, too."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("nmoe/")}
    assert held == {
        str(path.relative_to(ROOT))
        for path in (ROOT / "nmoe").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        "nmoe/py.typed",
        "nmoe/model/ops/cpu/products.cpp",
        "nmoe/packaged/configs/sort_grpo.toml",
        "nmoe/packaged/environments/code_fix.toml",
    } <= held


# documented: nmoe env list
# documented: nmoe env show code_fix
# documented: nmoe config list
# documented: nmoe config show sort_grpo
# documented: nmoe config show speedrun
# documented: nmoe config show sft
# documented: nmoe speedrun --help
def test_the_installed_commands_need_no_checkout(installed: Callable[..., str], site: Path, tmp_path: Path) -> None:
    nmoe = site / "bin/nmoe"
    environments = installed(nmoe, "env", "list").splitlines()
    assert {"skills", "sort", "code_fix"} <= {line.split()[0] for line in environments}
    assert [line for line in environments if "cannot be used" in line] == []
    assert "nmoe rl train sort_grpo" in installed(nmoe, "config", "list")
    assert installed(nmoe, "speedrun", "--help").startswith("Usage: nmoe speedrun ")
    (tmp_path / "mine.toml").write_text(installed(nmoe, "config", "show", "sort_grpo"))
    load = (
        "from pathlib import Path; from nmoe.config.loader import load_run; from nmoe.config.commands import RLConfig\n"
    )
    load += "run = load_run(Path('mine.toml'), RLConfig); print(run.run.name, run.run.steps, run.environment.env_id)"
    assert installed(sys.executable, "-c", load) == "sort_grpo 100 sort\n"
    for name in ("sft", "speedrun"):
        shown = installed(nmoe, "config", "show", name)
        assert (
            shown.partition("\n[")[0] == (ROOT / f"nmoe/packaged/configs/{name}.toml").read_text().partition("\n[")[0]
        )
    (tmp_path / "own.toml").write_text(installed(nmoe, "env", "show", "code_fix"))
    load = "import nmoe.config.loader as e; print(e.load_environment(e.Path('own.toml')).env_id, e.__file__)"
    assert installed(sys.executable, "-c", load) == f"code_fix {site}/nmoe/config/loader.py\n"


def test_the_installed_speedrun_starts(installed: Callable[..., str], site: Path) -> None:
    lines = installed(sys.executable, "-c", SPEEDRUN).splitlines()
    assert {"200", "out/base"} <= set(lines)
    # What one process has no use for would make every training start seconds later.
    assert "slow imports: set()" in lines
    assert f"{site}/nmoe/speedrun/scratch.py" in lines[-1]
    assert str(ROOT / "nmoe") not in lines[-1]


def test_the_loop_of_the_readme_learns_in_an_installed_package(installed: Callable[..., str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (line,) = installed(sys.executable, "-c", code).splitlines()
    shares = [float(share) for share in line.partition(": ")[2].split()]
    assert len(shares) == 8
    assert shares[0] < 0.2
    assert shares[-1] > 0.9
