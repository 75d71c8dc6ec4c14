"""examples/notebook.ipynb: its code cells run in order in one namespace, which needs no Jupyter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


def test_the_notebook_trains_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "a notebook is committed without its outputs"
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell.replace("STEPS = 60", "STEPS = 20"), NOTEBOOK.name, "exec"), names)
    rewards, mismatches = (axis.lines[0].get_xydata() for axis in names["figure"].axes)
    assert rewards[:, 1].tolist() == [row["reward_mean"] for row in names["run"].metrics]
    assert rewards[-1, 1] > 2 * rewards[0, 1]
    assert mismatches.shape == (20, 2)
    assert (mismatches[:, 1] < 1e-5).all()
    (answer,) = eval(compile("[" + cells[-1] + "]", NOTEBOOK.name, "eval"), names)
    assert len(answer) == 2
