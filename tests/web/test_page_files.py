"""The files of the pages as their servers send them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from nmoe.dashboard.page import PAGE as DASHBOARD
from nmoe.serve.page import PAGE as CHAT
from nmoe.web import SHARED, Page

PAGES = {"chat": CHAT, "dashboard": DASHBOARD}
TRUSTED = {"chat": "dompurify", "dashboard": "'none'"}
LIBRARIES = {"chat": ("marked", "dompurify", "katex"), "dashboard": ("uplot",)}
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".woff2": "font/woff2",
    ".svg": "image/svg+xml",
}


@pytest.fixture(params=PAGES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def page(name: str) -> Page:
    return PAGES[name]


@pytest.fixture
def client(page: Page) -> TestClient:
    return TestClient(Starlette(routes=page.routes()))


def own(page: Page) -> dict[str, Path]:
    """The page's files that are nobody else's, by their addresses."""
    return {at: file for at, file in page.paths().items() if not at.startswith("vendored/")}


def test_every_file_is_sent_with_its_type_and_the_policy(name: str, page: Page, client: TestClient) -> None:
    assert set(page.folder.rglob("*.js")) | set(SHARED.rglob("*.*")) < set(page.paths().values())
    for at, file in page.paths().items():
        reply = client.get(f"/page/{at}")
        assert reply.content == file.read_bytes()
        assert reply.headers["content-type"].startswith(KINDS.get(file.suffix, "text/plain"))
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").content == (page.folder / "index.html").read_bytes()
    policy = dict(part.split(" ", 1) for part in client.get("/").headers["content-security-policy"].split("; "))
    closed = ("object-src", "base-uri", "frame-ancestors", "form-action")
    assert policy == {
        "default-src": "'self'", "style-src": "'self'", "img-src": "'self' data:", "font-src": "'self'",
        "require-trusted-types-for": "'script'", "trusted-types": TRUSTED[name], **dict.fromkeys(closed, "'none'"),
    }  # fmt: skip


def test_a_browser_fetches_a_file_again_only_if_it_changed(page: Page, client: TestClient) -> None:
    first = client.get("/page/js/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = client.get("/page/js/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again.headers
    assert client.get("/page/js/main.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.head("/").headers["content-length"] == str((page.folder / "index.html").stat().st_size)


@pytest.mark.parametrize(
    "file",
    ["__init__.py", "nothing.js", "../../../pyproject.toml", "%2e%2e/__init__.py", "js", "", "vendored/SHA256SUMS"],
)
def test_no_other_file_is_sent(client: TestClient, file: str) -> None:
    assert client.get(f"/page/{file}").status_code == 404


def test_libraries_are_as_npm_has_them(name: str, page: Page) -> None:
    vendored = page.folder / "vendored"
    sums = dict(reversed(line.split("  ", 1)) for line in (vendored / "SHA256SUMS").read_text().splitlines())
    there = {f"./{file.relative_to(vendored)}" for file in vendored.rglob("*") if file.is_file()}
    assert there == {*sums, "./SHA256SUMS"}
    for file, digest in sums.items():
        assert hashlib.sha256((vendored / file).read_bytes()).hexdigest() == digest, file
    for library in LIBRARIES[name]:
        assert len((vendored / f"{library}.LICENSE").read_text()) > 500


def test_own_files_make_no_html_of_text_and_name_no_other_site(page: Page) -> None:
    for at, file in own(page).items():
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), at
        assert not re.search(r"\bstyle=|\bon[a-z]+=\"|<script>|<style", text) or file.suffix == ".js", at
        named = re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}", text)
        assert [site for site in named if not site.startswith("http://www.w3.org")] == [], at
        for script, of_page in re.findall(r'(?:from |import\()"\./([^"]+)"|(?:href|src)="page/([^"]+)"', text):
            assert (f"js/{script}" if script else of_page) in page.paths(), (at, script, of_page)
