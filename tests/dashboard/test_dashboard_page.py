"""The dashboard in Chromium: what it shows of runs that were made, that go on, and that are broken."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_driver import Dashboard, Server, serving
from dashboard_screenshots import pictures
from made_runs import Made, Writer
from PIL import Image
from playwright.sync_api import Browser, expect
from untrained_run import untrained_run

from nmoe.text.tokenizer import Tokenizer

# documented: python scripts/dashboard_screenshots.py

Look = Callable[..., Dashboard]


@pytest.fixture(scope="module")
def server(made: Path) -> Iterator[Server]:
    with serving(made) as server:
        yield server


def test_the_list_leads_to_a_run_and_to_several(server: Server, look: Look) -> None:
    board = look(server.url)
    lines = board.at("list").locator("tbody tr").all_inner_texts()
    assert sorted(line.split()[0] for line in lines) == ["healthy", "troubled"]
    board.main.get_by_role("link", name="troubled").click()
    assert "layer 1: expert 5 gets no token, since step 40" in board.text("overview")
    board.page.keyboard.press("g")
    board.at("list")
    for name in ("healthy", "troubled"):
        board.main.get_by_label(f"Choose {name}").check()
    board.main.get_by_role("button", name="Show the chosen together").click()
    charts = board.at("curves").locator(".chart")
    names = charts.evaluate_all("(all) => all.map((one) => one.dataset.chart)")
    assert names[:3] == ["greedy_pass@1 on sums, 95% intervals", "reward_mean", "correctness"]
    assert "2 of " not in board.page.locator("#notice").inner_text()
    expect(charts.nth(1).locator("canvas")).to_have_count(1)
    assert len(charts.nth(1).locator(".last").inner_text().split(" · ")) == 2


def test_samples_are_filtered_and_a_token_shows_its_numbers(server: Server, look: Look) -> None:
    board = look(server.url, at="#/?run=troubled&view=samples")
    board.at("samples")
    board.page.locator("#filter-problem").fill("sums/1")
    board.page.locator("#filter-problem").press("Enter")
    expect(board.page.locator("#found tbody tr").first).to_contain_text("sums/1")
    assert {row.split("\t")[1] for row in board.page.locator("#found tbody tr").all_inner_texts()} == {"sums/1"}
    board.page.locator("#found tbody tr a").first.click()
    board.at("sample")
    assert board.page.locator("#answers-beside pre").nth(1).inner_text() == "11"
    tokens = board.page.locator(".token")
    expect(tokens).to_have_count(12)
    tokens.nth(3).hover()
    facts = board.page.locator("#token-facts").inner_text()
    for word in (
        "learner's log-probability",
        "advantage",
        "entropy",
        "expert",
        "weight version",
        "mismatch",
        "share of the gradient",
    ):
        assert word in facts
    board.page.get_by_label("Colour by").select_option("advantage")
    link = board.page.url
    board.page.reload()
    board.at("sample")
    assert board.page.get_by_label("Colour by").input_value() == "advantage"
    assert board.page.url == link


ATTACKS = [
    "<img src=x onerror=pwned(1)>",
    "<script>pwned(2)</script>",
    "<svg onload=pwned(3)>",
    "</pre><iframe src=javascript:pwned(4)>",
]


def change(run: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes each sample of a step."""
    file = run / f"samples/step_{step:06d}.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        change(record)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_nothing_that_a_run_holds_is_executed(runs: Path, look: Look) -> None:
    evil = " ".join(ATTACKS)

    def attack(record: dict[str, Any]) -> None:
        record |= {
            "text": evil,
            "question": evil,
            "gold": evil,
            "answer": evil,
            "problem": evil,
            "history": [{"role": evil, "content": evil}],
        }
        record["verdict"]["reason"] = evil
        record["components"] = {evil: 1.0}

    change(runs / "troubled", 100, attack)
    with (runs / "troubled/alerts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "message": evil, "remedies": [evil], "rule": evil}) + "\n")
    config = runs / "troubled/config.toml"
    config.write_text(config.read_text() + f"\n[notes]\ntext = '''{evil}'''\n")
    with serving(runs) as server:
        board = look(server.url, at="#/?run=troubled&view=samples")
        board.at("samples")
        board.page.locator("#found tbody tr a").first.click()
        board.at("sample")
        assert board.page.locator("#messages pre").inner_text() == evil
        board.page.locator("#side-by-side").click()
        expect(board.page.locator(".side article")).to_have_count(4)
        for view in ("alerts", "config", "problems", "curves", "overview"):
            board.page.goto(f"{server.url}#/?run=troubled&view={view}")
            board.at(view)
        assert evil not in board.main.inner_html()


def test_it_follows_a_run_by_cursor_and_shows_what_is_new(tmp_path: Path, tiny: Tokenizer, look: Look) -> None:
    writer = Writer(tmp_path, Made("live", steps=200), tiny)
    for step in range(1, 31):
        writer.step(step)
    lock = (tmp_path / "live/.lock").open("w")
    lock.write(str(os.getpid()))
    lock.flush()
    fcntl.flock(lock, fcntl.LOCK_EX)
    with serving(tmp_path) as server:
        board = look(server.url, at="#/?run=live&view=curves&metrics=reward_mean")
        chart = board.at("curves").locator(".chart[data-chart=reward_mean]")
        asked: list[str] = []
        board.page.on("response", lambda reply: asked.append(reply.url))
        for step in range(31, 36):
            writer.step(step)
        rows = "(chart) => chart.querySelector('.u-legend') && window.shownSteps"
        expect(board.page.locator("#live")).to_have_text("follows the run")
        board.page.wait_for_function("() => performance.now() > 7000")
        asked_for = [url for url in asked if "/data/curves" in url]
        assert asked_for
        assert all("since=0%3A30" in url or "since=0%3A35" in url for url in asked_for), rows
        reply = server.ask("curves", runs="live", names="reward_mean", since="0:30", points=800)["runs"]["live"]
        assert reply["curves"]["reward_mean"][0] == [31, 32, 33, 34, 35]
        assert chart.locator(".last").inner_text() != ""
        # The run is killed in the middle of a line, and resumed from an earlier step: its file is another one.
        with (tmp_path / "live/metrics.jsonl").open("a") as file:
            file.write('{"step": 36, "reward_me')
        lock.close()
        board.page.reload()
        board.at("curves")
        lines = (tmp_path / "live/metrics.jsonl").read_text().splitlines()[:20]
        (tmp_path / "live/new").write_text("\n".join(lines) + "\n")
        (tmp_path / "live/new").rename(tmp_path / "live/metrics.jsonl")
        again = server.ask("curves", runs="live", names="reward_mean", since="0:35", points=800)["runs"]["live"]
        assert (again["first"], len(again["curves"]["reward_mean"][0])) == (0, 20)
        assert server.ask("runs")["runs"][0]["status"] == "ended"


def test_a_run_that_was_killed_half_deleted_or_torn_is_shown(runs: Path, look: Look) -> None:
    run = runs / "troubled"
    (run / "samples/step_000050.jsonl").write_text('{"step": 50, "reward": 1}\nno json\n[1, 2]\n')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 101, "reward_mean": 0.5}\n{"step": 102, "rew')
    (run / "provenance.json").write_text("{")
    shutil.rmtree(run / "replay")
    shutil.rmtree(run / "eval")
    (run / "samples/step_000099.safetensors").write_bytes(b"torn")
    with serving(runs) as server:
        board = look(server.url, at="#/?run=troubled")
        text = board.text("overview")
        assert "101 of 100" in text
        assert "metrics.jsonl:101" in text
        expect(board.main).to_contain_text("step_000050.jsonl:2")
        board.page.goto(f"{server.url}#/?run=troubled&view=samples&step_min=99&step_max=99")
        board.at("samples")
        board.page.locator("#found tbody tr a").first.click()
        board.at("sample")
        assert "Only what was sampled is recorded" in board.page.locator("#token-facts").inner_text()
        expect(board.page.locator(".token").first).to_have_text(re.compile("‹\\d+›"))
        shutil.rmtree(run)
        board.page.goto(f"{server.url}#/?run=troubled")
        assert "The run's folder was deleted" in board.text("overview")
        board.page.goto(f"{server.url}#/?run=troubled&view=sample&step=98&line=0")
        board.at("sample")
        assert "its file was deleted meanwhile" in board.page.locator("#notice").inner_text()
        board.page.goto(f"{server.url}#/")
        assert "deleted" in board.text("list")


def test_an_older_run_without_columns_groups_and_rules_is_shown(runs: Path, look: Look) -> None:
    run = runs / "healthy"
    for file in run.glob("samples/*.safetensors"):
        file.unlink()
    for step in range(1, 101):
        change(
            run,
            step,
            lambda record: [
                record.pop(key) for key in ("group", "left_out", "exchanges", "engines", "cached", "reason")
            ],
        )
    with serving(runs) as server:
        board = look(server.url, at="#/?run=healthy&view=samples")
        board.at("samples")
        board.page.locator("#found tbody tr a").first.click()
        board.at("sample")
        assert (
            board.page.get_by_label("Colour by").locator("option").all_inner_texts()[0]
            == "log-probability when sampled"
        )
        assert "Extracted answer" in board.main.inner_text()


def test_a_completion_of_a_million_characters_is_shown_in_parts(runs: Path, look: Look) -> None:
    def grow(record: dict[str, Any]) -> None:
        count = 250_000
        record["text"] = "word " * 200_000
        for name, value in (("token_ids", 65), ("mask", 1), ("logprobs", -0.5), ("versions", 3)):
            record[name] = [value] * count

    change(runs / "healthy", 100, grow)
    with serving(runs) as server:
        board = look(server.url, at="#/?run=healthy&view=sample&step=100&line=0")
        board.at("sample")
        assert "The first 20,000 of 1,000,000 characters." in board.main.inner_text()
        expect(board.page.locator(".token")).to_have_count(2000)
        board.page.get_by_role("button", name="Later").click()
        expect(board.page.locator(".token")).to_have_count(2000)
        expect(board.main).to_contain_text("tokens 2,000 to 3,999 of 250,000")


def test_500_runs_are_listed_and_found_by_name(made: Path, tmp_path: Path, look: Look) -> None:
    for number in range(500):
        (tmp_path / f"run{number:03d}").mkdir()
        for name in ("config.toml", "provenance.json", "metrics.jsonl"):
            (tmp_path / f"run{number:03d}" / name).symlink_to(made / "healthy" / name)
    with serving(tmp_path) as server:
        board = look(server.url)
        assert "500 of 500 runs" in board.text("list")
        board.page.locator("#find-run").fill("run123")
        expect(board.main.locator("tbody tr")).to_have_count(1)


def test_keys_dark_colours_a_phone_and_a_key(made: Path, look: Look) -> None:
    with serving(made, key="secret") as server:
        board = look(server.url, width=360, height=640, scheme="dark")
        board.page.locator("#key-dialog[open]").wait_for()
        board.page.locator("#key").fill("secret")
        board.page.locator("#key-use").click()
        board.at("list")
        board.main.get_by_role("link", name="troubled").click()
        board.at("overview")
        for key, view in enumerate(("curves", "samples", "problems", "experts", "alerts", "time", "config"), 2):
            board.page.keyboard.press(str(key))
            board.at(view)
            wide = board.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, view
        assert board.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 21, 18)"
        board.page.keyboard.press("?")
        expect(board.page.locator("#help")).to_be_visible()
        board.page.keyboard.press("Escape")
        expect(board.page.locator("#help")).to_be_hidden()
        board.page.keyboard.press("d")
        expect(board.page.locator("html")).to_have_attribute("data-theme", "light")


