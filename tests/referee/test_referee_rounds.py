"""Rounds over nmoe's own server: right, and with a fault that is put into it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from referee_servers import choose, drawn_checkpoint, serving

from nmoe.referee.checks import CATALOGUE
from nmoe.referee.command import hold_round, judge_of
from nmoe.referee.faults import FAULTS
from nmoe.referee.judge import Judge
from nmoe.referee.rounds import Round, hold

# A busy machine takes minutes for a whole round.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Judge, Path]]:
    checkpoint = drawn_checkpoint(tmp_path_factory.mktemp("referee") / "moe", "moe_tied", seed=3)
    judge, _ = judge_of(checkpoint, "float32")
    with serving(checkpoint, faulty=True) as url:
        yield url, judge, checkpoint


def round_of(faulty: tuple[str, Judge, Path], fault: str, draw: int, only: list[str]) -> Round:
    choose(faulty[0], fault, draw)
    return asyncio.run(hold(faulty[0], faulty[1], seed=draw, publish=True, only=only, deadline_s=120))


def test_a_right_server_passes_every_check(faulty: tuple[str, Judge, Path]) -> None:
    round_ = round_of(faulty, "", 1, [])
    assert round_.faults() == []
    skipped = {outcome.check.name: outcome.why for outcome in round_.outcomes if outcome.state == "skipped"}
    assert skipped.pop("publishes.asleep") == "the server has no sleep"
    assert skipped.pop("ends.text") == "needs a route of texts, which this server does not speak"
    assert not skipped, "requests run across a publication even of a small model"
    assert len(round_.outcomes) == len(CATALOGUE) >= 40


@pytest.mark.parametrize(
    ("fault", "only"),
    [
        ("tied_head_stale", ["publishes.full"]),
        ("expert_stale", ["publishes.full"]),
        ("experts_swapped", ["publishes.full"]),
        ("experts_unpacked", ["publishes.full"]),
        ("stale_keys", ["publishes.full"]),
        ("stale_values", ["publishes.full"]),
        ("salt_ignored", ["publishes.full"]),
        ("partial_update", ["publishes.full", "publishes.partial"]),
        ("torn_update", ["publishes.full", "publishes.torn"]),
        ("wrong_version_span", ["publishes.full", "publishes.flight"]),
        ("logprob_shifted", ["logprobs.plain"]),
        ("other_temperature", ["logprobs.temperature"]),
        ("other_kept_set", ["logprobs.both", "logprobs.kept"]),
        ("missing_end", ["ends.one"]),
        ("abort_ignored", ["aborts.named"]),
        ("duplicated_answer", ["seeds.n"]),
        ("late_answer", ["concurrency.own"]),
    ],
)
def test_a_fault_is_named_as_what_it_is(faulty: tuple[str, Judge, Path], fault: str, only: list[str]) -> None:
    round_ = round_of(faulty, fault, 5, only)
    assert [name for name, _ in round_.faults()][:1] == [fault]
    assert FAULTS[fault].title


def test_a_sample_that_repeats_another_under_an_index_of_its_own_is_named(faulty: tuple[str, Judge, Path]) -> None:
    assert choose(faulty[0], "duplicated_answer", 1)["variant"] == 1
    (outcome,) = round_of(faulty, "duplicated_answer", 1, ["seeds.n"]).outcomes
    assert [finding.fault for finding in outcome.findings] == ["duplicated_answer"]
    assert "are the same 16 tokens" in outcome.findings[0].seen


def test_checks_that_follow_a_round_know_what_it_found(faulty: tuple[str, Judge, Path]) -> None:
    first = round_of(faulty, "expert_stale", 3, ["publishes.full"])
    later = hold(faulty[0], faulty[1], seed=3, publish=True, only=["publishes.flight"], deadline_s=120, follows=first)
    (outcome,) = asyncio.run(later).outcomes
    assert (outcome.state, outcome.why) == ("skipped", "an earlier check found that publications do not arrive whole")


def test_another_checkpoint_of_the_same_shape_is_another_model(faulty: tuple[str, Judge, Path], tmp_path: Path) -> None:
    choose(faulty[0], "", 0)
    judge, _ = judge_of(drawn_checkpoint(tmp_path / "other", "moe_tied", seed=4), "float32")
    round_ = asyncio.run(hold(faulty[0], judge, seed=1, only=["logprobs.plain"], deadline_s=120))
    assert [name for name, _ in round_.faults()] == ["other_model"]


def test_a_reproduction_runs_without_nmoe(faulty: tuple[str, Judge, Path], tmp_path: Path) -> None:
    url, _, checkpoint = faulty
    choose(url, "logprob_shifted", 1)
    lines, page = list[str](), tmp_path / "page.html"
    code = hold_round(url, checkpoint, lines.append, only=["logprobs.plain"], evidence=tmp_path, html=page)
    assert code == 1
    assert any("most likely: log-probabilities off by one token (logprobs.plain)" in line for line in lines)
    (script,) = tmp_path.glob("*.py")
    assert script.name == "logprobs.plain_logprob_shifted_0.py"
    shown = subprocess.run(
        [sys.executable, "-I", str(script), url], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert "POST /inference/v1/generate 200" in shown
    assert "right, for the sample that differed most: [-" in shown
    assert "nmoe" not in script.read_text().replace("NMOE", "").replace("/nmoe/", "")
    assert "log-probabilities off by one token" in page.read_text()
    choose(url, "", 0)
