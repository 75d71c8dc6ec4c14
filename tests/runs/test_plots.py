"""Curves: which are drawn, and what through."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from nmoe.errors import UserError
from nmoe.runs.charts import plot_curves, running_mean


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, to look into."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_a_curve_goes_through_the_steps_that_have_its_name(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics = [{"step": 1, "a": 0.5}, {"step": 2, "a": 0.25, "b": 3.0}, {"step": 4, "b": 5.0}]
    path = plot_curves(metrics, ["a", "b", "absent"], tmp_path / "plots" / "x.png", "Title", "unit")
    assert path == tmp_path / "plots" / "x.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert lines == {"a": [[1, 0.5], [2, 0.25]], "b": [[2, 3], [4, 5]]}
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == ("Title", "step", "unit")
    assert axes.get_ylim()[0] == 0
    assert axes.get_yscale() == "linear"


def test_nothing_to_draw_draws_nothing(tmp_path: Path) -> None:
    assert plot_curves([{"step": 1}], ["a"], tmp_path / "x.png", "Title", "unit") is None
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(("values", "scale"), [((1e-8, 0.0), "log"), ((0.0, 0.0), "linear")])
def test_a_logarithmic_scale_needs_a_positive_value(
    tmp_path: Path, drawn: list[Figure], values: tuple[float, float], scale: str
) -> None:
    metrics = [{"step": step, "a": value} for step, value in enumerate(values)]
    plot_curves(metrics, ["a"], tmp_path / "x.png", "Title", "unit", log=True)
    assert drawn[0].axes[0].get_yscale() == scale


def test_a_long_curve_has_its_running_mean(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics = [{"step": step, "a": float(step % 2)} for step in range(100)]
    plot_curves(metrics, ["a"], tmp_path / "x.png", "Title", "unit")
    faint, bold = drawn[0].axes[0].lines
    assert np.asarray(faint.get_ydata()).tolist() == [row["a"] for row in metrics]
    assert np.asarray(bold.get_ydata())[-1] == pytest.approx(3 / 5)  # steps 95 to 99


def test_running_mean() -> None:
    assert running_mean(np.array([4.0, 2.0, 0.0, 6.0]), 3).tolist() == pytest.approx([4, 3, 2, 8 / 3])


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"run: pip install 'matplotlib>=3\.9'$"):
        plot_curves([{"step": 1, "a": 1.0}], ["a"], tmp_path / "x.png", "Title", "unit")
