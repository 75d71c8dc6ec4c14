"""Stages open when their gate holds over the window, in order, and close where the gate says that they may."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.tables.rewards import CurriculumSettings, GateSettings, StageSettings, Weights
from nmoe.envs.curriculum import Curriculum
from nmoe.envs.grade import COMPONENTS
from nmoe.errors import UserError

SETTINGS = CurriculumSettings(
    window_steps=2,
    stages=(
        StageSettings(name="format", weights=Weights(format=1.0), gate=GateSettings(metric="format_ok", at_least=0.75)),
        StageSettings(
            name="reasoning",
            weights=Weights(format=0.5, reasoning=0.5),
            gate=GateSettings(metric="reasoning_ok", at_least=0.5),
        ),
        StageSettings(name="correctness", weights=Weights(format=0.1, correctness=1.0)),
    ),
)


def observe(curriculum: Curriculum, *steps: tuple[float, float]) -> list[str]:
    stages = []
    for format_ok, reasoning_ok in steps:
        curriculum.observe({"format_ok": format_ok, "reasoning_ok": reasoning_ok, "correctness": 0.0})
        stages.append(curriculum.stage)
    return stages


def test_stages_open_by_the_mean_over_the_window() -> None:
    curriculum = Curriculum(SETTINGS)
    assert (curriculum.index, curriculum.stage) == (0, "format")
    assert curriculum.weights == dict.fromkeys(COMPONENTS, 0.0) | {"format": 1.0}
    # 1.0 alone is half a window; (1.0 + 0.4) / 2 = 0.7 is too little; (0.4 + 1.0) / 2 too; (1.0 + 0.5) / 2 = 0.75 will do.
    assert observe(curriculum, (1.0, 1.0), (0.4, 1.0), (1.0, 1.0)) == ["format"] * 3
    assert observe(curriculum, (0.5, 1.0)) == ["reasoning"]
    assert curriculum.weights == dict.fromkeys(COMPONENTS, 0.0) | {"format": 0.5, "reasoning": 0.5}
    # What was measured in the stage before does not count here.
    assert observe(curriculum, (1.0, 1.0), (1.0, 1.0)) == ["reasoning", "correctness"]
    assert curriculum.index == 2
    assert curriculum.weights == dict.fromkeys(COMPONENTS, 0.0) | {"format": 0.1, "correctness": 1.0}


def test_no_stage_closes_again_unless_its_gate_says_so() -> None:
    curriculum = Curriculum(SETTINGS)
    observe(curriculum, *[(1.0, 1.0)] * 4)
    assert observe(curriculum, *[(0.0, 0.0)] * 5) == ["correctness"] * 5


def closing(close_below: float) -> CurriculumSettings:
    """`SETTINGS`, whose second stage closes again below a rate of the format."""
    first, *others = SETTINGS.stages
    assert first.gate is not None
    gate = first.gate.model_copy(update={"close_below": close_below})
    return SETTINGS.model_copy(update={"stages": (first.model_copy(update={"gate": gate}), *others)})


def test_a_stage_closes_where_the_rate_that_opened_it_is_lost() -> None:
    curriculum = Curriculum(closing(0.5))
    assert observe(curriculum, (1.0, 0.0), (1.0, 0.0)) == ["format", "reasoning"]
    # A rate between the two of the gate changes nothing: 0.75 opened, below 0.5 closes.
    assert observe(curriculum, (0.5, 0.0), (0.5, 0.0), (0.6, 0.0)) == ["reasoning"] * 3
    # One bad step of two, (0.6 + 0.3) / 2 = 0.45, is enough; in the stage before, counting begins anew.
    assert observe(curriculum, (0.3, 0.0), (1.0, 0.0), (0.4, 0.0), (1.0, 0.0)) == ["format"] * 4
    assert observe(curriculum, (0.5, 0.0)) == ["reasoning"]
    # What was measured before it opened does not close it: a window has to pass first.
    assert observe(curriculum, (0.0, 0.0), (0.0, 0.0)) == ["reasoning", "format"]


def test_a_stage_that_could_open_the_next_as_well_as_close_opens_none() -> None:
    curriculum = Curriculum(closing(0.5))
    assert observe(curriculum, (1.0, 0.0), (1.0, 0.0)) == ["format", "reasoning"]
    assert observe(curriculum, (0.0, 1.0), (0.0, 1.0)) == ["reasoning", "format"]


@given(
    st.sampled_from([SETTINGS, closing(0.4)]),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=12),
    st.integers(0, 12),
)
def test_a_resumed_curriculum_goes_on_exactly(
    settings: CurriculumSettings, steps: list[tuple[float, float]], cut: int
) -> None:
    curriculum, resumed = Curriculum(settings), Curriculum(settings)
    observe(curriculum, *steps[:cut])
    resumed.load_state(json.loads(json.dumps(curriculum.state())))
    assert observe(resumed, *steps[cut:]) == observe(curriculum, *steps[cut:])
    assert resumed.state() == curriculum.state()


def test_other_stages_are_refused() -> None:
    curriculum = Curriculum(CurriculumSettings(stages=SETTINGS.stages[2:]))
    with pytest.raises(UserError, match=r"has the stages \['format', 'reasoning', 'correctness'\], and this one has"):
        curriculum.load_state(Curriculum(SETTINGS).state())


@pytest.mark.parametrize("metrics", [{}, {"format_ok": math.nan}, {"format_ok": math.inf}])
def test_a_gate_without_its_number_is_an_error(metrics: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="gate of stage 'format' needs a finite 'format_ok'"):
        Curriculum(SETTINGS).observe(metrics)


def test_a_step_of_open_problems_says_nothing_of_correctness() -> None:
    gate = GateSettings(metric="correctness", at_least=0.5)
    first = StageSettings(name="first", weights=Weights(correctness=1.0), gate=gate)
    curriculum = Curriculum(CurriculumSettings(window_steps=2, order="any", stages=(first, SETTINGS.stages[2])))
    for metrics, stage in (({"correctness": 0.6}, "first"), ({}, "first"), ({"correctness": 0.6}, "correctness")):
        curriculum.observe(metrics)
        assert curriculum.stage == stage


def test_the_last_stage_needs_no_metric() -> None:
    curriculum = Curriculum(CurriculumSettings(stages=SETTINGS.stages[2:]))
    curriculum.observe({})
    assert curriculum.stage == "correctness"
