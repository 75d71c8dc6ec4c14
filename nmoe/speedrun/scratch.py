"""The speedrun of a new model: tokenizer, corpus, pretraining, reinforcement learning, evaluation and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter

from nmoe.config.commands import PretrainConfig, RLConfig, SelfplayConfig, SFTConfig, VerifierConfig
from nmoe.config.packaged import CONFIGS, ENVIRONMENTS
from nmoe.config.tables.recipes import DataSection
from nmoe.data.prm.labelled import split_steps
from nmoe.recipes.pretrain import pretrain
from nmoe.recipes.sft import sft
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.storage import storage_errors, write_atomically
from nmoe.selfplay.loop import selfplay
from nmoe.speedrun.corpus import (
    StageDocuments,
    ToolDocuments,
    corpus_texts,
    tool_texts,
    write_conversations,
    write_corpus,
)
from nmoe.speedrun.promises import SCRATCH_PROMISES
from nmoe.speedrun.report import which_checkpoint
from nmoe.speedrun.roles import LONGEST, SHORTEST, WARM_UP
from nmoe.speedrun.scratch_report import Examination, examine, write_scratch_report
from nmoe.speedrun.stages import Figures, Pipeline, Stage, StageRecord
from nmoe.speedrun.steps import score, step_texts, write_domain, write_problems
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

_EXAMINED = "examinations.json"
_CORPUS = ("tokenizer", "corpus.jsonl", "tools.jsonl", "stages.jsonl", "prm800k", "problems.json", "sums.jsonl")


class Scratch(Pipeline):
    """The pipeline that trains a small model from random weights.

    `full` adds mid-training, fine-tuning, a verifier and self-play; it may extend a resumed pipeline that began without
    it.
    """

    promises = SCRATCH_PROMISES

    def __init__(self, out: Path, seed: int, full: bool, resume: bool, device: str = "auto") -> None:
        super().__init__(out, seed, resume, device)
        self._full = full
        self.settings = {"seed": seed, "full": full}
        # Loaded before the first stage, so that a mistake in a configuration is reported at once.
        self._base = self._load(
            CONFIGS / "speedrun_base.toml",
            PretrainConfig,
            {"model.tokenizer": str(out / "tokenizer"), "data.documents": str(out / "corpus.jsonl")},
        )
        self._rl_start = "sft" if full else "base"
        self._rl = self._load(CONFIGS / "speedrun.toml", RLConfig, {"model.path": str(out / self._rl_start)})
        if full:
            self._load_full()

    def stages(self) -> list[Stage]:
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
        mixture = self._load(
            CONFIGS / "speedrun_midtraining.toml", PretrainConfig, {"model.path": str(self._out / "base")}
        )
        sources = [
            {"name": source.name, "path": str(self._out / Path(source.path).name), "weight": source.weight}
            for source in mixture.data.sources
        ]
        self._midtraining = mixture.model_copy(
            update={"data": DataSection.model_validate(mixture.data.model_dump() | {"sources": sources})}
        )
        self._sft = self._load(
            CONFIGS / "speedrun_sft.toml",
            SFTConfig,
            {"model.path": str(self._out / "midtraining"), "records.path": str(self._out / "conversations.jsonl")},
        )
        self._verifier = self._load(
            CONFIGS / "verifier.toml",
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
            self._roles.append(self._load(CONFIGS / "selfplay_roles.toml", SFTConfig, values))
            start = f"selfplay_{name}"
        self._selfplay = self._load(
            CONFIGS / "selfplay.toml",
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
        return self._learn(self._rl)

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
        # The directory stands for RL's best checkpoint by its own validation problems: the examined model is the one that `nmoe
        # chat` loads.
        before, after = (
            examine(who, path, self._rl, ENVIRONMENTS / "skills_longer.toml", self._seed)
            for who, path in (("base", self._out / "base"), ("trained", self._out))
        )
        write_atomically(self._examinations, _EXAMINATIONS.dump_json([before, after]))
        return {"correctness of the base": before.sampled[0].value, "of the trained model": after.sampled[0].value}

    def report(self, done: Sequence[StageRecord]) -> Figures:
        before, after = _EXAMINATIONS.validate_json(self._examinations.read_bytes())
        metrics = read_metrics(self._out / "rl")
        summary: dict[str, float | int] = {
            **before.figures("base"),
            **after.figures("trained"),
            "base_format_ok": before.format_ok,
            "format_ok": after.format_ok,
            **self._course(done, metrics),
        }
        self._write_summary(summary)
        report = write_scratch_report(self._out, _COURSE[self._full], summary, done, metrics, before, after)
        print(
            f"\nheld-out correctness {summary['base_correctness']:.1%} -> {summary['trained_correctness']:.1%}, "
            f"format {summary['base_format_ok']:.1%} -> {summary['format_ok']:.1%}, "
            f"{summary['wall_s'] / 60:.1f} minutes, {summary['peak_memory_mb']:.0f} MB"
        )
        if examined := which_checkpoint(after.step, len(metrics)):
            print(examined)
        print(f"report: {report}\ntalk to it: nmoe chat {self._out}")
        return summary

    @property
    def _examinations(self) -> Path:
        return self._out / _EXAMINED


def _added_data() -> dict[str, Callable[[Path, int], None]]:
    """Returns the data files of the stages that `full` adds, each with the function that writes it from a seed."""

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
