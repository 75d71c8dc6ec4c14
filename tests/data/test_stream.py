"""Documents streamed from the disk: their order, shares and positions, the files that they come from, and the workers."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.data import tokenising
from nmoe.data.documents import DocumentReader
from nmoe.data.spans import spans_of
from nmoe.data.stream import DocumentMixture, DocumentSource
from nmoe.data.tokenising import DocumentWorkers
from nmoe.errors import InfrastructureError, UserError
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

WHOLE = 1 << 20  # a buffer that has room for all
READER = DocumentReader(Tokenizer.train((), SMALLEST_VOCABULARY + 1000), 64)
HERE = DocumentWorkers(READER, 0)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[DocumentWorkers]:
    with DocumentWorkers(READER, 2) as workers:
        yield workers


def source(
    directory: Path, lengths: Sequence[int], name: str = "only", weight: float = 1.0, first: int = 0, seed: int = 0
) -> DocumentSource:
    """Document i is first + i, first + i, ..., with `lengths[i]` predicted tokens."""
    path = directory / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"token_ids": [first + i] * (length + 1)}) + "\n" for i, length in enumerate(lengths))
    )
    return DocumentSource(str(path), HERE, seed, WHOLE, weight=weight)


def mixed(*sources: DocumentSource) -> DocumentMixture:
    return DocumentMixture(sources, READER)


def taken(mixture: DocumentMixture, tokens: int) -> list[int]:
    return [int(document.ids[0]) for _, document in mixture.take(tokens)]


# --- a source that fits into the buffer


def test_each_epoch_has_every_document_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    documents = mixed(source(tmp_path, [1] * 20))
    epochs = [taken(documents, 20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = mixed(source(tmp_path, [1] * 20))
    assert epochs == [taken(again, 20) for _ in range(3)]
    assert taken(mixed(source(tmp_path, [1] * 20, seed=1)), 20) != epochs[0]
    # The order of runs before documents were streamed.
    order = list(range(20))
    random.Random("0/1").shuffle(order)
    assert epochs[1] == order


def test_the_budget_counts_predicted_tokens_and_is_met_exactly(tmp_path: Path) -> None:
    documents = mixed(source(tmp_path, [3] * 6))
    assert len(taken(documents, 9)) == 3
    assert len(taken(documents, 8)) == 2  # a third would exceed it
    assert len(taken(documents, 11)) == 3
    assert documents.position == [{"epoch": 1, "buffer": 0, "offset": 2, "tokens": 24}]
    assert len(taken(documents, 1)) == 1  # one is always handed out
    assert documents.position == [{"epoch": 1, "buffer": 0, "offset": 3, "tokens": 27}]


def test_what_did_not_fit_comes_next(tmp_path: Path) -> None:
    lengths = [2, 5, 3, 7, 1, 4]
    whole = mixed(source(tmp_path, lengths))
    order = [document for _ in range(12) for document in taken(whole, 1)]
    documents = mixed(source(tmp_path, lengths))
    joined: list[int] = []
    while len(joined) < 12:
        part = taken(documents, 8)
        assert sum(lengths[i] for i in part) <= 8
        joined += part
    assert joined[:12] == order


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(lengths, st.floats(0.05, 20)), min_size=1, max_size=4))
def test_shares_of_the_tokens_are_the_weights_to_a_document(kinds: list[tuple[list[int], float]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        sources = [
            source(Path(directory), each, f"s{i}", weight, first=50 * i) for i, (each, weight) in enumerate(kinds)
        ]
    mixture = mixed(*sources)
    longest = max(max(each) for each, _ in kinds)
    given_out = [0] * len(sources)
    for _ in range(60):
        ((index, document),) = mixture.take(1)
        assert document.ids[0] // 50 == index
        given_out[index] += document.positions
        for tokens, each in zip(given_out, sources, strict=True):
            exact = each.weight / sum(one.weight for one in sources) * sum(given_out)
            assert -(len(sources) - 1) * longest - 1e-6 <= tokens - exact <= longest + 1e-6


def test_three_sources_converge_to_their_weights_whatever_their_sizes(tmp_path: Path) -> None:
    made = [([9] * 5, "a", 2.0), ([1, 2], "b", 1.0), ([30] * 40, "c", 1.0)]
    mixture = mixed(*(source(tmp_path, *one) for one in made))
    tokens = [0, 0, 0]
    for _ in range(200):
        for index, document in mixture.take(100):
            tokens[index] += document.positions
    assert [one / sum(tokens) for one in tokens] == pytest.approx([0.5, 0.25, 0.25], abs=0.002)


@pytest.mark.parametrize(("steps", "budget"), [(0, 7), (1, 50), (9, 1), (17, 12), (40, 33)])
def test_a_mixture_goes_on_from_a_position_alone(tmp_path: Path, steps: int, budget: int) -> None:
    def made() -> DocumentMixture:
        return mixed(
            source(tmp_path, [3, 1, 4, 1, 5], "a", 0.7, seed=5),
            source(tmp_path, [9, 2, 6], "b", 0.3, first=100, seed=5),
        )

    whole = made()
    for _ in range(steps):
        whole.take(budget)
    resumed = made()
    resumed.position = json.loads(json.dumps(whole.position))
    assert [taken(whole, budget) for _ in range(9)] == [taken(resumed, budget) for _ in range(9)]
    assert resumed.position == whole.position


def test_a_fingerprint_tells_documents_sources_and_weights_apart(tmp_path: Path) -> None:
    one, other = source(tmp_path, [2, 3], "a"), source(tmp_path, [4], "b", first=9)
    half, another = source(tmp_path, [4], "b", 0.5, first=9), source(tmp_path, [4], "b", first=8)
    prints = [
        mixed(*sources).fingerprint for sources in ([one, other], [other, one], [one], [one, half], [one, another])
    ]
    assert all(one != two for at, one in enumerate(prints) for two in prints[:at])
    assert json.loads(json.dumps(mixed(one, other).fingerprint)) == prints[0]


# --- a source that is larger than the buffer

COUNT = 600
TEXTS = [f"{'ab' * (number % 11)} {number:05}" for number in range(COUNT)]


def identity(text: str) -> str:
    return text.split()[-1]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 600 documents in files of several formats."""
    directory = tmp_path_factory.mktemp("corpora")
    lines = [json.dumps({"text": text, "other": "x" * 20}) + "\n" for text in TEXTS]
    lines[100] = "\n  \n" + lines[100]
    (directory / "one.jsonl").write_text("".join(lines))
    for part in range(3):
        some = "".join(lines[200 * part : 200 * part + 200])
        (directory / f"part-{part}.jsonl").write_text(some.rstrip("\n"))  # the last line may have no end
        with gzip.open(directory / f"packed-{part}.jsonl.gz", "wt") as file:
            file.write(some)
    with pa.output_stream(str(directory / "one.jsonl.zst"), compression="zstd") as file:
        file.write("".join(lines).encode())
    pq.write_table(pa.table({"other": TEXTS, "text": TEXTS}), directory / "one.parquet", row_group_size=97)
    pq.write_table(pa.table({"text": TEXTS}), directory / "group.parquet")
    return directory


