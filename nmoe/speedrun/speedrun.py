"""The speedrun, stage by stage: tokenizer, corpus, base, reinforcement learning, evaluation of both, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from nmoe.config.commands import load_run
from nmoe.config.commands.base import RunConfig
from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.selfplay import SelfplayConfig
from nmoe.config.commands.supervised import PretrainConfig, SFTConfig, VerifierConfig
from nmoe.config.packaged import CONFIGS, ENVIRONMENTS
from nmoe.config.tables.documents import DataSection
from nmoe.data.prm.labelled import split_steps
from nmoe.errors import ShortfallError, UserError
from nmoe.extras import how_to_install
from nmoe.model.device import choose_device
from nmoe.model.ops.table import make_ready
from nmoe.recipes.pretrain import pretrain
from nmoe.recipes.sft import sft
from nmoe.rl.train import train
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.storage import storage_errors, write_atomically
from nmoe.selfplay.loop import selfplay
from nmoe.speedrun.corpus import corpus_texts, write_conversations, write_corpus
from nmoe.speedrun.examination import Examination, examine
from nmoe.speedrun.promises import PROMISES, shortfalls
from nmoe.speedrun.report import which_checkpoint, write_speedrun_report
from nmoe.speedrun.roles import LONGEST, SHORTEST, WARM_UP
from nmoe.speedrun.stage_corpus import StageDocuments
from nmoe.speedrun.stages import Stage, StageRecord, Stages
from nmoe.speedrun.steps import score, step_texts, write_domain, write_problems
from nmoe.speedrun.tool_corpus import ToolDocuments, tool_texts
from nmoe.text.tokenizer import Tokenizer
from nmoe.verifier.train import verifier

VOCABULARY = 768
TOKENIZER_DOCUMENTS = 4_000
TOKENIZER_JUDGEMENTS = 50
CORPUS_DOCUMENTS = 90_000
TOOL_DOCUMENTS = 20_000
STAGE_DOCUMENTS = 3_000
CONVERSATIONS = 10_000
SELFPLAY_PROBLEMS = 1_000

REPORTS = ("summary.json", "report.md", "plots")
_EXAMINED = "examinations.json"
_CORPUS = ("tokenizer", "corpus.jsonl", "tools.jsonl", "stages.jsonl", "prm800k", "problems.json", "sums.jsonl")

C = TypeVar("C", bound=RunConfig)
Figures = Mapping[str, float | int]


def speedrun(
    out: Path, seed: int, full: bool = False, resume: bool = False, device: str = "auto", replace: bool = False
) -> None:
    """Runs every stage into `out` and prints where the report is. It replaces what an earlier speedrun made there or, with
    `resume`, finishes it. `full` adds the stages of the whole pipeline (`Pipeline.stages`), also to one that is resumed and began
    without them. Of other things that are in the way, `replace` deletes those that bear the name of a stage (`Stages`).

    Raises UserError where `out` is no directory of a speedrun, where another process writes what is to be replaced, where something
    else is in the way, where there is nothing to resume, and for a device that is not there; ShortfallError where all stages are
    done but a promise is broken.
    """
    if find_spec("matplotlib") is None:
        raise UserError(f"the report needs matplotlib, which is not installed; run: {how_to_install('report')}")
    make_ready(choose_device(device, "--device"))  # said before anything is made
    pipeline = Pipeline(out, seed, full, resume, device)
    with Stages(out, pipeline.stages(), {"seed": seed, "full": full}, resume, replace, REPORTS) as stages:
        stages.run()
        summary = stages.report(lambda: pipeline.report(stages.done))
    if missed := shortfalls(summary, str(out)):
        raise ShortfallError("\n".join(["this speedrun fell short of what it promises:", *missed]))
    print(f"all {len(PROMISES)} promises are kept (nmoe/speedrun/promises.py)")


class Pipeline:
    """The work of the stages, in the directory `out`; with `resume`, runs continue from their checkpoints."""

    def __init__(self, out: Path, seed: int, full: bool, resume: bool, device: str = "auto") -> None:
        self._out = out
        self._seed, self._device = seed, device
        self._full = full
        self._resume = resume
        # Loaded before the first stage, so that a mistake in a configuration is reported at once.
        self._base = self._load(
            "speedrun_base",
            PretrainConfig,
            {"model.tokenizer": str(out / "tokenizer"), "data.documents": str(out / "corpus.jsonl")},
        )
        self._rl_start = "sft" if full else "base"
        self._rl = self._load("speedrun", RLConfig, {"model.path": str(out / self._rl_start)})
        if full:
            self._load_full()

    def stages(self) -> list[Stage]:
        """The stages of `nmoe speedrun` in order, including those that --full adds."""
        start, roles = self._rl_start, [f"selfplay_{name}" for name in WARM_UP]
        stages = [
            (Stage("tokenizer and corpus", self.tokenizer_and_corpus, _CORPUS), False),
            (Stage("data of the added stages", self.added_data, tuple(_added_data())), True),
            (Stage("pretraining the base", self.base, ("base",)), False),
            (Stage("mid-training on a mixture", self.midtraining, ("midtraining",)), True),
            (Stage("supervised fine-tuning", self.fine_tuning, ("sft",)), True),
            (Stage("reinforcement learning", self.reinforcement_learning, ("rl",), start), False),
            (Stage("training a verifier of steps", self.verifier, ("verifier",)), True),
            (Stage("teaching the roles of self-play", self.roles, tuple(roles)), True),
            (Stage("a round of self-play", self.round, ("selfplay",)), True),
            (Stage("evaluation", self.evaluation, (_EXAMINED,), start), False),
        ]
        return [stage for stage, added in stages if self._full or not added]

    def _load_full(self) -> None:
        mixture = self._load("speedrun_midtraining", PretrainConfig, {"model.path": str(self._out / "base")})
        sources = [
            {"name": source.name, "path": str(self._out / Path(source.path).name), "weight": source.weight}
            for source in mixture.data.sources
        ]
        self._midtraining = mixture.model_copy(
            update={"data": DataSection.model_validate(mixture.data.model_dump() | {"sources": sources})}
        )
        self._sft = self._load(
            "speedrun_sft",
            SFTConfig,
            {"model.path": str(self._out / "midtraining"), "records.path": str(self._out / "conversations.jsonl")},
        )
        self._verifier = self._load(
            "verifier",
            VerifierConfig,
            {"model.path": str(self._out / "base"), "verifier.prm800k": str(self._out / "prm800k")},
        )
        self._roles, start = [], "base"
        for name, (_, _, tokens, rate) in WARM_UP.items():
            values: dict[str, str | int | float] = {
                "run.name": f"selfplay_{name}",
                "model.path": str(self._out / start),
                "records.path": str(self._out / f"selfplay_{name}.jsonl"),
                "records.tokens_per_step": tokens,
                "optimizer.learning_rate": rate,
            }
            self._roles.append(self._load("selfplay_roles", SFTConfig, values))
            start = f"selfplay_{name}"
        self._selfplay = self._load(
            "selfplay",
            SelfplayConfig,
            {
                "run.name": "selfplay",
                "model.path": str(self._out / "selfplay_roles"),
                "selfplay.problem_source": f"deepseek_math_v2_inputs:{self._out / 'selfplay_problems.json'}",
            },
        )

    def tokenizer_and_corpus(self) -> Figures:
        out, seed, tools = self._out, self._seed, ENVIRONMENTS / "tools.toml"
        with storage_errors(out):
            texts = chain(
                corpus_texts(seed, TOKENIZER_DOCUMENTS),
                tool_texts(tools, seed, TOKENIZER_DOCUMENTS // 4),
                step_texts(seed, TOKENIZER_JUDGEMENTS),
            )
            tokenizer = Tokenizer.train(texts, VOCABULARY)
            tokenizer.save(out / "tokenizer")
            write_corpus(out / "corpus.jsonl", tokenizer, seed, CORPUS_DOCUMENTS)
            ToolDocuments(tools, tokenizer).write(out / "tools.jsonl", seed, TOOL_DOCUMENTS)
            StageDocuments(ENVIRONMENTS / "five_stages.toml", tokenizer).write(
                out / "stages.jsonl", seed, STAGE_DOCUMENTS
            )
            write_domain(out, seed)
        print(f"{tokenizer.vocab_size} tokens in the vocabulary, {CORPUS_DOCUMENTS:,} documents in {out}/corpus.jsonl")
        return {"vocabulary": tokenizer.vocab_size, "documents": CORPUS_DOCUMENTS}

    def added_data(self) -> Figures:
        with storage_errors(self._out):
            for name, write in _added_data().items():
                write(self._out / name, self._seed)
        return {"conversations": CONVERSATIONS, "problems of self-play": SELFPLAY_PROBLEMS}

    def base(self) -> Figures:
        return {"held-out loss": read_metrics(pretrain(self._base))[-1]["held_out_loss"]}

    def midtraining(self) -> Figures:
        last = read_metrics(pretrain(self._midtraining))[-1]
        return {f"held-out loss, {s.label}": last[f"held_out_loss/{s.label}"] for s in self._midtraining.data.sources}

    def fine_tuning(self) -> Figures:
        return {"held-out loss": read_metrics(sft(self._sft))[-1]["held_out_loss"]}

    def reinforcement_learning(self) -> Figures:
        last = read_metrics(train(self._rl))[-1]
        return {"correctness of the last step": last["correctness"]}

    def verifier(self) -> Figures:
        last = read_metrics(verifier(self._verifier))[-1]
        return {"held-out F1": last["verifier_f1"], "accuracy of steps": last["verifier_accuracy"]}

    def roles(self) -> Figures:
        return {f"last loss, {config.run.name}": read_metrics(sft(config))[-1]["loss"] for config in self._roles}

    def round(self) -> Figures:
        accepted = read_lines(selfplay(self._selfplay) / "proof_verifier_train.jsonl")
        agreed = [line["score"] == score(line["problem"], split_steps(line["proof"])) for line in accepted]
        figures: dict[str, float | int] = {"proofs accepted": len(accepted)}
        return figures | ({"scores that an oracle agrees with": sum(agreed) / len(agreed)} if agreed else {})

    def evaluation(self) -> Figures:
        # The directory stands for RL's best checkpoint by its own validation problems: what is examined is what `nmoe chat` loads.
        before, after = (
            examine(who, path, self._rl, ENVIRONMENTS / "skills_longer.toml", self._seed)
            for who, path in (("base", self._out / "base"), ("trained", self._out))
        )
        write_atomically(self._examinations, _EXAMINATIONS.dump_json([before, after]))
        return {"correctness of the base": before.sampled[0].value, "of the trained model": after.sampled[0].value}

    def report(self, done: Sequence[StageRecord]) -> Figures:
        """Writes and prints summary and report of the stages that are done; returns the figures of the summary."""
        before, after = _EXAMINATIONS.validate_json(self._examinations.read_bytes())
        metrics = read_metrics(self._out / "rl")
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
            "wall_s": sum(stage.seconds for stage in done),
            "cpu_s": sum(stage.cpu_s for stage in done),
            "peak_memory_mb": max(stage.peak_memory_mb for stage in done),
            "seed": self._seed,
        }
        write_atomically(self._out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        report = write_speedrun_report(self._out, _COURSE[self._full], summary, done, metrics, before, after)
        print(
            f"\nheld-out correctness {summary['base_correctness']:.1%} -> {summary['trained_correctness']:.1%}, "
            f"format {summary['base_format_ok']:.1%} -> {summary['format_ok']:.1%}, "
            f"{summary['wall_s'] / 60:.1f} minutes, {summary['peak_memory_mb']:.0f} MB"
        )
        if examined := which_checkpoint(after, len(metrics)):
            print(examined)
        print(f"report: {report}\ntalk to it: nmoe chat {self._out}")
        return summary

    @property
    def _examinations(self) -> Path:
        return self._out / _EXAMINED

    def _load(self, name: str, schema: type[C], values: Mapping[str, str | int | float]) -> C:
        """Loads the packaged NAME.toml with this directory, this seed and this device."""
        own = {"run.directory": str(self._out), "run.seed": self._seed, "run.resume": "auto" if self._resume else False}
        overrides = {**own, "model.device": self._device, **values}
        arguments = [f"--{key}={json.dumps(value)}" for key, value in overrides.items()]
        return load_run(CONFIGS / f"{name}.toml", schema, arguments)


def _added_data() -> dict[str, Callable[[Path, int], None]]:
    """What the added stages learn from: the names of the files, and what writes each from a seed."""

    def roles(write: Callable[[Path, int, int], None], count: int) -> Callable[[Path, int], None]:
        return lambda path, seed: write(path, seed, count)

    def problems(path: Path, seed: int) -> None:
        write_problems(path, seed, SELFPLAY_PROBLEMS, "train", (SHORTEST, LONGEST))

    return {
        "conversations.jsonl": lambda path, seed: write_conversations(path, seed, CONVERSATIONS),
        **{f"selfplay_{name}.jsonl": roles(write, count) for name, (write, count, _, _) in WARM_UP.items()},
        "selfplay_problems.json": problems,
    }


_COURSE = {
    False: "post-trained by reinforcement learning alone from verifiable rewards",
    True: "mid-trained on a mixture, fine-tuned on conversations in good form whose answers are mostly wrong, and post-trained by "
    "reinforcement learning from verifiable rewards",
}
_EXAMINATIONS = TypeAdapter(list[Examination])
