"""Holds rounds of the referee over vLLM with nmoe's plugin, where it may find nothing, and over vLLM whose plugin lacks one of its
repairs, where it has to name what this corrupts:

    python .ci/referee_vllm.py VLLM_PYTHON [--rounds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import vllm_server
from check_publishing import DENSE, OPTIONS, SHAPE, drawn
from vllm_server import KEY, serving

from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.referee.command import judge_of
from nmoe.referee.report import details_of, line_of, summary_of
from nmoe.referee.rounds import Round, hold

PLUGIN = Path(__file__).parents[1] / "plugins/vllm/nmoe_vllm"
# Widths that fill the blocks in which vLLM packs experts.
MOE = {"experts": 4, "experts_per_token": 2, "expert_width": 64}
# Model, and the fault that each repair of the plugin, in their order in its file, prevents.
HEALED = (("experts, untied", MOE, False), ("dense, tied", DENSE, True))
WITHOUT = (
    (0, "experts_unpacked", "experts, untied", MOE, False),
    (1, "tied_head_stale", "dense, tied", DENSE, True),
)


def plugin_without(repair: int, directory: Path) -> Path:
    """Writes the plugin without one of the repairs that it makes on a CPU, and returns the directory to import it from."""
    shutil.copytree(PLUGIN, directory / "nmoe_vllm")
    file = directory / "nmoe_vllm/loading.py"
    before, first, second = file.read_text().split("    if on_cpu:\n")
    ifs = ["    if on_cpu:\n"] * 2
    ifs[repair] = "    if False:\n"
    file.write_text(before + ifs[0] + first + ifs[1] + second)
    return directory


def rounds(python: str, scratch: Path, blocks: dict[str, int], tied: bool, seeds: range) -> list[Round]:
    """Serves a model with drawn weights, and returns the rounds."""
    model = scratch / f"model_{time.time_ns()}"
    export_model(drawn(ModelConfig(**SHAPE, **blocks, tie_embeddings=tied)), model)
    judge, _ = judge_of(model, "float32")
    held = []
    with serving(python, model, scratch / "vllm.log", *OPTIONS) as server:
        for seed in seeds:
            cpu = time.process_time()
            url = f"http://127.0.0.1:{server.port}"
            held.append(asyncio.run(hold(url, judge, seed=seed, key=KEY, publish=True)))
            for outcome in held[-1].outcomes:
                if outcome.state in ("fault", "late") or seed == seeds[0]:
                    print("\n".join([line_of(outcome), *details_of(outcome)]), flush=True)
            print(f"{time.process_time() - cpu:.1f} CPU s;", "; ".join(summary_of(held[-1])), flush=True)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for repair, fault, name, blocks, tied in WITHOUT:
            vllm_server.ENVIRONMENT["PYTHONPATH"] = str(plugin_without(repair, place / f"plugin_{repair}"))
            (round_,) = rounds(options.python, place, blocks, tied, range(1))
            named = [found for found, _ in round_.faults()]
            print(f"vLLM without a repair, {name}: {', '.join(named) or 'nothing'}; {fault} is right", flush=True)
            wrong += named[:1] != [fault]
        del vllm_server.ENVIRONMENT["PYTHONPATH"]
        for number, (name, blocks, tied) in enumerate(HEALED):
            seeds = range(number, options.rounds, len(HEALED))
            held = rounds(options.python, place, blocks, tied, seeds)
            alarms = sum(bool(one.faults()) for one in held)
            late = sum(outcome.state == "late" for one in held for outcome in one.outcomes)
            print(
                f"vLLM with the plugin, {name}: {alarms} false alarms, {late} late checks in {len(held)} rounds",
                flush=True,
            )
            wrong += alarms
    sys.exit(wrong > 0)


main()
