"""Modes of evaluation: what a name stands for, what does not fit it, and which results may be compared."""

import pytest

from nmoe.config.modes import Mode, mode_of, why_not_comparable
from nmoe.errors import UserError


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ({}, Mode("greedy_pass@1", 1, 0.0)),
        ({"temperature": 1.0}, Mode("sampling_pass@1", 1, 1.0)),
        ({"samples": 8, "temperature": 0.7}, Mode("sampling_pass@8", 8, 0.7)),
        ({"name": "sampling_pass@8"}, Mode("sampling_pass@8", 8, 0.6)),
        ({"name": "sampling_pass@4", "samples": 4, "temperature": 1.0}, Mode("sampling_pass@4", 4, 1.0)),
        ({"name": "greedy_pass@1", "temperature": 0.0}, Mode("greedy_pass@1", 1, 0.0)),
        ({"name": "nondet_proxy_pass@8"}, Mode("nondet_proxy_pass@8", 8, 0.0)),
    ],
)
def test_what_a_mode_stands_for(asked: dict[str, object], mode: Mode) -> None:
    assert mode_of(**asked) == mode  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"samples": 8}, "temperature 0 gives the same completion 8 times: .*nondet_proxy_pass@8"),
        (
            {"name": "greedy_pass@1", "temperature": 0.6},
            "is at temperature 0, and 0.6 is asked for; use sampling_pass@1",
        ),
        ({"name": "greedy_pass@8"}, "one completion; write greedy_pass@1"),
        ({"name": "sampling_pass@8", "temperature": 0.0}, "at temperature 0 nothing is drawn"),
        ({"name": "nondet_proxy_pass@8", "temperature": 0.6}, "use sampling_pass@8"),
        ({"name": "nondet_proxy_pass@1"}, "one greedy completion is greedy_pass@1"),
        ({"name": "sampling_pass@8", "samples": 4}, "is of 8 samples, and 4 are asked for"),
        ({"name": "sampling_pas@8"}, "is no mode: .*did you mean 'sampling_pass@8'"),
        ({"name": "sampling_pass@0"}, "is no mode"),
        ({"name": "likelihood_text"}, "samples nothing: it is a mode of `nmoe eval` on multiple choice"),
        ({"name": "likelihod_text"}, "did you mean 'likelihood_text'"),
    ],
)
def test_what_does_not_fit_a_mode(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mode_of(**asked)  # type: ignore[arg-type]


def test_results_of_different_modes_or_settings_are_not_compared() -> None:
    greedy, drawn = {"mode": "greedy_pass@1"}, {"mode": "sampling_pass@8", "sampling": {"temperature": 0.6}}
    assert why_not_comparable(greedy, drawn) == (
        "greedy_pass@1 and sampling_pass@8 are different modes, which are never compared: evaluate both in one"
    )
    warmer = {"mode": "sampling_pass@8", "sampling": {"temperature": 1.0}}
    assert why_not_comparable(drawn, warmer) == (
        "both are sampling_pass@8, but with temperature 0.6 and 1.0: evaluate both with the same settings"
    )
    assert why_not_comparable(drawn, dict(drawn)) is None
    assert why_not_comparable(drawn, {"mode": "sampling_pass@8"}) is None
