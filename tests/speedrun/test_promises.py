"""What a speedrun is held to at its end."""

from __future__ import annotations

from nmoe.speedrun.promises import SCRATCH_PROMISES, shortfalls

KEPT: dict[str, float | int] = {
    "base_correctness": 0.2,
    "trained_correctness": 0.95,
    "correctness_trained_add": 0.9,
    "correctness_trained_reverse": 0.99,
    "correctness_trained_sort": 0.96,
    "format_ok": 0.998,
    "mismatch_abs_mean": 0.0,
    "mismatch_abs_max": 9.5e-7,
    "first_step_ppo_kl": 0.0,
}


def test_all_kept() -> None:
    assert KEPT.keys() == {promise.figure for promise in SCRATCH_PROMISES}
    assert shortfalls(SCRATCH_PROMISES, KEPT, "runs/x") == []


def test_every_shortfall_says_what_was_promised_and_what_to_do() -> None:
    lines = shortfalls(
        SCRATCH_PROMISES, KEPT | {"trained_correctness": 0.727, "correctness_trained_reverse": 0.296}, "runs/x"
    )
    assert [line.split(":")[0] for line in lines] == [
        "trained_correctness = 0.727, promised 0.9 to 1",
        "correctness_trained_reverse = 0.296, promised 0.75 to 1",
    ]
    assert all("try another seed with --seed" in line and "runs/x/report.md" in line for line in lines)


def test_a_base_too_good_a_mismatch_and_a_figure_that_is_none_are_shortfalls() -> None:
    for figure, value in (
        ("base_correctness", 0.36),
        ("mismatch_abs_mean", 1.1e-6),
        ("first_step_ppo_kl", -0.1),
        ("format_ok", float("nan")),
    ):
        assert len(shortfalls(SCRATCH_PROMISES, KEPT | {figure: value}, "runs/x")) == 1
    assert (
        len(
            shortfalls(SCRATCH_PROMISES, {name: value for name, value in KEPT.items() if name != "format_ok"}, "runs/x")
        )
        == 1
    )
