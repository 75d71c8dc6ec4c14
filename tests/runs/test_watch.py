"""The alarm over expert load: thresholds, hysteresis and what it says, step by step."""

import pytest

from nmoe.runs.watch import WARM_UP_STEPS, ExpertWatch


def step(violation: float, dead: float = 0.0, layer: int = 0) -> dict[str, float]:
    return {f"expert_load_max_violation/{layer}": violation, f"dead_experts/{layer}": dead, "loss": 1.0}


def warm(experts: int) -> ExpertWatch:
    """A watch that has seen the steps that it does not look at, however bad."""
    watch = ExpertWatch(experts)
    assert all(watch.observe(step(7.0, dead=experts)) is None for _ in range(WARM_UP_STEPS))
    return watch


def raised(watch: ExpertWatch, steps: list[dict[str, float]]) -> list[int]:
    """The steps, counted from 0, that raise an alarm."""
    messages = [watch.observe(metrics) or "" for metrics in steps]
    return [place for place, message in enumerate(messages) if message.startswith("experts collapse")]


def test_the_uneven_start_of_a_fresh_router_is_no_alarm_and_the_end_of_one_is_told() -> None:
    watch = ExpertWatch(8)
    messages = [watch.observe(step(3.0 if place < 20 else 0.5)) for place in range(30)]
    told = {place: message.partition(":")[0] for place, message in enumerate(messages) if message}
    assert told == {
        14: "experts collapse in layer 0 (its busiest expert has 4.0 times its share, 0% have nothing to do) for 5 steps",
        24: "experts have recovered in layer 0",
    }
    watch = ExpertWatch(8)
    assert [watch.observe(step(3.0 if place < 8 else 0.5)) for place in range(30)] == [None] * 30


def test_raised_once_after_five_steps_in_a_row() -> None:
    assert raised(warm(8), [step(2.0)] * 20) == [4]
    assert raised(warm(8), [step(1.99)] * 20) == []
    assert raised(warm(8), [*[step(5.0)] * 4, step(1.5), *[step(5.0)] * 4]) == []


@pytest.mark.parametrize(("experts", "dead", "steps"), [(8, 4, [4]), (8, 3, []), (64, 32, [4]), (64, 31, [])])
def test_dead_experts_raise_it_too(experts: int, dead: float, steps: list[int]) -> None:
    assert raised(warm(experts), [step(0.5, dead)] * 9) == steps


def test_armed_again_only_after_it_has_recovered() -> None:
    bad, between, good = [step(3.0)] * 5, [step(1.5)] * 9, [step(0.9, dead=1)] * 5
    assert raised(warm(8), [*bad, *between, *bad]) == [4]
    assert raised(warm(8), [*bad, *good[:4], *bad]) == [4]
    assert raised(warm(8), [*bad, *good, *bad]) == [4, 14]
    still_dead = [step(0.9, dead=2)] * 5  # a quarter of 8
    assert raised(warm(8), [*bad, *still_dead, *bad]) == [4]


def test_layers_are_watched_apart_and_named() -> None:
    watch = warm(8)
    for _ in range(4):
        assert watch.observe(step(3.0) | step(0.1, layer=1) | step(2.5, 6, layer=11)) is None
    message = watch.observe(step(3.0) | step(0.1, layer=1) | step(2.5, 6, layer=11))
    assert message == (
        "experts collapse in layer 0 (its busiest expert has 4.0 times its share, 0% have nothing to do), layer 11 (its busiest "
        "expert has 3.5 times its share, 75% have nothing to do) for 5 steps: raise router_aux_loss_coef, or router_bias_rate "
        "where the router balances by its bias"
    )


def test_a_dense_model_and_a_skipped_step_raise_nothing() -> None:
    watch = ExpertWatch(0)
    assert raised(watch, [{"loss": 1.0}] * 9) == []
    watch = warm(8)
    assert raised(watch, [*[step(3.0)] * 4, {"skipped": 1.0}, step(3.0)]) == [
        5
    ]  # a step without an update says nothing
