"""A web server with checkpoints: folders with ranges and ETags, and the part of the Hub's API that is asked for.

What may go wrong on the way can be told to it, and it remembers what it was asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class Asked:
    method: str
    path: str
    start: int
    token: str
    sent_bytes: int = 0


@dataclass(slots=True)
class CheckpointServer:
    """`wrong` files come with a byte changed, `cut` ones break off after so many bytes, as often as they are told;
    `away` answers 503 to all. Without `ranges` files come as a whole only, without `lengths` nobody knows how much of
    them is to come, without `heads` only those who ask for the files. With `dates` it says when files were modified.
    `bytes_per_s` is how fast each comes. Parts are `shifted` by so many bytes from what was asked for."""

    root: Path
    port: int = 0
    token: str = ""
    ranges: bool = True
    etags: bool = True
    dates: bool = False
    lengths: bool = True
    heads: bool = True
    away: bool = False
    bytes_per_s: float = float("inf")
    shifted: int = 0
    wrong: set[str] = field(default_factory=set)
    cut: dict[str, list[int]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked_for(self, name: str, method: str = "GET") -> list[Asked]:
        return [each for each in self.asked if each.path.endswith(name) and each.method == method]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: CheckpointServer, *arguments: object) -> None:
        self.told = server
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        asked = Asked(self.command, path, int(found[1]) if found else 0, self.headers.get("Authorization", ""))
        self.told.asked.append(asked)
        if self.told.away:
            self._send(503, b"")
        elif self.command == "HEAD" and not self.told.heads:
            self._send(405, b"")
        elif self.told.token and asked.token != f"Bearer {self.told.token}":
            self._send(401, b"")
        elif api := re.fullmatch(r"/api/models/(.+)/(revision|tree)/([^/]+)", path):
            self._hub(self.told.root / api[1], api[2], api[3])
        else:
            path = re.sub(f"/resolve/{COMMIT}/", "/", path)
            self._file(self.told.root / path.lstrip("/"), asked, found)

    def _hub(self, directory: Path, what: str, revision: str) -> None:
        if not directory.is_dir() or (what == "revision" and revision not in ("main", "v1", COMMIT)):
            self._send(404, b"{}")
        elif what == "revision":
            self._send(200, json.dumps({"sha": COMMIT}).encode())
        else:
            self._send(200, json.dumps([_entry(file) for file in sorted(directory.iterdir())]).encode())

    def _file(self, file: Path, asked: Asked, wanted: re.Match[str] | None) -> None:
        if file.is_dir():
            links = "".join(f'<a href="{entry.name}">{entry.name}</a>\n' for entry in sorted(file.iterdir()))
            self._send(200, f'<a href="../">..</a>\n{links}'.encode(), {"Content-Type": "text/html"})
            return
        if not file.is_file():
            self._send(404, b"")
            return
        content = bytearray(file.read_bytes())
        etag = {"ETag": f'"{hashlib.md5(content).hexdigest()}"'} if self.told.etags else {}
        date = {"Last-Modified": formatdate(file.stat().st_mtime, usegmt=True)} if self.told.dates else {}
        if file.name in self.told.wrong:
            content[-1] ^= 1
        headers, code, begin, end = {"Accept-Ranges": "bytes"} | etag | date, 200, 0, len(content)
        current = self.headers.get("If-Range") in (None, *etag.values(), *date.values())
        if wanted and wanted[2] and int(wanted[2]) < int(wanted[1]):
            wanted = None  # such a range is to be ignored (RFC 9110, section 14.1.1)
        if wanted and self.told.ranges and current:
            begin, end = int(wanted[1]) + self.told.shifted, min(int(wanted[2] or len(content)) + 1, len(content))
            if begin >= len(content):
                self._send(416, b"")
                return
            code, headers = 206, headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
        self._send(code, bytes(content[begin:end]), headers, asked, self.told.cut.get(file.name))

    def _send(
        self,
        code: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        asked: Asked | None = None,
        cuts: list[int] | None = None,
    ) -> None:
        self.send_response(code)
        length = {"Content-Length": str(len(body))} if self.told.lengths or not asked else {"Connection": "close"}
        for name, value in {**length, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = cuts.pop(0) if cuts else len(body)
        for at in range(0, min(stop, len(body)), _CHUNK_BYTES):
            part = body[at : min(at + _CHUNK_BYTES, stop)]
            try:
                self.wfile.write(part)
            except OSError:
                return
            if asked:
                asked.sent_bytes += len(part)
            time.sleep(len(part) / self.told.bytes_per_s)
        if stop < len(body):
            self.close_connection = True
            self.connection.close()


def _entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    entry: dict[str, object] = {"type": "file", "path": file.name, "size": len(content)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if file.suffix in (".gguf", ".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
    return entry


@contextmanager
def serving(root: Path) -> Iterator[CheckpointServer]:
    told = CheckpointServer(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, told))
    told.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
