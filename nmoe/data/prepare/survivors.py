"""Filters the problems of a source: first by columns, then row by row for duplicates, short texts and contamination."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nmoe.config.preparation import FiltersSection, PreparationSettings
from nmoe.data.prepare.problems import INTEGER, Contamination, digest, ends_in_box, integer
from nmoe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pyarrow

PERCENTILES = (50, 90, 95, 99, 99.5)


class Lengths:
    """A histogram of lengths, which gives exact percentiles in memory proportional to the longest length."""

    def __init__(self) -> None:
        self._counts = np.zeros(1024, dtype=np.int64)

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Adds lengths (each at least 0) to the histogram."""
        counts = np.bincount(lengths, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def summary(self) -> dict[str, float]:
        """Returns `{"mean": 210.4, "p50": 181, ..., "max": 5210}`; empty if nothing was counted. The p50 is the smallest length
        that at least 50% of the rows do not exceed."""
        total = int(self._counts.sum())
        if total == 0:
            return {}
        below = np.cumsum(self._counts)
        mean = float(np.arange(len(self._counts)) @ self._counts) / total
        at = {f"p{one:g}": int(np.searchsorted(below, one / 100 * total - 1e-9)) for one in PERCENTILES}
        return {"mean": round(mean, 1), **at, "max": int(np.flatnonzero(self._counts)[-1])}


class Stage:
    """Counts and prompt lengths of the rows that are left after one filter: `Stage("clean integer answer", in_tokens=False)`."""

    def __init__(self, name: str, in_tokens: bool) -> None:
        self.name = name
        self.rows = 0
        self._lengths = {"chars": Lengths()} | ({"tokens": Lengths()} if in_tokens else {})

    def add(self, lengths: dict[str, NDArray[np.int64]]) -> None:
        """Counts rows by the lengths of their prompts, given in characters and maybe tokens."""
        self.rows += len(lengths["chars"])
        for unit, counted in self._lengths.items():
            counted.add(lengths[unit])

    def summary(self) -> dict[str, object]:
        """Returns the stage's entry in the manifest."""
        return {"stage": self.name, "rows": self.rows} | {
            f"prompt_{unit}": counted.summary() for unit, counted in self._lengths.items()
        }


Mask = NDArray[np.bool_]

PRIORITY_BYTES = 8


def columns_of(filters: FiltersSection) -> list[str]:
    """Returns the columns that the filters read."""
    columns = ["problem", "solution", "answer", "source"]
    if filters.question_types:
        columns.append("question_type")
    if filters.require_valid:
        columns += ["problem_is_valid", "solution_is_valid"]
    return columns


def priority(hashed: bytes, seed: int) -> int:
    """Returns a problem's rank in the order in which files draw problems, a pure function of its digest and the seed."""
    drawn = hashlib.blake2b(hashed, digest_size=PRIORITY_BYTES, key=seed.to_bytes(8, "big"))
    return int.from_bytes(drawn.digest(), "big")


class Survivors:
    r"""The rows of a data source that pass all filters. For each row it keeps three numbers: the index in the source, the priority
    (files draw rows in its order, see `priority`), and whether the solution ends in a `\boxed{}` answer. The texts are not kept: a
    row takes less than two hundred bytes.

    `stages` count the rows that each filter leaves.
    """

    def __init__(
        self,
        settings: PreparationSettings,
        contamination: Contamination,
        probes: frozenset[bytes],
        tokenizer: Tokenizer | None,
    ) -> None:
        """Makes an empty set of rows. `probes` are the digests of problems drawn for evaluation, which are filtered out."""
        self._settings, self._contamination, self._probes, self._tokenizer = settings, contamination, probes, tokenizer
        self._seen: set[bytes] = set()
        self._rows_read = 0
        self.rows, self.priorities, self.boxed = array("q"), array("Q"), bytearray()
        filters = settings.filters
        kinds = " or ".join(filters.question_types)
        self._filters = {
            "all": True,
            f"question_type is {kinds}": bool(filters.question_types),
            "clean integer answer": True,
            f"source is not {' or '.join(filters.exclude_sources)}": bool(filters.exclude_sources),
            "valid problem and solution": True,
        }
        left_out = "in no probe or evaluation set" if settings.contamination.action == "remove" else "in no probe"
        names = [
            *(name for name, on in self._filters.items() if on),
            "first of its duplicates",
            "long enough",
            left_out,
        ]
        self.stages = [Stage(name, tokenizer is not None) for name in names]

    def read(self, batches: Iterable[pyarrow.RecordBatch]) -> None:
        """Filters all batches and keeps the rows that pass."""
        for batch in batches:
            self._read(batch)

    def _read(self, batch: pyarrow.RecordBatch) -> None:
        import pyarrow.compute as compute

        lengths = {"chars": compute.utf8_length(batch.column("problem")).to_numpy().astype(np.int64)}
        if self._tokenizer is not None:
            problems = batch.column("problem").to_pylist()
            lengths["tokens"] = np.array([len(self._tokenizer.encode(one)) for one in problems], dtype=np.int64)
        stages = iter(self.stages)

        def count(kept: Mask) -> None:
            next(stages).add({unit: counted[kept] for unit, counted in lengths.items()})

        kept = np.ones(len(batch), dtype=np.bool_)
        count(kept)
        for mask in self._masks(batch):
            kept &= mask
            count(kept)
        indices = np.flatnonzero(kept)
        for stayed in self._row_by_row(batch, indices):
            mask = np.zeros(len(batch), dtype=np.bool_)
            mask[stayed] = True
            count(mask)
        self._rows_read += len(batch)

    def _masks(self, batch: pyarrow.RecordBatch) -> Iterator[Mask]:
        """Yields a mask for each filter that needs only a column's values."""
        import pyarrow
        import pyarrow.compute as compute

        filters = self._settings.filters

        def numpy(mask: pyarrow.BooleanArray) -> Mask:
            array: Mask = mask.to_numpy(zero_copy_only=False)
            return array

        def one_of(column: str, values: tuple[str, ...]) -> Mask:
            return numpy(compute.is_in(batch.column(column), pyarrow.array(values, pyarrow.string())))

        if filters.question_types:
            yield one_of("question_type", filters.question_types)
        yield numpy(compute.match_substring_regex(batch.column("answer"), INTEGER))
        if filters.exclude_sources:
            yield ~one_of("source", filters.exclude_sources)
        valid = np.ones(len(batch), dtype=np.bool_)
        for column in ("problem", "solution"):
            trimmed = compute.utf8_trim_whitespace(batch.column(column))
            valid &= numpy(compute.not_equal(trimmed, ""))
            if filters.require_valid:
                valid &= one_of(f"{column}_is_valid", ("Yes",))
        yield valid

    def _row_by_row(self, batch: pyarrow.RecordBatch, indices: NDArray[np.int64]) -> tuple[list[int], ...]:
        """Filters rows one by one. Returns the indices of rows that are the first of their duplicates; the rows of these that are
        long enough; and the rows of the latter that pass the contamination filter too."""
        filters, seed = self._settings.filters, self._settings.seed
        first, long_enough, stayed = list[int](), list[int](), list[int]()
        chosen = batch.take(indices)
        columns = [chosen.column(name).to_pylist() for name in ("problem", "solution", "answer", "source")]
        for index, problem, solution, answer, source in zip(indices.tolist(), *columns, strict=True):
            hashed = digest(problem)
            if hashed in self._seen:
                continue
            self._seen.add(hashed)
            first.append(index)
            if (
                len(problem.strip()) < filters.least_problem_chars
                or len(solution.strip()) < filters.least_solution_chars
            ):
                continue
            long_enough.append(index)
            found = self._contamination.find(problem, hashed)
            self._contamination.count(found, source)
            if hashed in self._probes or (found and self._settings.contamination.action == "remove"):
                continue
            stayed.append(index)
            label = integer(answer)
            assert label is not None, "Arrow and Python match one pattern"
            self.rows.append(self._rows_read + index)
            self.priorities.append(priority(hashed, seed))
            self.boxed.append(ends_in_box(solution, label) is not None)
        return first, long_enough, stayed
