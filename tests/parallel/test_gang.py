"""The gang: objects on every rank, shares, functions by value; and what becomes of it where a rank raises, dies or is another."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from forked_ranks import forked
from tiny_models import FAMILIES
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import collect, command, everywhere, gang
from nmoe.parallel.join import join, reports_to_torchrun


def ranks(*cases: str, missing: int = 0, port: int = 0) -> list[tuple[int | str | None, str, str]]:
    """Exit code, stdout and stderr of each rank; every rank has its own arguments. So many of the last ones are `missing`."""
    return forked("ganged.py", *map(str.split, cases), missing=missing, port=port)


def test_two_ranks_work_for_one_controller() -> None:
    for code, _, err in ranks("works", "works"):
        assert code == 0, err[-3000:]


def test_what_a_rank_raises_is_told_by_the_controller() -> None:
    (code, out, err), (other, _, _) = ranks("mistake", "mistake")
    assert (code, other) == (2, 2)
    assert "error: rank 1: config.toml:3: wrong" in err
    # At once, and not when the member has ended, which waits ten seconds for what the controller says.
    assert float(out.split()[0]) < 8


def test_a_killed_rank_ends_the_others() -> None:
    (code, out, err), (other, _, _) = ranks("kill", "kill")
    assert (code, other) == (1, -9)
    assert "error: rank 1 has ended without a word: it was killed, or out of memory" in err
    assert float(out.split()[0]) < 30


def test_ranks_that_differ_are_refused() -> None:
    (code, _, err), (other, _, quiet) = ranks("works", "works --run.seed=2")
    assert (code, other) == (2, 2), (err, quiet)
    assert "error: rank 1 has other arguments than rank 0" in err
    assert not any(line.startswith("error") for line in quiet.splitlines()), quiet


def test_a_missing_rank_is_waited_for_and_named() -> None:
    (code, _, err), (other, _, quiet) = ranks("waits", "waits", missing=1)
    assert (code, other) == (2, 2), (err, quiet)
    waiting, ends = (line for line in err.splitlines() if "rank 2 of 3" in line)
    assert waiting.startswith("waiting at 127.0.0.1:")
    assert ends.startswith("error: rank 2 of 3 did not come to 127.0.0.1:")
    assert "error: " not in quiet


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ((code, _, err),) = ranks("waits", missing=1, port=port)
    assert code == 2, err
    assert f"error: rank 0 of 2 cannot listen at 127.0.0.1:{port}: " in err
    assert "choose a free MASTER_PORT" in err


def test_machines_with_other_weights_under_one_name_are_refused(tmp_path: Path) -> None:
    for rank, seed in enumerate((0, 0, 1)):
        (tmp_path / str(rank)).mkdir()
        export_model(Transformer(ModelConfig(**FAMILIES["qwen3"])).initialize(seed), tmp_path / str(rank))
    alike = ranks(*[f"reads {tmp_path}"] * 2)
    assert [code for code, _, _ in alike] == [0, 0], alike
    (code, _, err), (other, _, _), (third, _, _) = ranks(*[f"reads {tmp_path}"] * 3)
    assert (code, other, third) == (2, 2, 2), err
    assert f"error: {tmp_path / '0'}: the machine of rank 2 has another model there than rank 0" in err


def test_an_environment_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        UserError, match=r"WORLD_SIZE = '2' in the environment, and RANK = '' is no number: .* torchrun"
    ):
        join(["train"])


def test_torchrun_gets_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the form that torchrun reads, so that its report ends with what was wrong."""
    reply = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    for error, said in (
        (UserError("config.toml:3: wrong"), "error: config.toml:3: wrong"),
        (ValueError("4"), "ValueError: 4"),
    ):
        with pytest.raises(type(error)), reports_to_torchrun():
            raise error
        report = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(reply))
        text = str(ChildFailedError("nmoe", {0: report}))
        assert any(said in line for line in text.splitlines()[-3:]), text


def test_one_process_is_a_gang_of_one() -> None:
    class Doubler:
        @command
        def double(self, number: int) -> int:
            return 2 * number

    assert gang().size == 1
    assert everywhere(int, "7") == 7
    assert collect(lambda share: share + 1, [3]) == [4]
    assert Doubler().double(4) == 8
