"""Prepares a set of problems (`nmoe data prepare`) in two passes over the source: the first filters, the second writes the drawn
problems."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmoe.config.preparation import OWN_FILES, PreparationSettings, ProbeSection
from nmoe.data.packages import sha256_of
from nmoe.data.prepare.problems import Contamination, digest, ends_in_box, field_of, given_problems, integer
from nmoe.data.prepare.source import parquet_files, read_batches
from nmoe.data.prepare.survivors import Survivors, columns_of, priority
from nmoe.errors import StorageError, UserError
from nmoe.parsing import json_of
from nmoe.text.tokenizer import Tokenizer

_MANIFEST = "manifest.json"
# Holds the names of the files of a preparation that is being written, to know the leftovers of a killed one.
_UNFINISHED = ".preparation.json"
_WITH_OUTPUT = ("sft", "dev")
_ANSWER_FIELDS = ("answer", "label")


def prepare(settings: PreparationSettings, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Writes the files that the settings ask for, `NAME.jsonl`, and `manifest.json` last; returns the manifest. The same source and
    settings give the same bytes.

    Raises UserError, before anything is written, for data that cannot be read, lacks columns, or leaves too few problems.
    """
    directory = Path(settings.directory)
    _refuse_to_mix(directory)
    files = parquet_files(settings.source.path)
    contamination = Contamination(settings.contamination.ngram)
    probes, drawn = _draw_probes(settings, contamination)
    for given in settings.contamination.sets:
        for _, problem in given_problems(given):
            contamination.add(_called(given.path, given.subset), problem)
    survivors = Survivors(settings, contamination, frozenset(drawn), tokenizer)
    survivors.read(read_batches(files, columns_of(settings.filters)))
    chosen = _draw(settings, survivors)
    lines = probes | _records(files, chosen)
    written = {f"{name}.jsonl": "".join(of_file).encode() for name, of_file in lines.items()}
    manifest: dict[str, Any] = {
        "settings": settings.model_dump(mode="json", exclude={"directory"}),
        "source": [{"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files],
        "stages": [stage.summary() for stage in survivors.stages],
        "contamination": contamination.summary(),
        "files": {
            name: {
                "records": len(lines[name.removesuffix(".jsonl")]),
                "sha256": hashlib.sha256(text).hexdigest(),
                "problems_md5": _problems_md5(lines[name.removesuffix(".jsonl")]),
            }
            for name, text in written.items()
        },
    }
    _write(directory, written | {_MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode()})
    return manifest


def report(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields the manifest as readable lines: filter stages, contamination, files."""
    for stage in manifest["stages"]:
        yield f"{stage['rows']:>9,}  {stage['stage']}"
        for key, unit in (("prompt_chars", "characters"), ("prompt_tokens", "tokens")):
            if summary := stage.get(key):
                yield f"{'':11}{unit} of a prompt: " + ", ".join(f"{name} {value:,}" for name, value in summary.items())
    action = manifest["settings"]["contamination"]["action"]
    for name, counts in manifest["contamination"].items():
        by_source = ", ".join(f"{source} {count:,}" for source, count in counts["by_source"].items()) or "none"
        yield (
            f"of {name} ({counts['problems']:,} problems): {counts['exact']:,} the same, {counts['ngram']:,} share an n-gram, "
            f"{'removed' if action == 'remove' else 'reported'}; by source: {by_source}"
        )
    for name, file in manifest["files"].items():
        yield f"{file['records']:>9,}  {name}"


def _refuse_to_mix(directory: Path) -> None:
    begun = f"{_UNFINISHED}.partial"
    is_free = not directory.exists() or (
        directory.is_dir() and all(entry.name == begun for entry in directory.iterdir())
    )
    if not is_free and _earlier_files(directory) is None:
        raise UserError(
            f"{directory}: holds other things than an earlier preparation; name another one: --directory=DIR"
        )


def _earlier_files(directory: Path) -> list[str] | None:
    """Returns the names of the files that an earlier preparation wrote into a directory, or was writing when it was killed; None if
    there was none. A manifest.json may be another program's."""
    try:
        unfinished = json_of((directory / _UNFINISHED).read_bytes())
        return [name for name in unfinished["files"] if Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        manifest = json_of((directory / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or not {"settings", "source", "stages"} <= manifest.keys():
        return None
    files = manifest.get("files")
    return [name for name in files if Path(name).name == name] if isinstance(files, dict) else None


def _called(path: str, subset: str | None) -> str:
    """Returns the name of an evaluation set in the manifest, which does not depend on its directory."""
    name = Path(path).name if Path(path).exists() else path
    return name if subset is None else f"{name}:{subset}"


# --- the draws


def _draw_probes(
    settings: PreparationSettings, contamination: Contamination
) -> tuple[dict[str, list[str]], set[bytes]]:
    """Draws the problems of each probe (a set to evaluate on). Returns the lines of each probe's file, and the digests of their
    problems, which are also added to `contamination`."""
    lines: dict[str, list[str]] = {}
    drawn: set[bytes] = set()
    for probe in settings.probes:
        try:
            fitting = _fitting(probe)
        except UserError as error:
            raise UserError(f"{error}; with --probes=[] nothing is drawn to evaluate on") from error
        order = sorted((priority(hashed, settings.seed), hashed) for hashed in fitting.keys() - drawn)[: probe.size]
        if len(order) < probe.size:
            raise UserError(
                f"{probe.path}: {len(order):,} different problems with an integer answer are left to draw from, and "
                f"probes.size asks for {probe.size:,}"
            )
        for _, hashed in order:
            problem, label = fitting[hashed]
            lines.setdefault(probe.name, []).append(_line({"input": problem, "label": label}))
            contamination.add(f"{probe.name} from {_called(probe.path, probe.subset)}", problem)
            drawn.add(hashed)
    return lines, drawn


def _fitting(probe: ProbeSection) -> dict[bytes, tuple[str, str]]:
    fitting: dict[bytes, tuple[str, str]] = {}
    for row, problem in given_problems(probe):
        answer = field_of(row, probe.answer_field, _ANSWER_FIELDS, "answer")
        label = integer(answer.rpartition("####")[2])  # GSM8K's solutions end in `#### 42`
        if label is not None:
            fitting.setdefault(digest(problem), (problem, label))
    return fitting


def _draw(settings: PreparationSettings, survivors: Survivors) -> dict[str, NDArray[np.int64]]:
    """Draws the rows of each file, in the order of their priority. Files with an output draw first, because they need a solution
    that ends in a box."""
    rows = np.frombuffer(survivors.rows, dtype=np.int64)
    priorities = np.frombuffer(survivors.priorities, dtype=np.uint64)
    boxed = np.frombuffer(survivors.boxed, dtype=np.bool_)
    free = np.lexsort((rows, priorities)) if len(rows) else np.empty(0, dtype=np.int64)
    chosen: dict[str, NDArray[np.int64]] = {}
    for name in sorted(OWN_FILES, key=lambda one: one not in _WITH_OUTPUT):
        size = getattr(settings.splits, name)
        fits = np.flatnonzero(boxed[free]) if name in _WITH_OUTPUT else np.arange(len(free))
        if len(fits) < size:
            kind = r" whose solution ends in \boxed{label}" if name in _WITH_OUTPUT else ""
            raise UserError(
                f"{settings.source.path}: {len(rows):,} problems pass the filters, {len(fits):,} of them{kind} are left for "
                f"{name}, which asks for {size:,}: make a split smaller, such as --splits.{name}={len(fits)}"
            )
        if size:
            chosen[name] = rows[free[fits[:size]]]
        free = np.delete(free, fits[:size])
    return chosen


def _records(files: Sequence[Path], chosen: Mapping[str, NDArray[np.int64]]) -> dict[str, list[str]]:
    """Returns the lines of each file, by a second pass over the source."""
    index_of = {row: (name, index) for name, rows in chosen.items() for index, row in enumerate(rows.tolist())}
    wanted = np.array(sorted(index_of), dtype=np.int64)
    lines = {name: [""] * len(chosen[name]) for name in OWN_FILES if name in chosen}
    begin = 0
    for batch in read_batches(files, ("problem", "solution", "answer")):
        within = wanted[np.searchsorted(wanted, begin) : np.searchsorted(wanted, begin + len(batch))]
        for row, fields in zip(within.tolist(), batch.take(within - begin).to_pylist(), strict=True):
            name, index = index_of[row]
            label = integer(fields["answer"])
            assert label is not None, "it passed the filter"
            record = {"input": fields["problem"], "label": label}
            if name in _WITH_OUTPUT:
                output = ends_in_box(fields["solution"], label)
                assert output is not None, "only such solutions were drawn from"
                record["output"] = output
            lines[name][index] = _line(record)
        begin += len(batch)
    return lines


# --- the files


def _line(record: Mapping[str, str]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _problems_md5(lines: Sequence[str]) -> str:
    """Returns a digest of the set of problems in a file, independent of their order."""
    hashed = sorted(digest(json_of(line)["input"]) for line in lines)
    return hashlib.md5(b"".join(hashed), usedforsecurity=False).hexdigest()


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files one after another, each completely or not at all. Removes an earlier preparation's files that are not among
    them, even if it was killed before its end."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        earlier = set(_earlier_files(directory) or ())
        _replace(directory / _UNFINISHED, json.dumps({"files": sorted(earlier | set(files))}).encode())
        (directory / _MANIFEST).unlink(missing_ok=True)
        for name in earlier - set(files):
            (directory / name).unlink(missing_ok=True)
            (directory / f"{name}.partial").unlink(missing_ok=True)
        for name, content in files.items():
            _replace(directory / name, content)
        (directory / _UNFINISHED).unlink()
    except OSError as error:
        raise StorageError(f"{directory}: cannot be written: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
