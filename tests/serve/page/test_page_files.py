"""The page's files as the server sends them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from nmoe.serve import page

HERE = Path(page.__file__).parent
OWN = sorted([HERE / "index.html", *(HERE / "js").iterdir(), *(HERE / "css").iterdir()])
VENDORED = HERE / "vendored"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page.routes()))


def test_every_file_is_sent_with_its_type_and_the_policy(client: TestClient) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".woff2": "font/woff2"}
    for file in [*OWN, *VENDORED.rglob("*.*")]:
        reply = client.get(f"/page/{file.relative_to(HERE)}")
        assert reply.content == file.read_bytes()
        assert reply.headers["content-type"].startswith(kinds.get(file.suffix, "text/plain"))
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").content == (HERE / "index.html").read_bytes()
    policy = dict(part.split(" ", 1) for part in client.get("/").headers["content-security-policy"].split("; "))
    closed = ("object-src", "base-uri", "frame-ancestors", "form-action")
    assert policy == {
        "default-src": "'self'", "style-src": "'self'", "img-src": "'self' data:", "font-src": "'self'",
        "require-trusted-types-for": "'script'", "trusted-types": "dompurify", **dict.fromkeys(closed, "'none'"),
    }  # fmt: skip


def test_a_browser_fetches_a_file_again_only_if_it_changed(client: TestClient) -> None:
    first = client.get("/page/js/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = client.get("/page/js/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again.headers
    assert client.get("/page/js/main.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.head("/").headers["content-length"] == str((HERE / "index.html").stat().st_size)


@pytest.mark.parametrize(
    "name",
    ["__init__.py", "nothing.js", "../../../pyproject.toml", "%2e%2e/__init__.py", "js", "", "vendored/SHA256SUMS"],
)
def test_no_other_file_is_sent(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_libraries_are_as_npm_has_them() -> None:
    sums = dict(reversed(line.split("  ", 1)) for line in (VENDORED / "SHA256SUMS").read_text().splitlines())
    there = {f"./{file.relative_to(VENDORED)}" for file in VENDORED.rglob("*") if file.is_file()}
    assert there == {*sums, "./SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == digest, name
    for library in ("marked", "dompurify", "katex"):
        assert len((VENDORED / f"{library}.LICENSE").read_text()) > 500


def test_own_files_make_no_html_of_text_and_name_no_other_site() -> None:
    for file in OWN:
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
        assert not re.search(r"\bstyle=|\bon[a-z]+=\"|<script>|<style", text) or file.suffix == ".js", file
        assert re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}", text) == [], file
    for file in OWN:
        named = re.findall(r'(?:from |import\()"(\.[^"]+)"|(?:href|src)="(page/[^"]+)"', file.read_text())
        for script, of_page in named:
            assert (file.parent / script if script else HERE.parent / of_page).exists(), (file, script, of_page)
