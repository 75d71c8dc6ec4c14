"""The HTML report: it holds the numbers of its runs, asks for nothing from elsewhere, and shows what models wrote as text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nmoe.cli import main
from nmoe.errors import UserError
from nmoe.runs.charts import chart
from nmoe.runs.directory import RunDirectory
from nmoe.runs.page import write_page

ATTACK = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&\x00\ud800</pre>"
VOID = {"meta", "br", "line", "circle", "polyline"}


class Strict(HTMLParser):
    """Reads a page, and fails where a tag is not closed in order. `text` is what a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += " " if tag in ("td", "th") else ""

    def handle_data(self, data: str) -> None:
        self.text += data


def make_run(path: Path, rate: float, last: float) -> Path:
    tables = '[model]\npath = "base"\n\n[records]\npath = "r"\n'
    config = f'[run]\nname = "{path.name}"\nsteps = 3\n\n{tables}\n[optimizer]\nlearning_rate = {rate}\n'
    provenance = {"started_utc": "2026-01-02T03:04:05Z", "argv": ["nmoe", "sft", ATTACK], "git_diff": f"+{ATTACK}\n"}
    with RunDirectory.create(path, config, provenance, resume=False) as run:
        for step in (1, 2, 3):
            run.ledger.metrics(step, {"loss": 4.0 if step < 3 else last})
        result = {"mode": "greedy", "dataset": ATTACK, "problems": 9, "value": 0.5, "low": 0.25, "high": 0.75}
        run.ledger.evaluation(3, {"results": [result]})
        alert = {
            "step": 2,
            "rule": "x",
            "level": "warn",
            "message": "cut at the limit",
            "remedies": ["raise it", ATTACK],
        }
        run.ledger.alert(alert)
        run.ledger.samples(
            3, [{"step": 3, "question": "2+2?", "text": ATTACK, "reward": 0.0, "answer": ATTACK, "gold": "4"}]
        )
    return path


@pytest.fixture
def page(tmp_path: Path) -> Path:
    runs = [make_run(tmp_path / "base", 0.01, 2.0), make_run(tmp_path / "wide", 0.02, 1.0)]
    return write_page(runs, tmp_path / "both.html")


def test_it_holds_the_runs_side_by_side(page: Path) -> None:
    read = Strict(page.read_text())
    headings = re.findall("<h2>(.*?)</h2>", page.read_text())
    assert headings == ["Runs", "Evaluations", "Curves", "Alerts", "Samples", "Provenance", "Configuration"]
    text = " ".join(read.text.split())
    assert "optimizer.learning_rate 0.01 0.02" in text
    assert "50.0% [25.0%, 75.0%] at step 3" in text
    assert [shown for shown in re.findall(r"([\d.]+%?)</text>", page.read_text()) if "%" in shown] == [
        "0%",
        "20%",
        "40%",
        "60%",
    ]
    assert "cut at the limit raise it" in text
    assert "code.diff" in text
    lines = [attrs["points"] for tag, attrs in read.tags if tag == "polyline"]
    assert len(lines) == 4, "an evaluation and a loss of each run"
    # Steps 1 to 3 over 62 to 550, and values 0 to 4 over 226 to 28.
    assert lines[2:] == ["62.0,28.0 306.0,28.0 550.0,127.0", "62.0,28.0 306.0,28.0 550.0,176.5"]


def test_losses_are_no_percentages_and_the_lowest_is_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "base", 0.01, 2.0)
    for step, value in ((3, 2.5), (4, 1.25), (5, 3.0)):
        loss = {"mode": "held_out_loss", "dataset": "d", "problems": 9, "value": value, "lower_is_better": True}
        (run / f"eval/step_{step:06}.json").write_text(json.dumps({"step": step, "results": [loss]}))
    page = write_page([run], tmp_path / "loss.html").read_text()
    text = " ".join(Strict(page).text.split())
    assert "run evaluation first best last base held_out_loss on d 2.5 at step 3 1.25 at step 4 3 at step 5" in text
    assert ">1</text>" in page
    assert "%</text>" not in page


