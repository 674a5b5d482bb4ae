"""The dashboard: `/dashboard`, a page of plain files that asks for nothing but what is here and what this server tells.

The files are for everybody; what they show comes from `/debug/live`, which is not.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, Request, Response
from msgspec import Struct
from starlette.responses import RedirectResponse

from aegis.core.errors import UserError

_FOLDER = Path(__file__).parent
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)  # pages for people, no part of the API


class _File(Struct, frozen=True):
    content: bytes
    kind: str
    tag: str


@router.api_route("/", methods=["GET", "HEAD"])
async def root() -> Response:
    """Leads a browser that has no more than the server's address to the dashboard."""
    return RedirectResponse("dashboard")


@router.api_route("/dashboard", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _reply(request, "index.html")


@router.get("/dashboard/{name}")
async def part(request: Request, name: str) -> Response:
    return _reply(request, name)


def _reply(request: Request, name: str) -> Response:
    """Raises UserError: 404 where the page has no such part."""
    file = _files().get(name)
    if file is None:
        raise UserError(f"the dashboard has no part {name[:40]!r}", status=404)
    headers = _HEADERS | {"etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


@cache
def _files() -> dict[str, _File]:
    """All there are, by name: no name that a client sends is looked for on the disk."""
    return {file.name: _read(file) for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}


def _read(file: Path) -> _File:
    content = file.read_bytes()
    return _File(content, _TYPES[file.suffix], f'"{blake2b(content, digest_size=12).hexdigest()}"')