def streamed(path: Path | str, held_out: int = 0, seed: int = 0, workers: DocumentWorkers = HERE) -> DocumentSource:
    found = DocumentSource(str(path), workers, seed, 4000, held_out)
    assert found.bytes > found.buffer_bytes
    return found


def texts(documents: DocumentSource, count: int) -> list[str]:
    found = []
    for _ in range(count):
        found.append(READER.tokenizer.decode(documents.next().ids.tolist()[:-1]))
        documents.advance()
    return found


NAMES = ["one.jsonl", "part-*.jsonl", "packed-*.jsonl.gz", "one.jsonl.zst", "one.parquet", "group.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_of_any_files_has_every_document_once(corpora: Path, name: str) -> None:
    documents = streamed(corpora / name)
    first, second = texts(documents, COUNT), texts(documents, COUNT)
    assert sorted(map(identity, first)) == sorted(map(identity, second)) == sorted(map(identity, TEXTS))
    assert set(first) == set(TEXTS)
    assert first != second
    assert documents.position["epoch"] in (1, 2)  # at its end, or already in the next
    assert documents.documents == COUNT


def test_a_buffer_has_documents_from_all_over_the_source(corpora: Path) -> None:
    documents = streamed(corpora / "one.jsonl")
    first = [int(identity(text)) for text in texts(documents, 60)]
    assert documents.position["buffer"] == 0
    thirds = Counter(number * 3 // COUNT for number in first)
    assert min(thirds[third] for third in range(3)) >= 5
    assert sum(abs(one - two) == 1 for one, two in pairwise(first)) <= 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("held_out", [1, 7, 90])
def test_the_last_documents_are_held_out(corpora: Path, name: str, held_out: int) -> None:
    documents = streamed(corpora / name, held_out)
    decode = READER.tokenizer.decode
    assert [decode(one.ids.tolist()[:-1]) for one in documents.held_out] == TEXTS[-held_out:]
    assert set(texts(documents, COUNT - held_out)) == set(TEXTS[:-held_out])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("part", "rows"), [("[:300]", slice(300)), ("[150:]", slice(150, None)), ("[10%:-20%]", slice(60, 480))]
)
def test_slices_of_large_files(corpora: Path, name: str, part: str, rows: slice) -> None:
    chosen = TEXTS[rows]
    assert set(texts(streamed(f"{corpora / name}@{part}"), len(chosen))) == set(chosen)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [0, 130, 700])
