"""The speedrun, stage by stage: tokenizer, corpus, base, reinforcement learning, evaluation of both, report."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from nmoe.config.run import PretrainConfig, RLConfig, load_run
from nmoe.errors import UserError
from nmoe.recipes.grpo import train
from nmoe.recipes.pretrain import pretrain
from nmoe.recipes.speedrun.corpus import corpus_texts, write_corpus
from nmoe.recipes.speedrun.examination import examine
from nmoe.recipes.speedrun.report import write_speedrun_report
from nmoe.recipes.speedrun.steps import step_texts
from nmoe.recipes.speedrun.tool_corpus import ToolDocuments, tool_texts
from nmoe.runs.ledger import read_metrics
from nmoe.runs.storage import storage_errors, write_atomically
from nmoe.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
VOCABULARY = 768
TOKENIZER_DOCUMENTS = 4_000
TOKENIZER_JUDGEMENTS = 50
CORPUS_DOCUMENTS = 100_000
TOOL_DOCUMENTS = 20_000
# Marks a directory as a speedrun's own, which the next one may replace.
_MARKER = ".speedrun"


class Stages:
    """Seconds per stage, announced as they begin."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        print(f"\n== {name}", flush=True)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began
        print(f"== {name}: {self.seconds[name]:.0f} s", flush=True)


def speedrun(out: Path, seed: int) -> None:
    """Runs every stage into `out`, replacing an earlier speedrun there, and prints where the report is.

    Raises UserError where `out` holds anything else.
    """
    began = time.perf_counter()
    if find_spec("matplotlib") is None:
        raise UserError("the report needs matplotlib, which is not installed; run: pip install 'nmoe[report]'")
    _clear(out)
    here = [f"--run.directory={json.dumps(str(out))}", f"--run.seed={seed}"]
    tokenizer_directory, corpus = out / "tokenizer", out / "corpus.jsonl"
    base_config = load_run(
        ROOT / "configs/speedrun_base.toml",
        PretrainConfig,
        [
            *here,
            f"--model.tokenizer={json.dumps(str(tokenizer_directory))}",
            f"--data.documents={json.dumps(str(corpus))}",
        ],
    )
    rl_config = load_run(
        ROOT / "configs/speedrun.toml", RLConfig, [*here, f"--model.path={json.dumps(str(out / 'base'))}"]
    )
    stages = Stages()
    with stages.stage("tokenizer and corpus"), storage_errors(out):
        tools = ROOT / "environments/tools.toml"
        texts = chain(
            corpus_texts(seed, TOKENIZER_DOCUMENTS),
            tool_texts(tools, seed, TOKENIZER_DOCUMENTS // 4),
            step_texts(seed, TOKENIZER_JUDGEMENTS),
        )
        tokenizer = Tokenizer.train(texts, VOCABULARY)
        tokenizer.save(tokenizer_directory)
        write_corpus(corpus, tokenizer, seed, CORPUS_DOCUMENTS)
        ToolDocuments(tools, tokenizer).write(out / "tools.jsonl", seed, TOOL_DOCUMENTS)
        print(f"{tokenizer.vocab_size} tokens in the vocabulary, {CORPUS_DOCUMENTS:,} documents in {corpus}")
    with stages.stage("pretraining the base"):
        base = pretrain(base_config)
    with stages.stage("reinforcement learning"):
        rl = train(rl_config)
    longer = ROOT / "environments/skills_longer.toml"
    with stages.stage("evaluation"):
        before = examine(base, rl_config, longer, seed)
        after = examine(rl, rl_config, longer, seed)
    metrics = read_metrics(rl)
    measured = [row for row in metrics if "mismatch_abs_mean" in row]
    summary: dict[str, float | int] = {
        **before.figures("base"),
        **after.figures("trained"),
        "base_format_ok": before.format_ok,
        "format_ok": after.format_ok,
        "mismatch_abs_mean": max(row["mismatch_abs_mean"] for row in measured),
        "mismatch_abs_max": max(row["mismatch_abs_max"] for row in measured),
        "first_step_ppo_kl": measured[0]["ppo_kl"],
        "route_picks": sum(row.get("route_picks", 0.0) for row in measured),
        "route_flips": sum(row.get("route_flips", 0.0) for row in measured),
        "route_flip_gap_max": max(row.get("route_flip_gap_max", 0.0) for row in measured),
        "rl_steps": len(metrics),
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time(),
        "peak_memory_mb": _peak_memory_mb(),
        "seed": seed,
    }
    write_atomically(out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    report = write_speedrun_report(out, summary, stages.seconds, metrics, before, after)
    print(
        f"\nheld-out correctness {summary['base_correctness']:.1%} -> {summary['trained_correctness']:.1%}, "
        f"format {summary['base_format_ok']:.1%} -> {summary['format_ok']:.1%}, "
        f"{summary['wall_s'] / 60:.1f} minutes, {summary['peak_memory_mb']:.0f} MB"
    )
    print(f"report: {report}\ntalk to it: nmoe chat {out}")


def _clear(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a directory with --out")
    if out.exists() and any(out.iterdir()) and not (out / _MARKER).exists():
        raise UserError(f"{out}: is not empty and no speedrun made it; name another directory with --out")
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARKER).touch()
        for path in out.iterdir():
            if path.name == _MARKER:
                continue
            print(f"replacing {path}")
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _peak_memory_mb() -> float:
    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
