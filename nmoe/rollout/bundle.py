"""Replay bundles: everything needed to replay one trajectory, in a directory that is written whole or not at all.

`RUN/replay/step_000010-parse_error-sort_3-2/` (step, why it was kept, problem, sample) holds

    bundle.json   the trajectory's record; how its turns were parsed; the environment's settings; which tokenizer and
                  sandbox were used; and a digest of each part, so that a later change is detected and named
    routes.npy    the experts that the router picked for each token, if the engine recorded them

and `RUN/replay/tokenizer/` holds the tokenizer of all bundles. `nmoe replay` replays a bundle.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.storage import storage_errors, sync
from nmoe.trajectory import Trajectory
from nmoe.types import (
    Exchange,
    Failure,
    FinishReason,
    Given,
    Grade,
    Message,
    Problem,
    Sample,
    Sampling,
    ToolCall,
    ToolEvent,
    TrainerState,
    Turn,
    Verdict,
)

FORMAT = 1
FILE = "bundle.json"
ROUTES = "routes.npy"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Span(_Strict):
    kind: Literal["sampled", "tool", "user", "prompt", "form"]
    turn: int
    start: int
    end: int


class _Sampling(_Strict):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: list[int]
    seed: int


class _Message(_Strict):
    role: str
    content: str
    channel: str | None
    recipient: str | None
    name: str | None
    content_type: str | None


class _TrainerState(_Strict):
    global_step: int
    max_steps: int


class _Verdict(_Strict):
    outcome: Literal["correct", "incorrect", "error"]
    score: float
    layer: str
    reason: str


class _ToolEvent(_Strict):
    name: str
    arguments: str
    call_id: str
    fault: str
    failure: Failure
    output: str
    reason: str
    started_s: float
    wall_s: float


class _Exchange(_Strict):
    turn: int
    state: dict[str, Any]
    user: str | None
    reward: float


class _Record(_Strict):
    """The schema of `Trajectory.record` as read from JSON."""

    step: int
    environment: dict[str, str]
    model: dict[str, str | int]
    workspace: dict[str, Any] | None
    trainer_state: _TrainerState | None = None
    problem: str
    task_type: str
    source: str
    history: list[_Message] = []
    question: str
    gold: str
    metadata: dict[str, Any]
    columns: dict[str, Any] = {}
    index: int
    seed: int
    sampling: _Sampling
    prompt_ids: list[int]
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    kept_ids: list[list[int]] | None
    spans: list[_Span]
    finish_reasons: list[FinishReason]
    engines: list[int | None] = []
    tool_events: list[_ToolEvent]
    exchanges: list[_Exchange] = []
    text: str
    failure: Failure
    reason: str = ""
    cached: list[str] = []
    reward: float
    components: dict[str, float]
    weights: dict[str, float]
    extras: dict[str, float]
    answer: str | None
    verdict: _Verdict | None


class _Content(_Strict):
    nmoe_replay: int
    reason: str
    trajectory: _Record
    transcript: list[list[dict[str, str | None]]]
    settings: dict[str, Any]
    tokenizer: str
    sandbox: dict[str, Any] | None
    digests: dict[str, str]


@dataclass(frozen=True)
class Bundle:
    """A replay bundle as read from disk: one trajectory's record, with everything needed to replay it.

    `altered` names the parts whose digest does not match their content, because they were changed after they were written.
    """

    path: Path
    reason: str
    record: Mapping[str, Any]
    transcript: list[list[dict[str, str | None]]]
    settings: EnvironmentSettings
    tokenizer: str
    sandbox: Mapping[str, Any] | None
    routes: np.ndarray | None
    altered: tuple[str, ...]

    def inconsistencies(self) -> Iterator[str]:
        """Yields descriptions of contradictions in the record, any of which prevents building a trajectory from it."""
        record = self.record
        tokens, spans, turns = len(record["token_ids"]), record["spans"], len(record["finish_reasons"])
        for name in ("mask", "logprobs", "versions", "kept_ids"):
            if record[name] is not None and len(record[name]) != tokens:
                yield f"{len(record[name])} {name} for {tokens} token_ids"
        edges = [0, *(span["end"] for span in spans)]
        if [span["start"] for span in spans] != edges[:-1] or edges[-1] != tokens or sorted(edges) != edges:
            yield f"the spans do not cover the {tokens} tokens one after the other"
        elif [
            bit for span in spans for bit in [int(span["kind"] == "sampled")] * (span["end"] - span["start"])
        ] != record["mask"]:
            first = next(
                index
                for span in spans
                for index in range(span["start"], span["end"])
                if record["mask"][index] != (span["kind"] == "sampled")
            )
            yield f"token {first}: the mask says {record['mask'][first]}, and its span something else"
        if [span["turn"] for span in spans if span["kind"] == "sampled"] != list(range(turns)):
            yield f"the spans do not belong to {turns} turns"
        answered = [exchange["turn"] for exchange in record.get("exchanges", ())]
        if answered != sorted(set(answered) & set(range(turns))):
            yield f"the exchanges are of the turns {answered}, and there are {turns} turns"

    def trajectory(self) -> Trajectory:
        """Builds the trajectory from the record, which must have no inconsistencies."""
        return trajectory_of(self.record, self.routes)


def trajectory_of(record: Mapping[str, Any], routes: np.ndarray | None = None) -> Trajectory:
    """Builds a trajectory from its record, which must have no inconsistencies, and the routes of its tokens."""
    turns: list[Turn] = []
    given: tuple[int, ...] = ()
    kind: Given = "tool"
    # The current branch: where its routes start, the length of its prompt, and where its tokens start.
    first, prompt, start = 0, len(record["prompt_ids"]), 0
    for span in record["spans"]:
        where = slice(span["start"], span["end"])
        if span["kind"] != "sampled":
            given, kind = tuple(record["token_ids"][where]), span["kind"]
            if kind == "prompt":
                first += prompt + span["start"] - start - 1
                prompt, start = len(given), span["end"]
            continue
        sample = Sample(
            record["token_ids"][where],
            record["logprobs"][where],
            record["versions"][where],
            record["finish_reasons"][span["turn"]],
            None if record["kept_ids"] is None else record["kept_ids"][where],
            None if routes is None else routes[first : first + prompt + span["end"] - start - 1],
        )
        turns.append(Turn(given, sample, kind))
        given, kind = (), "tool"
    verdict, state = record["verdict"], record.get("trainer_state")
    return Trajectory(
        problem=Problem(
            record["problem"],
            record["task_type"],
            record["question"],
            record["gold"],
            record["source"],
            record["metadata"],
            record.get("columns", {}),
            tuple(Message(**message) for message in record.get("history", ())),
        ),
        index=record["index"],
        prompt_ids=tuple(record["prompt_ids"]),
        turns=tuple(turns),
        grade=Grade(
            record["reward"],
            record["components"],
            record["failure"],
            record["extras"],
            record["answer"],
            None if verdict is None else Verdict(**verdict),
            record["weights"],
            record.get("reason", ""),
            tuple(record.get("cached", ())),
        ),
        sampling=Sampling(**{**record["sampling"], "stop_ids": tuple(record["sampling"]["stop_ids"])}),
        tool_events=tuple(tool_event(event) for event in record["tool_events"]),
        environment=record["environment"],
        model=record["model"],
        workspace=record["workspace"],
        trainer_state=None if state is None else TrainerState(**state),
        exchanges=tuple(Exchange(**exchange) for exchange in record.get("exchanges", ())),
    )


def write_bundle(path: Path, content: Mapping[str, Any], routes: np.ndarray | None) -> None:
    """Writes a bundle to the directory `path`, replacing an earlier one. Digests are added to `content`. Raises StorageError.

    Every file and name is synced to disk before the directory is renamed into place, so that a kill at any moment leaves it
    whole or absent.
    """
    whole = {"nmoe_replay": FORMAT, **content, "digests": _digests(content, routes)}
    files = {FILE: (json.dumps(whole, allow_nan=False) + "\n").encode("ascii")}
    if routes is not None:
        file = io.BytesIO()
        np.save(file, routes, allow_pickle=False)
        files[ROUTES] = file.getvalue()
    partial = path.with_name(f".{path.name}.partial")
    with storage_errors(path):
        _remove(partial)
        partial.mkdir()
        try:
            for name, data in files.items():
                (partial / name).write_bytes(data)
                sync(partial / name)
            sync(partial)
            _remove(path)
            os.rename(partial, path)
            sync(path.parent)
        finally:
            _remove(partial)


def read_bundle(path: Path) -> Bundle:
    """Reads a bundle and compares its digests. Raises UserError for a path that is not a bundle, or a bundle of another format
    version.
    """
    file = path / FILE
    try:
        raw = json_of(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path}: no replay bundle (no {FILE} in it); a run's are the directories in its replay/"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON: {error}") from error
    found = raw.get("nmoe_replay") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise UserError(f"{file}: nmoe_replay is {found!r}, and this nmoe reads bundles of format {FORMAT}")
    try:
        _Content.model_validate_json(file.read_bytes())
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: not the content of a bundle: {where}: {first['msg']}") from None
    routes = None
    if (path / ROUTES).exists():
        try:
            routes = np.load(path / ROUTES, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path / ROUTES}: cannot be read: {error}") from error
    written = raw.pop("digests")
    del raw["nmoe_replay"]
    now = _digests(raw, routes)
    altered = tuple(name for name in sorted(now.keys() | written.keys()) if now.get(name) != written.get(name))
    return Bundle(
        path=path,
        reason=raw["reason"],
        record=raw["trajectory"],
        transcript=raw["transcript"],
        settings=parse(raw["settings"], EnvironmentSettings, Locator(Place(f"{file}: settings"))),
        tokenizer=raw["tokenizer"],
        sandbox=raw["sandbox"],
        routes=routes,
        altered=altered,
    )


def _remove(path: Path) -> None:
    """Removes a directory if it exists."""
    if path.exists():
        shutil.rmtree(path)


def tool_event(record: Mapping[str, Any]) -> ToolEvent:
    """Returns the event that `ToolEvent.record` recorded."""
    names = ("name", "arguments", "call_id", "fault")
    call = ToolCall(**{name: record[name] for name in names})
    return ToolEvent(call, **{name: value for name, value in record.items() if name not in names})


def _digests(content: Mapping[str, Any], routes: np.ndarray | None) -> dict[str, str]:
    """Returns a digest of each part of a bundle; each field of the trajectory is a part: {"trajectory.gold": "9c1b...", "settings":
    "04fe...", ...}.
    """
    parts = {name: value for name, value in content.items() if name != "trajectory"}
    parts |= {f"trajectory.{name}": value for name, value in content["trajectory"].items()}
    digests = {
        # A round trip through JSON turns tuples into lists, as reading the file does.
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
        for name, value in parts.items()
    }
    if routes is not None:
        digests["routes"] = hashlib.sha256(f"{routes.dtype}{routes.shape}".encode() + routes.tobytes()).hexdigest()[:32]
    return digests