def test_a_position_goes_on_bit_for_bit(corpora: Path, name: str, steps: int) -> None:
    whole = streamed(corpora / name, 3, seed=4)
    texts(whole, steps)
    resumed = streamed(corpora / name, 3, seed=4)
    resumed.position = json.loads(json.dumps(whole.position))
    assert texts(whole, 200) == texts(resumed, 200)
    assert whole.position == resumed.position


def test_workers_give_the_documents_that_one_process_gives(corpora: Path, two_workers: DocumentWorkers) -> None:
    for name in ("part-*.jsonl", "one.parquet"):
        here, there = (streamed(corpora / name, 5, workers=workers) for workers in (HERE, two_workers))
        assert here.files == there.files
        assert texts(here, 700) == texts(there, 700)
        assert here.position == there.position


def test_a_signal_to_all_processes_of_a_run_loses_no_document(corpora: Path, two_workers: DocumentWorkers) -> None:
    """A scheduler sends SIGTERM to all of them, and the run still ends its step and saves a checkpoint."""
    documents = streamed(corpora / "one.jsonl", workers=two_workers)
    for pid in two_workers.pids():
        os.kill(pid, signal.SIGTERM)
    assert sorted(map(identity, texts(documents, COUNT))) == sorted(map(identity, TEXTS))


def test_processes_are_started_for_large_sources_alone(corpora: Path) -> None:
    with DocumentWorkers(READER, None) as workers:
        DocumentSource(str(corpora / "one.jsonl"), workers, 0, WHOLE)
        assert workers.pids() == []
        streamed(corpora / "one.jsonl", workers=workers)
        pids = workers.pids()
        assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "usable_cores", lambda: 32)
    started: list[int] = []
    monkeypatch.setattr(DocumentWorkers, "_start", lambda self, workers: started.append(workers))
    for ranks in (1, 4, 64):
        DocumentWorkers(READER, None, ranks).need()
    assert started == [8, 4, 1]


def test_a_lost_worker_is_named(corpora: Path) -> None:
    with DocumentWorkers(READER, 1) as workers:
        documents = streamed(corpora / "one.jsonl", workers=workers)
        (pid,) = workers.pids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            InfrastructureError, match=rf"one\.jsonl, bytes [\d,]+ to [\d,]+: the process {pid} .*SIGKILL"
        ):
            texts(documents, COUNT)


def test_a_dataset_that_the_library_loads_is_streamed(corpora: Path, tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    documents = streamed(tmp_path / "saved", 4)
    assert set(texts(documents, COUNT - 4)) == set(TEXTS[:-4])
    assert set(texts(streamed(f"{tmp_path / 'saved'}@[:400]"), 400)) == set(TEXTS[:400])


# --- torn, changed and missing documents


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a', "not JSON: "),
        (b'{"text": "\xff"}', "not UTF-8: .*; convert the file"),
        (b'{"texts": "a"}', "neither `text` .*; mend or remove the document"),
        (b'{"text": "a\\ud800b"}', r"a lone surrogate, '\\ud800'.*; mend or remove the document"),
    ],
)
def test_a_torn_document_is_named_before_anything_is_trained(
    tmp_path: Path, name: str, line: bytes, message: str, two_workers: DocumentWorkers
) -> None:
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    lines[431] = line
    content = b"\n".join(lines)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for workers in (HERE, two_workers):
        with pytest.raises(UserError, match=rf"{name}:432: .*{message}"):
            streamed(tmp_path / name, workers=workers)


def test_a_torn_file_is_named(tmp_path: Path, corpora: Path) -> None:
    for name in ("packed-0.jsonl.gz", "one.jsonl.zst", "one.parquet"):
        content = (corpora / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=rf"{name}: cannot be read"):
            streamed(tmp_path / name)
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match=r"other\.parquet: row 1: neither `text`"):
        DocumentSource(str(tmp_path / "other.parquet"), HERE, 0, WHOLE)


