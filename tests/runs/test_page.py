"""The HTML report: it holds the numbers of its runs, asks for nothing from elsewhere, and shows what models wrote as text."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import browser as browser
from playwright.sync_api import Browser

from nmoe.cli import main
from nmoe.errors import UserError
from nmoe.runs.charts import COLOURS, Curve, chart, svg
from nmoe.runs.directory import RunDirectory
from nmoe.runs.page import write_page

ATTACK = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&\x00\ud800</pre>"
VOID = {"meta", "br", "img"}


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


def pictures(page: str) -> dict[str, str]:
    """The pictures of a page by their names, as SVG, each well-formed."""
    found = {}
    for tag, attrs in Strict(page).tags:
        if tag == "img":
            kind, _, content = (attrs["src"] or "").partition(",")
            assert kind == "data:image/svg+xml;base64"
            found[str(attrs["alt"])] = base64.b64decode(content).decode()
            ElementTree.fromstring(found[str(attrs["alt"])])
    return found


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_it_holds_the_runs_side_by_side(page: Path) -> None:
    read = Strict(page.read_text())
    headings = re.findall("<h2>(.*?)</h2>", page.read_text())
    assert headings == ["Runs", "Evaluations", "Curves", "Alerts", "Samples", "Provenance", "Configuration"]
    text = " ".join(read.text.split())
    assert "optimizer.learning_rate 0.01 0.02" in text
    assert "50.0% [25.0%, 75.0%] at step 3" in text
    assert "cut at the limit raise it" in text
    assert "code.diff" in text
    found = pictures(page.read_text())
    shown = ATTACK.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert list(found) == [f"greedy on {shown}, 95% intervals", "loss"]
    evaluated, losses = map(texts, found.values())
    assert {"0%", "20%", "40%", "60%", "step"} <= set(evaluated)
    assert [tick for tick in losses if tick in ("1", "2", "3")] == ["1", "2", "3", "1", "2", "3"], "steps, then losses"
    assert all(colour.lower() in picture for colour in COLOURS[:2] for picture in found.values())


def test_losses_are_no_percentages_and_the_lowest_is_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "base", 0.01, 2.0)
    for step, value in ((3, 2.5), (4, 1.25), (5, 3.0)):
        loss = {"mode": "held_out_loss", "dataset": "d", "problems": 9, "value": value, "lower_is_better": True}
        (run / f"eval/step_{step:06}.json").write_text(json.dumps({"step": step, "results": [loss]}))
    page = write_page([run], tmp_path / "loss.html").read_text()
    text = " ".join(Strict(page).text.split())
    assert "run evaluation first best last base held_out_loss on d 2.5 at step 3 1.25 at step 4 3 at step 5" in text
    assert not any(text.endswith("%") for text in texts(pictures(page)["held_out_loss on d, 95% intervals"]))


def test_it_asks_for_nothing_and_runs_nothing(page: Path) -> None:
    read = Strict(page.read_text())
    assert {tag for tag, _ in read.tags}.isdisjoint({"script", "link", "iframe", "object", "base", "form"})
    assert not any(name in ("href", "xlink:href") or name.startswith("on") for _, attrs in read.tags for name in attrs)
    assert all((attrs["src"] or "").startswith("data:image/svg+xml") for _, attrs in read.tags if "src" in attrs)
    assert "url(" not in page.read_text()
    assert "http://" not in page.read_text()
    assert "https://" not in page.read_text()
    policy = next(attrs["content"] for tag, attrs in read.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_what_a_model_wrote_is_shown_as_it_was_written(page: Path) -> None:
    shown = ATTACK.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    # Of both runs the sample, the command line, the remedy and the dataset, also of the result.
    assert Strict(page.read_text()).text.count(shown.removesuffix("</pre>")) == 10
    (title,) = [name for name in pictures(page.read_text()) if name.startswith("greedy")]
    assert title in texts(pictures(page.read_text())[title])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_opens_it(page: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>base, wide</title>" in shown, "no script has run"
    assert shown.count("<img") == 2
    assert "<script" not in shown


def test_a_run_that_samples_beside_has_its_time_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "beside", 0.01, 2.0)
    times = {"trainer_wait_s": 1.0, "time_learn_s": 2.0, "time_step_s": 4.0, "engine_idle_share": 0.25}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **times}) + "\n" for step in (1, 2)))
    plain = make_run(tmp_path / "plain", 0.01, 2.0)
    strict = Strict(write_page([run, plain], tmp_path / "both.html").read_text())
    assert [attrs["alt"] for tag, attrs in strict.tags if tag == "img"].count("time line") == 1
    drawn = pictures((tmp_path / "both.html").read_text())["time line"]
    assert {"Who waited for whom, steps 1 to 2", "trainer", "engines", "trains", "seconds"} <= set(texts(drawn))
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


def drawn(points: Sequence[tuple[float, float]], **options: Any) -> Any:
    """The axes of a chart of one curve."""
    figure = chart("title", "unit", [Curve("a", points, COLOURS[0])], **options)
    assert figure is not None
    return figure.axes[0]


def test_a_chart_leaves_out_what_is_not_finite() -> None:
    nan = float("nan")
    curve = Curve("", [(1, 0.5), (2, nan), (3, 0.7)], COLOURS[0], [(1, 0.4, 0.6), (2, nan, nan)])
    figure = chart("x", "", [curve])
    assert figure is not None
    axes: Any = figure.axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[1, 0.5], [3, 0.7]]
    assert [path.vertices.tolist() for path in axes.collections[0].get_paths()] == [[[1, 0.4], [1, 0.6]]]
    assert chart("x", "", [Curve("", [(1, nan), (2, float("inf")), (3, -1e308)], COLOURS[0])], log=True) is None
    assert b"<svg" in svg(drawn([(1, 5e-324)]).figure), "a range too small to divide"


def test_charts() -> None:
    assert chart("empty", "", []) is None
    assert drawn([(5, 2.0)]).get_title(loc="left") == "title"
    assert drawn([(5, 2.0)]).get_ylim()[0] == 0
    assert drawn([(0, 1e-6), (1, 1e-2)], log=True).get_yscale() == "log"
    formula = chart("$x^2$ & <a>\x00", "", [Curve("", [(1, 1.0)], COLOURS[0])])
    assert formula is not None
    assert "$x^2$ & <a>\ufffd" in texts(svg(formula).decode())
    assert svg(drawn([(1, 1.0)]).figure) == svg(drawn([(1, 1.0)]).figure)


def test_a_long_curve_is_smoothed_before_it_is_thinned() -> None:
    axes = drawn([(step, float(step % 2)) for step in range(1, 1001)])
    faint, bold = (line.get_xydata() for line in axes.lines)
    assert (len(faint), faint[0].tolist(), faint[-1].tolist()) == (334, [2.0, 2 / 3], [1000.0, 0.0])
    # The running mean over 50 steps, then means of three steps each: of 1, 1/2 and 2/3; of 1/2, 3/5 and 1/2.
    assert bold[:2, 1].tolist() == pytest.approx([(1 + 1 / 2 + 2 / 3) / 3, (1 / 2 + 3 / 5 + 1 / 2) / 3])
    assert bold[20:, 1].tolist() == pytest.approx([0.5] * (334 - 20)), "thinned first, it would be 1/3 or 2/3 somewhere"


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


def test_it_fits_a_phone(page: Path, browser: Browser) -> None:
    seen = browser.new_page(viewport={"width": 360, "height": 740})
    seen.goto(page.as_uri())
    assert seen.evaluate("document.documentElement.scrollWidth") <= 360
    widths = seen.eval_on_selector_all("img", "all => all.map(one => [one.naturalWidth > 0, one.clientWidth])")
    seen.close()
    assert len(widths) == 2
    assert all(loaded and 300 <= width <= 360 for loaded, width in widths)
