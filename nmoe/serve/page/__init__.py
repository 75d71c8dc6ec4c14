"""The chat page at `/`: files that a browser loads, and the headers that keep it from running or asking for anything else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_HERE = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".LICENSE": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; object-src 'none'; base-uri 'none'; "
    "frame-ancestors 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
"""The page's content security policy: no script or style but from its files, and no request but to its server. A text becomes HTML
through DOMPurify alone."""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    headers: dict[str, str]


def routes() -> list[Route]:
    """Returns the routes of the page's files. They hold nothing secret, so they need no key."""
    return [Route("/", _page), Route("/page/{name:path}", _file)]


async def _page(asking: Request) -> Response:
    return _answer(asking, _files()["index.html"])


async def _file(asking: Request) -> Response:
    file = _files().get(asking.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return _answer(asking, file)


def _answer(asking: Request, file: _File) -> Response:
    known = {tag.strip().removeprefix("W/") for tag in asking.headers.get("if-none-match", "").split(",")}
    if file.headers["etag"] in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.body, headers=file.headers)


@cache
def _files() -> dict[str, _File]:
    """Reads all files once, so that no request can name another. A browser keeps them, and asks each time whether they changed."""
    files = dict[str, _File]()
    for path in sorted(_HERE.rglob("*")):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            about = {"content-type": _TYPES[path.suffix], "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
            files[path.relative_to(_HERE).as_posix()] = _File(body, _HEADERS | about | {"cache-control": "no-cache"})
    return files