def test_files_without_documents(tmp_path: Path) -> None:
    for name, content in (("empty.jsonl", ""), ("blank.jsonl", "\n \n" * 4000)):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=rf"{name}: holds no documents"):
            DocumentSource(str(tmp_path / name), HERE, 0, 4000)


@pytest.mark.parametrize("held_out", [COUNT, COUNT + 1])
@pytest.mark.parametrize("buffer", [4000, WHOLE])
def test_held_out_documents_leave_some(corpora: Path, held_out: int, buffer: int) -> None:
    with pytest.raises(
        UserError, match=rf"held_out_documents = {held_out} leaves none of its 600 documents to train on"
    ):
        DocumentSource(str(corpora / "one.jsonl"), HERE, 0, buffer, held_out)


@pytest.mark.parametrize("name", ["one.jsonl", "one.csv", "*.csv"])
def test_a_file_that_changes_under_a_run(tmp_path: Path, corpora: Path, name: str) -> None:
    path = tmp_path / name.replace("*", "some")
    content = (corpora / "one.jsonl").read_bytes() if path.suffix == ".jsonl" else "\n".join(["text", *TEXTS]).encode()
    path.write_bytes(content)
    documents = streamed(tmp_path / name)
    texts(documents, 1)
    path.write_bytes(content[:-100])
    said = rf"{name.replace('*', '.')}: was changed while the run reads it \([\d,]+ bytes, were [\d,]+\)"
    with pytest.raises(UserError, match=said):
        texts(documents, COUNT)


@pytest.mark.parametrize("buffer", [4000, WHOLE])
def test_tokens_of_a_prompt_are_of_given_ids_alone(tmp_path: Path, buffer: int) -> None:
    row = json.dumps({"text": "five words and some more", "token_ids": [1, 2, 3], "prompt_tokens": 2})
    (tmp_path / "d.jsonl").write_text(f"{row}\n" * 200)
    with pytest.raises(UserError, match=r"d\.jsonl:1: prompt_tokens counts `token_ids`, and this document is text"):
        DocumentSource(str(tmp_path / "d.jsonl"), HERE, 0, buffer)


def test_what_changed_since_a_checkpoint_is_said(tmp_path: Path) -> None:
    def write(name: str, some: Sequence[str]) -> None:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in some))

    for part in range(4):
        write(f"part-{part}.jsonl", TEXTS[100 * part : 100 * part + 100])
    pattern = f"{tmp_path}/part-*.jsonl"
    before = mixed(streamed(pattern))
    recorded = json.loads(json.dumps(before.fingerprint))
    assert before.changes(recorded) == []
    write("part-0.jsonl", TEXTS[:90])
    write("part-1.jsonl", [*TEXTS[100:199], "other"])
    (tmp_path / "part-2.jsonl").rename(tmp_path / "part-9.jsonl")
    assert mixed(streamed(pattern)).changes(recorded) == [
        "part-0.jsonl has 90 documents, had 100",
        "part-1.jsonl has other documents, 100 as before",
        "part-2.jsonl is missing",
        "part-9.jsonl is new",
    ]
    other = DocumentMixture([DocumentSource(pattern, HERE, 0, 8000)], DocumentReader(READER.tokenizer, 32))
    assert other.changes(recorded)[:2] == ["the context has 32 tokens, was 64", "data.shuffle_mb is another one"]
    unchanged = DocumentMixture([DocumentSource(pattern, HERE, 0, 8000)], READER)
    assert unchanged.changes(mixed(streamed(pattern)).fingerprint) == ["data.shuffle_mb is another one"]
    assert before.changes("a digest") == [
        "the checkpoint is of a version of nmoe that recorded other things of its documents"
    ]


def test_files_of_one_name_in_several_directories(tmp_path: Path) -> None:
    for part in "abc":
        (tmp_path / part).mkdir()
        (tmp_path / part / "d.jsonl").write_text(json.dumps({"text": part}) + "\n")
    recorded = mixed(DocumentSource(f"{tmp_path}/*/d.jsonl", HERE, 0, WHOLE)).fingerprint
    (tmp_path / "b/d.jsonl").write_text('{"text": "other"}\n')
    now = mixed(DocumentSource(f"{tmp_path}/*/d.jsonl", HERE, 0, WHOLE))
    assert now.changes(recorded) == ["d.jsonl (2) has other documents, 1 as before"]


def test_spans_divide_lines_at_their_beginnings(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "aa"}\n' * 10)
    for each in (1, 7, 14, 15, 16, 149, 150, 1000):
        spans = spans_of(str(tmp_path / "a.jsonl"), each)
        assert sum(READER.check(span).documents for span in spans) == 10
        assert spans[-1].last == 150
