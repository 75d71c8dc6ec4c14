"""What the pages of nmoe share: their files, the headers that keep a browser from running or asking for anything else, and who may
ask a server for them (`guard.py`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

SHARED = Path(__file__).parent / "shared"
"""Styles and scripts of every page."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".LICENSE": "text/plain; charset=utf-8",
}


def policy(trusted_types: str) -> str:
    """Returns a page's content security policy: no script or style but from its files, and no request but to its server. Only the
    named trusted types make HTML of a text; with 'none' nothing does."""
    return (
        "default-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; object-src 'none'; base-uri 'none'; "
        f"frame-ancestors 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types {trusted_types}"
    )


HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class Page:
    """A page at `/`. Its files lie in its folder and, at the same addresses, the shared ones."""

    folder: Path
    trusted_types: str

    def routes(self) -> list[Route]:
        """Returns the routes of the page's files. They hold nothing secret, so they need no key."""
        return [Route("/", self._page), Route("/page/{name:path}", self._file)]

    async def _page(self, asking: Request) -> Response:
        return _answer(asking, self._files["index.html"])

    async def _file(self, asking: Request) -> Response:
        file = self._files.get(asking.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return _answer(asking, file)

    @cached_property
    def _files(self) -> dict[str, _File]:
        """All files, read once, so that no request can name another. A browser keeps them, and asks each time whether they
        changed."""
        headers = HEADERS | {"content-security-policy": policy(self.trusted_types), "cache-control": "no-cache"}
        files = dict[str, _File]()
        for name, path in self.paths().items():
            body = path.read_bytes()
            about = {"content-type": _TYPES[path.suffix], "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
            files[name] = _File(body, headers | about)
        return files

    def paths(self) -> dict[str, Path]:
        """Returns the files by their addresses below `/page/`."""
        return {
            path.relative_to(folder).as_posix(): path
            for folder in (SHARED, self.folder)
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES
        }


def _answer(asking: Request, file: _File) -> Response:
    known = {tag.strip().removeprefix("W/") for tag in asking.headers.get("if-none-match", "").split(",")}
    if file.headers["etag"] in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.body, headers=file.headers)
