"""Evaluates one model on one benchmark, and appends each finished problem to a results file.

An interrupted evaluation continues with the unfinished problems, and gives the same results as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nmoe.config.environment import EnvironmentSettings, held_out
from nmoe.envs.pools.pool import fingerprint_of
from nmoe.envs.rewards.reward import Scorer
from nmoe.errors import UserError
from nmoe.eval.best_of_n import UNANSWERED, score_groups
from nmoe.eval.evaluate import Asked, Evaluation, refuse_open_problems, sampling_record, summarise_outcomes
from nmoe.eval.outcomes import Outcome, answers_of, outcomes_of
from nmoe.eval.overlap import TrainedOn, find_overlap
from nmoe.eval.subject import open_subject
from nmoe.model.device import choose_device
from nmoe.model.policy import sampling_precision
from nmoe.parsing import json_of
from nmoe.runs.storage import append_whole, write_atomically
from nmoe.trajectory import Group
from nmoe.types import Precision


class SweepInterruptedError(UserError):
    """Raised if Ctrl-C interrupts an evaluation of several models; the same command continues it."""

    exit_code = 130


@dataclass(frozen=True)
class Pair:
    """An evaluation of one model on one benchmark, with its results file in the directory `results`.

    The file has a line with the settings, one for each finished problem, and one at the end. `directory` is the model's
    checkpoint.
    """

    results: Path
    checkpoint: Path
    directory: Path
    settings: EnvironmentSettings
    asked: Asked
    scorer: Scorer | None = None

    @property
    def file(self) -> Path:
        """The path of the results file; its name ends in a digest of settings and weights, so that other settings use
        another file."""
        name = f"{self.checkpoint}__{self.settings.env_id}__{self.asked.mode.name}"
        plain = re.sub(r"[^\w.@+=-]+", "_", name).strip("_.")
        return self.results / f"{plain}__{hashlib.blake2b(_line(self.header()), digest_size=4).hexdigest()}.jsonl"

    def header(self) -> dict[str, Any]:
        weights = sorted(self.directory.glob("*.safetensors"))
        return {
            "checkpoint": str(self.checkpoint),
            "weights": fingerprint_of(*((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in weights)),
            "benchmark": self.settings.env_id,
            "environment": fingerprint_of(self.settings.model_dump_json()),
            "problems": self.asked.problems,
            "mode": self.asked.mode.name,
            "temperature": self.asked.mode.temperature,
            "max_tokens": self.asked.max_tokens,
            "reasoning_effort": self.settings.reasoning_effort,
            "seed": self.asked.seed,
            "precision": self.precision,
            "best_of": None if self.asked.best_of is None else str(self.asked.best_of),
            **({"allow_trained_on": True} if self.asked.allow_trained_on else {}),
            **({} if self.asked.engine is None else {"served": asdict(self.asked.engine.served()[0])}),
        }

    @property
    def servers(self) -> dict[str, Any]:
        """The addresses of the servers that sample, if any do. Another address is no reason to sample again."""
        return {} if self.asked.engine is None else {"servers": self.asked.engine.urls()}

    @property
    def precision(self) -> Precision | None:
        if self.asked.engine is not None:
            return None
        return sampling_precision(self.directory, choose_device(self.asked.device, "--device"), self.asked.precision)

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of the finished problems in the results file; an empty list without a file.

        An incomplete last line, which a killed process leaves, is removed. Raises UserError if the file has other
        contents.
        """
        if not self.file.exists():
            return []
        *lines, torn = self.file.read_bytes().split(b"\n")
        if torn:
            write_atomically(self.file, b"\n".join([*lines, b""]))
        try:
            return [record for record in map(json_of, lines) if "key" in record]
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.file}: not the results of an evaluation ({error!r}); remove the file") from error

    def read(self) -> list[Outcome]:
        """Returns the outcomes of the finished problems in the results file. Raises UserError if the file has other contents."""
        try:
            return list(map(_outcome, self.records()))
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.file}: not the results of an evaluation ({error!r}); remove the file") from error

    @property
    def trained_on(self) -> int | None:
        """The number of problems that the model was trained on, from the results file; None if there are none or this
        is unknown."""
        found: int | None = json_of(self.file.read_bytes().split(b"\n", 1)[0]).get("trained_on")
        return found

    @property
    def is_complete(self) -> bool:
        return self.file.exists() and b'\n{"complete"' in self.file.read_bytes()

    def finish(self, done: list[Outcome], count: Callable[[int], None], trained: TrainedOn) -> list[Outcome]:
        """Samples the problems that are not done yet, appends each to the results file, and returns the outcomes of all
        problems.

        `trained` has the model's training questions; a new file is compared with them, and a continued one was compared
        before. `count` is called with the number of finished problems. Raises SweepInterruptedError at Ctrl-C.
        """
        if self.is_complete:
            self._refuse_missing(done)
            return done
        found, mode = list(done), self.asked.mode

        def on_group(group: Group) -> None:
            (outcome,) = outcomes_of([group])
            if self.scorer is not None:
                (scores,) = score_groups(subject.environment, [group], self.scorer)
                outcome = replace(outcome, scores=tuple(scores))
            append_whole(self.file, _line(_record(group, outcome)))
            found.append(outcome)
            count(len(found))

        with open_subject(
            self.directory,
            held_out(self.settings) or self.settings,
            self.asked.problems,
            on_held_out=False,
            device=self.asked.device,
            expert_weights=self.asked.expert_weights,
            max_tokens=self.asked.max_tokens,
            precision=self.asked.precision,
            engine=self.asked.engine,
        ) as subject:
            refuse_open_problems(subject.environment)
            if not self.file.exists():
                overlap = find_overlap(
                    subject.environment, self.asked.problems, trained, allowed=self.asked.allow_trained_on
                )
                common = {} if overlap is None or not overlap.common else {"trained_on": overlap.common}
                write_atomically(self.file, _line(self.header() | self.servers | common))
            try:
                subject.collect(self.asked.problems, mode, self.asked.seed, on_group, {one.key for one in done})
            except KeyboardInterrupt as error:
                raise SweepInterruptedError(
                    f"interrupted at {self.checkpoint} on {self.settings.env_id} after {len(found):,} of "
                    f"{self.asked.problems:,} problems; {self.results} keeps the finished ones, and the same command goes on"
                ) from error
        append_whole(self.file, _line({"complete": len(found)}))
        return found

    def _refuse_missing(self, done: list[Outcome]) -> None:
        counted = json_of(self.file.read_bytes().strip().rsplit(b"\n", 1)[-1]).get("complete")
        if counted != len(done):
            raise UserError(
                f"{self.file}: its last line counts {counted} problems, and it has {len(done)}; remove the file, and the same "
                "command samples them again"
            )

    def evaluations(self, outcomes: Sequence[Outcome]) -> list[Evaluation]:
        """Computes the evaluation results from the outcomes of all problems, whose order does not matter."""
        sampling = sampling_record(self.asked.mode, self.asked.max_tokens, self.settings.reasoning_effort)
        found = summarise_outcomes(in_order(outcomes), self.settings.env_id, self.asked.mode.temperature)
        trained_on = self.trained_on
        return [replace(one, sampling=sampling, trained_on=trained_on if one.outcomes else None) for one in found]


def in_order(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the outcomes sorted by their keys."""
    return sorted(outcomes, key=lambda one: one.key)


def _record(group: Group, outcome: Outcome) -> dict[str, Any]:
    return {
        **asdict(outcome),
        "scores": [None if score == UNANSWERED else score for score in outcome.scores],
        **answers_of(group),
    }


def _outcome(record: dict[str, Any]) -> Outcome:
    groups, correct = tuple(record["groups"]), tuple(record["correct"])
    scores = tuple(UNANSWERED if score is None else score for score in record["scores"])
    failures = tuple(record["failures"])
    return Outcome(record["key"], record["source"], groups, correct, record["voted"], scores, failures)


def _line(record: dict[str, Any]) -> bytes:
    # ASCII escapes, because model output may hold lone surrogates, which have no UTF-8.
    return json.dumps(record).encode("ascii") + b"\n"
