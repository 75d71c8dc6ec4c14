"""Reports of runs and their plots."""

import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from nmoe.errors import UserError
from nmoe.runs.charts import plot_curves, running_mean
from nmoe.runs.directory import RunDirectory
from nmoe.runs.page import write_page
from nmoe.runs.report import PLOTS, fenced, markdown_table, markdown_text, write_report

METRICS_PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    provenance = {"seed": 3, "threads": 1, "started_utc": "2026-01-02T03:04:05Z", "argv": ["nmoe", "rl", "x|y.toml"]}
    with RunDirectory.create(tmp_path / "demo", "[run]\nsteps = 20\n", provenance, resume=False) as run:
        for step in range(1, 21):
            times = {"time_rollout_s": 3.0, "time_learn_s": 1.0, "time_step_s": 5.0}
            run.ledger.metrics(step, {"reward_mean": step / 20, "mismatch_abs_max": 1e-7} | times)
        for step, value in ((0, 0.1), (20, 0.85)):
            result = {"mode": "greedy_pass@1", "dataset": "arithmetic", "problems": 200, "value": value}
            run.ledger.evaluation(step, {"results": [result | {"low": value - 0.05, "high": value + 0.05}]})
        for step in range(15):
            run.ledger.alert({"step": step, "message": f"alert {step}"})
    return tmp_path / "demo"


def test_the_report_holds_the_last_calibration(run: Path) -> None:
    result = {"mode": "step_accuracy", "dataset": "steps", "problems": 9, "value": 0.5, "low": 0.4, "high": 0.6}
    for step in (18, 19):
        record = {
            "step": step,
            "results": [result],
            "calibration": [{"count": 7, "probability": 0.25, "rate": step / 100}],
            "ece": 0.07,
            "brier": 0.125,
        }
        (run / "eval" / f"step_{step:06d}.json").write_text(json.dumps(record))
    text = write_report(run).read_text()
    assert "Step 19: expected calibration error 0.0700, Brier score 0.1250." in text
    assert "| 7 | 0.25 | 0.19 |" in text
    assert "0.18" not in text


