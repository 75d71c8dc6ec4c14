"""The pipeline of a TOML file: its stages train a tokenizer and models, and evaluate them, in order. `nmoe speedrun PIPELINE`"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nmoe.config.commands import COMMANDS, RLConfig, RunConfig
from nmoe.config.kinds import command_for
from nmoe.config.loader import load, load_environment
from nmoe.config.modes import mode_of
from nmoe.config.packaged import find_pipeline
from nmoe.config.pipeline import PipelineSettings, StageSettings
from nmoe.data.corpus import train_tokenizer
from nmoe.errors import MissingInputError, UserError
from nmoe.eval.core import core_command, find_sets
from nmoe.eval.evaluate import Asked
from nmoe.eval.sweep import compare, sweep, table, table_json
from nmoe.model.config import ModelConfig
from nmoe.model.device import return_freed_memory
from nmoe.plan.budget import Cost, costs, memory_line
from nmoe.plan.budget import table as cost_table
from nmoe.plan.estimate import shape_of
from nmoe.preflight.needs import absent, names_of_data, names_of_pools
from nmoe.preflight.preflight import refuse_to_start
from nmoe.recipes.dpo import dpo
from nmoe.recipes.pretrain import pretrain
from nmoe.recipes.reward_model import train_reward_model
from nmoe.recipes.setup import load_tokenizer
from nmoe.recipes.sft import sft
from nmoe.rl.episodes import with_steps_of_episodes
from nmoe.rl.launch import train
from nmoe.runs.ledger import read_metrics
from nmoe.runs.report import markdown_table, markdown_text, write_report
from nmoe.runs.storage import storage_errors, write_atomically
from nmoe.selfplay.loop import selfplay
from nmoe.speedrun.report import stage_table
from nmoe.speedrun.report import write_report as write_parts
from nmoe.speedrun.stages import Figures, Pipeline, Stage, StageRecord, finished
from nmoe.text.tokenizer import Tokenizer
from nmoe.verifier.train import verifier

_RECIPES: Mapping[str, Callable[[Any], Path]] = {
    "pretrain": pretrain,
    "sft": sft,
    "dpo": dpo,
    "reward": train_reward_model,
    "verifier": verifier,
    "rl train": train,
    "selfplay": selfplay,
}
_RESULTS = "results.json"
# What a resumed run may change, and where its files lie.
_NO_CHANGE: dict[str, Any] = {
    "run": {"directory", "name", "resume"},
    "sinks": True,
    "monitor": True,
    "checkpoint": True,
}
_FIGURES = {
    "held_out_loss": "held-out loss",
    "loss": "loss",
    "correctness": "correctness of the last step",
    "reward_mean": "reward of the last step",
}


class Planned(Pipeline):
    """The pipeline that a TOML file or a packaged name describes; its directory is `out` or, if that is None, the file's.

    A finished stage is repeated if its settings have changed, or a stage that it starts from is repeated. This needs
    `replace` or the user's consent.
    """

    promises = ()
    asks = True

    def __init__(self, named: str, out: Path | None, seed: int, resume: bool, device: str = "auto") -> None:
        file = find_pipeline(named)
        self._named = named
        self._planned = load(file, PipelineSettings)
        super().__init__(Path(self._planned.directory) if out is None else out, seed, resume, device)
        self.settings = {"seed": seed, "pipeline": file.stem}
        self._tokenizers = {stage.name for stage in self._planned.stage if stage.texts}
        # Loaded before the first stage, so that a mistake in a configuration is reported at once.
        self._configs = {stage.name: self._configured(stage) for stage in self._planned.stage if stage.config}

    def stages(self) -> list[Stage]:
        identities: dict[str, str] = {}
        found = []
        for stage in self._planned.stage:
            identities[stage.name] = self._identity(stage, identities)
            work = self._tokenizer if stage.texts else self._train if stage.config else self._evaluate
            found.append(Stage(stage.name, partial(work, stage), (stage.name,), identities[stage.name]))
        return found

    def run(self, replace: bool) -> None:
        """Runs the pipeline. Raises UserError, before the first stage, if data of a stage to come is missing."""
        done = finished(self._out) if self._resume else set()
        if lines := list(self._missing([stage for stage in self._planned.stage if stage.name not in done])):
            raise UserError("\n".join(lines))
        super().run(replace)

    def dry_run(self) -> Iterator[str]:
        """Yields the lines of a plan: memory and cost of each stage, and the data that is missing. Models are built on torch's meta
        device, and nothing is written."""
        planned, budget = self._planned, self._planned.machine
        yield f"{self._named}: {len(planned.stage)} stages in {self._out}; nothing is run"
        shapes: dict[str, ModelConfig] = {}
        found: list[Cost] = []
        lacking: list[str] = []
        for stage in planned.stage:
            if stage.config is None:
                continue
            config = self._configs[stage.name]
            try:
                shape = shapes[stage.name] = self._shape(stage, config, shapes)
                if isinstance(config, RLConfig) and not (
                    stage.problems_of_pool is None and list(self._missing([stage]))
                ):
                    config = with_steps_of_episodes(config, stage.problems_of_pool)
            except MissingInputError as error:
                lacking.append(f"missing: {error}")
                continue
            yield memory_line(config, shape, budget)
            found += costs(stage.name, config, shape, budget)
        yield from cost_table(found, budget)
        for stage in planned.stage:
            if stage.texts:
                vocabulary = f"{stage.vocab_size:,} tokens"
                yield f"{stage.name}: a tokenizer of {vocabulary}, from {', '.join(stage.texts)}"
            if stage.benchmarks:
                yield f"{stage.name}: {', '.join(stage.models)} on {', '.join(stage.benchmarks)}"
        yield from dict.fromkeys([*lacking, *self._missing(planned.stage)])

    def report(self, done: Sequence[StageRecord]) -> Figures:
        order = {stage.name: number for number, stage in enumerate(self._planned.stage)}
        done = sorted((one for one in done if one.name in order), key=lambda one: order[one.name])
        summary: dict[str, float | int] = {
            **{f"{stage.name}: {name}": value for stage in done for name, value in stage.figures.items()},
            "wall_s": sum(stage.seconds for stage in done),
            "cpu_s": sum(stage.cpu_s for stage in done),
            "peak_memory_mb": max(stage.peak_memory_mb for stage in done),
            "seed": self._seed,
        }
        self._write_summary(summary)
        parts = [f"# Pipeline {markdown_text(str(self.settings['pipeline']))}\n", stage_table(done)]
        for stage in self._planned.stage:
            if stage.benchmarks:
                parts += [f"## {markdown_text(stage.name)}\n", self._results(stage)]
        parts.append("## Runs\n")
        for stage in self._planned.stage:
            if stage.config:
                parts.append(
                    f"- [{markdown_text(stage.name)}]({write_report(self._out / stage.name).relative_to(self._out)})"
                )
        report = write_parts(self._out, [*parts, ""])
        print(f"\n{summary['wall_s'] / 60:.1f} minutes, {summary['cpu_s']:.0f} CPU s\nreport: {report}")
        return summary

    def _configured(self, stage: StageSettings) -> RunConfig:
        assert stage.config is not None, "a stage that trains"
        path = Path(stage.config)
        values: dict[str, str | int | float] = {"run.name": stage.name}
        if stage.start is not None:
            key = "model.tokenizer" if stage.start in self._tokenizers else "model.path"
            values[key] = str(self._out / stage.start)
        config = self._load(path, COMMANDS[command_for(path, stage.overrides)], values, stage.overrides)
        if isinstance(config, RLConfig) and config.has_parent:
            raise UserError(
                f"{stage.config}: [placement] starts processes, and a pipeline trains in its own; leave the table out, and start "
                "`nmoe speedrun` by torchrun"
            )
        return config

    def _identity(self, stage: StageSettings, earlier: Mapping[str, str]) -> str:
        """Returns a digest of the settings that the stage's result depends on."""
        own: dict[str, Any] = stage.model_dump(mode="json", exclude={"config", "overrides", "problems_of_pool"})
        if stage.config:
            own["config"] = self._configs[stage.name].model_dump(mode="json", exclude=_NO_CHANGE, exclude_none=True)
            if stage.start is not None:
                own["config"]["model"].pop("tokenizer" if stage.start in self._tokenizers else "path")
        own["from"] = [earlier[name] for name in (*([stage.start] if stage.start else []), *stage.models)]
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]

    def _tokenizer(self, stage: StageSettings) -> Figures:
        out = self._out / stage.name
        shutil.rmtree(out, ignore_errors=True)  # what a killed attempt left
        with storage_errors(out):
            for line in train_tokenizer(stage.texts, out, stage.vocab_size, None, stage.most_chars):
                print(line, flush=True)
        return {"tokens in the vocabulary": Tokenizer.load(out).vocab_size}

    def _train(self, stage: StageSettings) -> Figures:
        config = self._configs[stage.name]
        config = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
        refuse_to_start(config)
        last = read_metrics(_RECIPES[command_for(Path(stage.config or ""), stage.overrides)](config))[-1]
        return_freed_memory()
        return {name: last[key] for key, name in _FIGURES.items() if key in last} | {
            "steps": config.run.steps or last["step"]
        }

    def _evaluate(self, stage: StageSettings) -> Figures:
        results = self._out / stage.name
        models = [self._out / name for name in stage.models]
        labels = dict(zip(models, stage.models, strict=True))
        if stage.benchmarks == ("core",):
            results.mkdir(exist_ok=True)
            core_command(models, stage.problems, self._device, results / _RESULTS, labels=labels)
        else:
            asked = Asked(mode_of(), stage.problems or 200, self._seed, stage.max_tokens, device=self._device)
            cells = sweep(models, list(map(Path, stage.benchmarks)), asked, results)
            comparisons = compare(cells)
            for line in table(cells, comparisons, labels):
                print(line)
            record = table_json(cells, comparisons, labels)
            write_atomically(results / _RESULTS, json.dumps(record, indent=2).encode() + b"\n")
        return_freed_memory()
        return {f"{model} on {benchmark}": found[0] for (model, benchmark), found in self._measured(stage).items()}

    def _measured(self, stage: StageSettings) -> dict[tuple[str, str], tuple[float, float, float]]:
        """Returns each model's result on each benchmark of an evaluation, with its interval."""
        record = json.loads((self._out / stage.name / _RESULTS).read_bytes())
        if isinstance(record, list):
            scores = ((one["label"], one["score"]) for one in record)
            return {(label, score["name"]): (score["value"], score["low"], score["high"]) for label, score in scores}
        first = ((one["label"], one["benchmark"], one["evaluations"][0]) for one in record["results"])
        return {(label, name): (one["value"], one["low"], one["high"]) for label, name, one in first}

    def _results(self, stage: StageSettings) -> str:
        found = self._measured(stage)
        names = list(dict.fromkeys(name for _, name in found))

        def cell(model: str, name: str) -> str:
            value, low, high = found[model, name]
            return f"{value:.1%} [{low:.1%}, {high:.1%}]"

        return markdown_table(
            ["model", *names], [[model, *(cell(model, name) for name in names)] for model in stage.models]
        )

    def _shape(self, stage: StageSettings, config: RunConfig, shapes: Mapping[str, ModelConfig]) -> ModelConfig:
        if config.model.shape is not None:
            sizes = {one.name: one.vocab_size for one in self._planned.stage if one.texts}
            made = sizes.get(stage.start or "")
            vocabulary = load_tokenizer(config.model).vocab_size if made is None else made
            return ModelConfig(vocab_size=vocabulary, **config.model.shape.model_dump())
        if stage.start is not None:
            if stage.start in shapes:
                return shapes[stage.start]
            raise MissingInputError(f"{stage.name}: the shape of the stage {stage.start!r} is not known", stage.start)
        assert config.model.path is not None, "the configuration asks for a path where there is no shape"
        return shape_of(config.model.path)

    def _missing(self, stages: Sequence[StageSettings]) -> Iterator[str]:
        """Yields a line for each dataset of the stages that is not there: the stages that read it, and the command that fetches
        it."""
        wanted: dict[str, list[str]] = {}
        for stage in stages:
            names = list(stage.texts)
            if stage.config:
                names += names_of_data(self._configs[stage.name])
            if stage.benchmarks == ("core",):
                try:
                    find_sets()
                except UserError as error:
                    yield f"missing: {stage.name}: {error}"
            else:
                names += names_of_pools(load_environment(Path(one)).task_pool for one in stage.benchmarks)
            for name in absent(names):
                wanted.setdefault(name, []).append(stage.name)
        for name, readers in wanted.items():
            is_name = len(Path(name).parts) == 2 and not Path(name).suffix
            command = self._planned.data.get(name) or (
                f"nmoe data download {name}" if is_name else "put the file there"
            )
            yield f"missing: {name} (for {', '.join(dict.fromkeys(readers))}): {command}"
