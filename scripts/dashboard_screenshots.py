"""Takes the pictures of the dashboard: python scripts/dashboard_screenshots.py

It makes the runs of scripts/made_runs.py, serves them, and writes docs/images/dashboard_*.png (or to --out).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from made_runs import TEXTS, TOUR, make_run
from page_screenshots import IMAGES, shot
from playwright.sync_api import Browser, Page, sync_playwright

from nmoe.text.tokenizer import Tokenizer


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The address of a dashboard of the runs."""
    command = [sys.executable, "-m", "nmoe", "dashboard", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait(30)


def opened(browser: Browser, address: str, view: str, width: int, height: int, scheme: str = "light") -> Page:
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
    page.goto(address)
    page.locator(f"#main[data-ready='{view}']").wait_for()
    return page


def pictures(browser: Browser, url: str, out: Path) -> None:
    page = opened(browser, f"{url}#/?run=healthy&run=troubled&view=curves&smooth=5", "curves", 1180, 760)
    shot(page, out / "dashboard_curves.png")
    page.context.close()

    page = opened(browser, f"{url}#/?run=troubled&view=samples&wrong=1", "samples", 1180, 760, "dark")
    page.locator("#found tbody tr a").first.click()
    page.locator("#main[data-ready='sample']").wait_for()
    page.get_by_label("Colour by").select_option("gradient_share")
    page.locator(".token").nth(4).click()
    page.locator("#token-facts").evaluate("(facts) => facts.scrollIntoView({ block: 'center' })")
    shot(page, out / "dashboard_tokens.png")
    page.context.close()

    page = opened(browser, f"{url}#/?run=troubled&view=experts&layer=1", "experts", 1180, 420)
    shot(page, out / "dashboard_experts.png")
    page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs chromium: apt-get install chromium")
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.train(TEXTS, 320)
    with tempfile.TemporaryDirectory() as directory:
        for made in TOUR:
            make_run(Path(directory), made, tokenizer)
        with served(Path(directory)) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            pictures(browser, url, options.out)
            browser.close()


if __name__ == "__main__":
    main()