GUIDE = Path(__file__).parents[2] / "docs/guides/dashboard.md"
ROWS = re.findall(r"^\| ([^|]+\?) \| ([^|]+) \| ([^|]+) \|$", GUIDE.read_text(), re.MULTILINE)


def test_the_tour_asks_five_questions() -> None:
    assert len(ROWS) == 5


@pytest.mark.parametrize(("question", "clicks", "answers"), ROWS, ids=[row[0] for row in ROWS])
def test_the_tour_of_the_guide_answers_in_three_clicks(
    server: Server, look: Look, question: str, clicks: str, answers: str
) -> None:
    board, ways = look(server.url), re.findall("`([^`]+)`", clicks)
    assert 1 <= len(ways) <= 3
    board.at("list")
    for way in ways:
        before = board.page.url
        if way.startswith("Choose "):
            board.main.get_by_label(way).check()
            continue
        kind: Any = "button" if way == "What differs" else "link"
        board.main.get_by_role(kind, name=way).first.click()
        board.page.wait_for_function("(before) => location.href !== before", arg=before)
        board.page.locator("#main[data-ready]:not([data-ready=''])").wait_for()
    text = board.main.inner_text()
    for answer in re.findall("`([^`]+)`", answers):
        assert answer in text


def test_an_exported_page_works_from_a_file(runs: Path, tmp_path: Path, look: Look) -> None:
    change(runs / "troubled", 100, lambda record: record.update(question="</script><script>pwned(1)</script>"))
    command = [sys.executable, "-m", "nmoe", "dashboard", str(runs), "--export", str(tmp_path / "both.html")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.strip() == str(tmp_path / "both.html")
    board = look((tmp_path / "both.html").as_uri())
    assert "2 of 2 runs" in board.text("list")
    for name in ("healthy", "troubled"):
        board.main.get_by_label(f"Choose {name}").check()
    board.main.get_by_role("button", name="What differs").click()
    assert "optimizer.learning_rate" in board.text("config")
    board.page.keyboard.press("2")
    expect(board.at("curves").locator(".chart canvas").first).to_be_visible()
    board.page.keyboard.press("g")
    board.at("list").get_by_role("link", name="troubled").click()
    board.at("overview")
    for key, view in enumerate(("curves", "samples", "problems", "experts", "alerts", "time", "config"), 2):
        board.page.keyboard.press(str(key))
        board.at(view)
        assert board.page.locator("#notice").inner_text() == "", view
    board.page.keyboard.press("3")
    board.at("samples")
    board.page.locator("#filter-step_min").fill("100")
    board.page.locator("#filter-step_min").press("Enter")
    expect(board.page.locator("#found tbody tr").first).to_contain_text("step 100")
    board.page.locator("#found tbody tr a").first.click()
    board.at("sample")
    assert "</script><script>pwned(1)</script>" in board.main.inner_text()
    board.page.locator(".token").nth(2).hover()
    assert "advantage" in board.page.locator("#token-facts").inner_text()
    assert board.page.locator("#recompute").is_hidden()


def test_the_pictures_of_the_guide_show_something(server: Server, browser: Browser, tmp_path: Path) -> None:
    pictures(browser, server.url, tmp_path)
    for name in re.findall(r"images/(dashboard_\w+\.png)", GUIDE.read_text()):
        with Image.open(tmp_path / name) as picture:
            assert len(set(picture.convert("L").tobytes())) > 20, name


def test_a_click_recomputes_a_token_or_says_what_is_missing(tmp_path: Path, look: Look) -> None:
    run = untrained_run(tmp_path)
    with serving(run) as server:
        board = look(server.url, at="#/?run=run&view=sample&step=2&line=0")
        board.at("sample")
        recompute = board.page.get_by_role("button", name="Recompute this token")
        expect(recompute).to_be_disabled()
        board.page.locator(".token").nth(2).click()
        recompute.click()
        derived = board.page.locator("#derived")
        expect(derived.locator("pre")).to_contain_text("log-probability", timeout=120_000)
        lines = derived.locator("pre").inner_text().splitlines()
        assert lines[0].startswith(f"{run}: step 2, sample 0 of draw/")
        assert lines[1] == f"by {run / 'checkpoints/step_000001'}"
        record = json.loads((run / "samples/step_000002.jsonl").read_text().splitlines()[0])
        assert [line.split()[1:] for line in lines if line.startswith("log-probability")] == [
            [f"{record['logprobs'][2]:.9g}", "as", "recorded"]
        ]
        shutil.rmtree(run / "checkpoints/step_000001")
        recompute.click()
        expect(derived.locator(".error")).to_contain_text("Repeat with --replay", timeout=120_000)