def test_it_asks_for_nothing_and_runs_nothing(page: Path) -> None:
    read = Strict(page.read_text())
    assert {tag for tag, _ in read.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "base", "form"})
    assert not any(
        name in ("src", "href", "xlink:href") or name.startswith("on") for _, attrs in read.tags for name in attrs
    )
    assert "url(" not in page.read_text()
    assert "http://" not in page.read_text()
    assert "https://" not in page.read_text()
    policy = next(attrs["content"] for tag, attrs in read.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_what_a_model_wrote_is_shown_as_it_was_written(page: Path) -> None:
    shown = ATTACK.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    # Of both runs the sample, the command line, the remedy and the dataset, also of the result; it is a chart's title, too.
    assert Strict(page.read_text()).text.count(shown.removesuffix("</pre>")) == 11


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_opens_it(page: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>base, wide</title>" in shown, "no script has run"
    assert shown.count("<svg") == 2
    assert "<script" not in shown


def test_a_run_that_samples_beside_has_its_time_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "beside", 0.01, 2.0)
    times = {"trainer_wait_s": 1.0, "time_learn_s": 2.0, "time_step_s": 4.0, "engine_idle_share": 0.25}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **times}) + "\n" for step in (1, 2)))
    plain = make_run(tmp_path / "plain", 0.01, 2.0)
    strict = Strict(write_page([run, plain], tmp_path / "both.html").read_text())
    assert "Who waited for whom, steps 1 to 2" in strict.text
    assert "step 2 trains: 2.00 s" in strict.text
    assert [attrs.get("aria-label") for tag, attrs in strict.tags if tag == "svg"].count("time line") == 1
    assert "Who waited" not in Strict(write_page([plain], tmp_path / "plain.html").read_text()).text


def test_a_run_without_records_has_a_page_and_what_is_none_has_not(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "new", "[run]\n", {}, resume=False).close()
    text = Strict(write_page([tmp_path / "new"], tmp_path / "new.html").read_text()).text
    assert "Runs" in text
    assert "Curves" not in text
    with pytest.raises(UserError, match="gone: not the directory of a run"):
        write_page([tmp_path / "new", tmp_path / "gone"], tmp_path / "new.html")
    with pytest.raises(UserError, match="is a directory; --html names a file"):
        write_page([tmp_path / "new"], tmp_path)
    with pytest.raises(UserError, match="no such directory; --html names a file"):
        write_page([tmp_path / "new"], tmp_path / "gone" / "x.html")


def test_a_chart_leaves_out_what_is_not_finite() -> None:
    nan = float("nan")
    whole = chart("x", {0: [(1, 0.5), (3, 0.7)]}, bars={0: [(1, 0.4, 0.6)]})
    assert chart("x", {0: [(1, 0.5), (2, nan), (3, 0.7)]}, bars={0: [(1, 0.4, 0.6), (2, nan, nan)]}) == whole
    assert chart("x", {0: [(1, nan), (2, float("inf")), (3, -1e308)]}, log=True) == ""
    assert 'cy="' in chart("x", {0: [(1, 5e-324)]}), "a range too small to divide"


def test_charts() -> None:
    assert chart("empty", {}) == ""
    one = chart("<a>", {0: [(5, 2.0)]})
    assert ">&lt;a&gt;</text>" in one
    assert 'cx="306.0" cy="28.0"' in one, "a single step lies in the middle, at the top of 0 to 2"
    logarithmic = chart("l", {1: [(0, 1e-6), (1, 1e-4), (2, 1e-2)]}, log=True)
    assert 'points="62.0,226.0 306.0,127.0 550.0,28.0" fill="none" stroke="#D55E00"' in logarithmic
    assert re.findall(r'class="tick end">(.*?)<', logarithmic) == ["1e-06", "1e-05", "0.0001", "0.001", "0.01"]
    many = chart("m", {0: [(step, float(step % 2)) for step in range(1000)]})
    points, _ = re.findall(r'points="(.*?)"', many)  # below the running mean
    assert len(points.split()) == 334, "the means of three steps each"


# documented: nmoe report runs/base runs/wide --html both.html
def test_the_verb_writes_one_page_or_a_report_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(make_run(tmp_path / name, 0.01, 2.0)) for name in ("base", "wide")]
    for arguments, written in (
        (["--html", str(tmp_path / "both.html")], ["both.html"]),
        ([], ["base/report.md", "wide/report.md"]),
    ):
        monkeypatch.setattr(sys, "argv", ["nmoe", "report", *runs, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in written]
        assert all((tmp_path / name).exists() for name in written)
    assert json.loads((tmp_path / "base" / "provenance.json").read_text())["git_diff"] == "code.diff"


def test_a_long_curve_is_faint_below_its_running_mean() -> None:
    drawn = chart("reward", {0: [(step, float(step % 2)) for step in range(1, 101)]})
    lines = [attrs for tag, attrs in Strict(drawn).tags if tag == "polyline"]
    assert [line.get("opacity") for line in lines] == ["0.35", None]
    heights = [float(point.split(",")[1]) for point in lines[1]["points"].split()]
    # The mean of the first is 1, of the first two 1/2, and of any five 2/5 or 3/5; values 0 to 1 lie over 226 to 28.
    assert heights[:3] == pytest.approx([28.0, 127.0, 226 - 198 * 2 / 3], abs=0.06)
    assert {round(height, 1) for height in heights[5:]} == {146.8, 107.2}


def test_it_fits_a_phone(page: Path) -> None:
    read = Strict(page.read_text())
    viewport = next(attrs["content"] for tag, attrs in read.tags if attrs.get("name") == "viewport")
    assert viewport == "width=device-width, initial-scale=1"