def test_the_report_holds_the_numbers_of_the_run(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.md"
    lines = path.read_text().splitlines()
    assert lines[0] == "# Run demo"
    assert "20 steps are recorded, 1 to 20." in lines
    assert "| reward_mean | 0.15 | 0.9 | 0.05 | 1 |" in lines  # means of 1..5 and of 16..20, over 20
    assert "| 0 | greedy_pass@1 | arithmetic | 200 | 10.0% | 5.0% to 15.0% |" in lines
    assert "| 20 | greedy_pass@1 | arithmetic | 200 | 85.0% | 80.0% to 90.0% |" in lines
    assert "| time_rollout_s | 60.0 | 60.0% |" in lines
    assert "| time_learn_s | 20.0 | 20.0% |" in lines
    assert "| time_step_s (whole steps) | 100.0 |  |" in lines
    alerts = [line for line in lines if "| alert " in line and "step" not in line]
    assert alerts == [f"| {step} | alert {step} |" for step in range(5, 15)]
    assert "| argv | nmoe rl x\\|y.toml |" in lines
    assert "steps = 20" in lines


def test_how_evaluations_failed_and_what_was_answered(run: Path) -> None:
    file = run / "eval" / "step_000020.json"
    record = json.loads(file.read_text())
    answer = {"id": "sum/1", "question": "1 + 1?", "gold": "2", "answers": ["1 + 1 is"], "correct": [False]}
    record["results"][0] |= {
        "failures": {"ok": 156, "truncated": 44},
        "sampling": {"max_tokens": 12},
        "answers": [answer | {"failures": ["truncated"]}],
    }
    file.write_text(json.dumps(record))
    text = write_report(run).read_text()
    assert "| 0 | greedy_pass@1 | arithmetic | 200 | 10.0% | 5.0% to 15.0% |  |" in text
    assert "| 80.0% to 90.0% | 44 of 200 were cut at 12 new tokens |" in text
    assert "  sum/1: 1 + 1?\n    right answer '2'\n    truncated: '1 + 1 is'\n```" in text
    assert text.splitlines()[2].endswith(" of 200 at step 20, 44 of 200 were cut at 12 new tokens")


def test_shares_of_the_time_add_up_to_no_more_than_all_of_it(run: Path) -> None:
    """Grading goes on beside sampling, in several trajectories at a time: it has no share."""
    rows = [json.loads(line) | {"time_grade_s": 4.0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(run).read_text()
    assert "| time_grade_s (beside sampling, summed over trajectories) | 80.0 |  |" in text
    assert sum(map(float, re.findall(r"^\| time_.*\| ([\d.]+)% \|$", text, re.MULTILINE))) <= 100


def test_the_report_of_a_speedrun_is_that_of_its_reinforcement_learning(run: Path, tmp_path: Path) -> None:
    (tmp_path / "speedrun").mkdir()
    run.rename(tmp_path / "speedrun" / "rl")
    assert write_report(tmp_path / "speedrun") == tmp_path / "speedrun" / "rl" / "report.md"


def test_the_pictures_are_those_of_the_recorded_metrics(run: Path) -> None:
    images = re.findall(r"!\[.*\]\((.*)\)", write_report(run).read_text())
    assert images == ["plots/reward.png", "plots/mismatch.png"]
    for image in images:
        assert (run / image).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_recorded_nothing_has_a_report(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "[run]\n", {"threads": 1}, resume=False).close()
    text = write_report(tmp_path).read_text()
    assert "No step is recorded yet." in text
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["Provenance", "Configuration"]


def test_what_is_no_run_or_no_evaluation_is_named(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match="not the directory of a run"):
        write_report(tmp_path)
    (run / "eval" / "step_000007.json").write_text('{"step": 7}')
    with pytest.raises(UserError, match=r"step_000007\.json: not an evaluation"):
        write_report(run)


def test_figures_of_a_table() -> None:
    values = [-0.0, 14183.4, -12345.6, 9999.4, 0.00001234, 1e16, float("nan")]
    assert [line.strip("| \n") for line in markdown_table(["a"], [[one] for one in values]).splitlines()[2:]] == [
        *("0", "14,183", "-12,346", "9999", "1.234e-05", "1e+16", "nan")
    ]


def test_markdown_table() -> None:
    assert markdown_table(["a", "b|c"], [[1, "x\ny"], [0.123456, "|"]]) == (
        "| a | b\\|c |\n| ---: | --- |\n| 1 | x y |\n| 0.1235 | \\| |\n"
    )
    assert markdown_table(["a"], []) == "| a |\n| --- |\n"
    with pytest.raises(ValueError, match="a row of 1 cells under a header of 2"):
        markdown_table(["a", "b"], [[1]])


def test_every_metric_of_the_pictures_and_of_the_guidelines_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)`", METRICS_PAGE.read_text(), re.MULTILINE))
    guidelines = (
        "reward_mean reward_std reward_min reward_max reward_p90 correctness has_answer has_boxed format_ok truncated "
        "response_length_mean grad_norm ppo_kl ppo_clip_ratio advantage_mean advantage_std advantage_min "
        "advantage_max entropy_mean entropy_p10 entropy_p90 log_ratio_raw_max log_ratio_max log_ratio_min ratio_max "
        "log_ratio_abs_p99 tokens_in_batch high_reward_but_wrong mismatch_kl mismatch_abs_max mismatch_abs_mean "
        "time_rollout_s time_grade_s time_learn_s time_sync_s time_step_s tokens_per_second expert_load_max_violation "
        "router_entropy dead_experts"
    )
    assert {*guidelines.split(), *(name for plot in PLOTS for name in plot.names)} <= documented


ATTACK = (
    "<script>alert(1)</script> ![x](http://e/x) `c` <http://e> [a](http://e)\n```\n<img src=x onerror=alert(1)>\n# H"
)


def test_nothing_that_a_policy_or_a_user_wrote_is_markup_in_the_report(tmp_path: Path) -> None:
    """Read by a renderer of CommonMark that lets HTML through, as many do."""
    from markdown_it import MarkdownIt

    provenance = {"seed": 3, "threads": 1, "started_utc": "2026-01-02T03:04:05Z", "argv": ["nmoe", ATTACK]}
    config = f"[run]\nsteps = 1\n[environment]\nsystem = {json.dumps(ATTACK)}\nlines = '''\n{ATTACK}'''\n"
    with RunDirectory.create(tmp_path / "a <b>bold<b>", config, provenance, resume=False) as run:
        run.ledger.metrics(1, {"reward_mean": 0.5})
        result = {"mode": "greedy_pass@1", "dataset": ATTACK, "problems": 200, "value": 0.5, "low": 0.4, "high": 0.6}
        texts = {"id": ATTACK, "question": ATTACK, "gold": ATTACK, "answers": [ATTACK]}
        result["answers"] = [texts | {"correct": [False], "failures": ["ok"]}]
        run.ledger.evaluation(1, {"results": [result]})
        run.ledger.alert({"step": 1, "message": ATTACK})
        sample = {"step": 1, "problem": ATTACK, "question": ATTACK, "text": ATTACK, "answer": ATTACK, "reward": 1.0}
        run.ledger.samples(1, [sample])
    text = write_report(tmp_path / "a <b>bold<b>").read_text()
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    tokens += [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in tokens}
    assert kinds.isdisjoint({"html_block", "html_inline", "link_open", "code_inline"})
    assert {token.attrs["src"] for token in tokens if token.type == "image"} == {"plots/reward.png"}
    titles = [token.children[0].content for token in tokens if token.type == "inline" and token.map]
    assert "H" not in titles
    # It is all there, as text.
    shown = [token.content for token in tokens if token.type == "text"]
    assert "Run a <b>bold<b>" in shown
    assert any("<script>alert(1)</script>" in one for one in shown)
    assert sum(ATTACK in token.content for token in tokens if token.type == "fence") == 1  # the configuration, verbatim


def test_fences_are_longer_than_those_inside() -> None:
    assert fenced("a", "text") == "```text\na\n```\n"
    assert fenced("a\n````\nb `c`", "") == "`````\na\n````\nb `c`\n`````\n"
    assert markdown_text("a|b\\c\n`d` [e](f) [0.1, 0.2] x_y <z> &lt;") == (
        "a\\|b\\\\c \\`d\\` [e\\](f) [0.1, 0.2] x_y &lt;z> &amp;lt;"
    )


def test_the_report_of_a_mixture_averages_its_layers_and_draws_them(run: Path) -> None:
    assert "## Experts" not in write_report(run).read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        row |= {"router_entropy/0": row["step"] / 10, "router_entropy/1": row["step"] / 20}
        row |= {"expert_load_divergence/0": 0.01 * row["step"], "expert_load_divergence/1": 0.03 * row["step"]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    text = write_report(run).read_text()
    # Means of steps 1 to 5, which is 3, and of 16 to 20, which is 18, by 0.075 and by 0.02.
    assert "| router_entropy | 0.225 | 1.35 | 0.075 | 1.5 |" in text
    assert "| expert_load_divergence | 0.06 | 0.36 | 0.02 | 0.4 |" in text
    assert "plots/expert_load_divergence.png" in text
    assert (run / "plots/router_entropy.png").read_bytes()[:4] == b"\x89PNG"
    assert "expert_load_max_violation" not in text
    assert "Routing by task" not in text


def test_the_report_shows_which_experts_each_task_takes(run: Path) -> None:
    """In layer 1, where tasks lie farthest apart at the last recorded step, and the eight experts of nine that differ most."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        row |= {"router_entropy/0": 1.0, "expert_load_divergence/0": 0.1 - row["step"] / 1000}
        row |= {"expert_load_divergence/1": row["step"] / 200}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    alike = [[1 / 9] * 9] * 2
    sums, letters = [0.0, 0.25, *[0.1] * 6, 0.15], [0.05, 0.25, 0.3, *[0.06] * 5, 0.1]
    records = [
        {"step": 1, "shares": {"sums": alike}},
        {"step": 20, "shares": {"letters": [alike[0], letters], "sums": [alike[0], sums]}},
        {"step": 21, "shares": {"sums": alike}},  # under way: its metrics are not there yet
    ]
    (run / "routing.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = write_report(run).read_text()
    assert "Routing by task in layer 1, where tasks lie farthest apart at step 20: " in text
    assert "at step 1 and at step 20. The 8 of 9 experts in which tasks differ most." in text
    experts = " | ".join(f"expert {one}" for one in (0, 2, 3, 4, 5, 6, 7, 8))
    assert f"| task | {experts} |" in text
    assert "| letters | 5.0% | 30.0% | 6.0% | 6.0% | 6.0% | 6.0% | 6.0% | 10.0% |" in text
    rest = " | ".join(["11.1% to 10.0%"] * 6)
    assert f"| sums | 11.1% to 0.0% | {rest} | 11.1% to 15.0% |" in text


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


def test_without_matplotlib_a_line_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "config.toml").write_text("[run]\nsteps = 2\n")
    (tmp_path / "provenance.json").write_text('{"resumed": []}')
    rows = [
        {"step": step, "reward_mean": 0.5, "trainer_wait_s": 1.0, "time_step_s": 2.0, "engine_idle_share": 0.0}
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = write_report(tmp_path).read_text()
    line = "Pictures need matplotlib, which is not installed; run: pip install 'matplotlib>=3.9'"
    assert f"## Curves\n\n{line}\n" in report
    assert report.count("Pictures need") == 1
    assert "](plots/" not in report
    assert "| reward_mean |" in report
    page = write_page([tmp_path], tmp_path / "page.html").read_text()
    assert page.count(f"<p>{escape(line)}</p>") == 1
    assert "<img" not in page
