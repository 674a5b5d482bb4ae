"""What stands before a server in practice: Debian's nginx and haproxy, which send the requests of many clients over few
connections. Both are told what people tell them: to pass `Upgrade` on, and bodies as they come."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

_START_S = 20.0
_POLL_S = 0.01
_NGINX = """\
{user}daemon off;
worker_processes 1;
pid {directory}/pid;
error_log {directory}/errors;
events {{ worker_connections 512; }}
http {{
    log_format requests '$request';
    access_log {directory}/requests requests;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 64m;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream aegis {{ server {server}; keepalive 4; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://aegis;
            proxy_http_version 1.1;
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_set_header Host localhost;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""
_HAPROXY = """\
global
    maxconn 512
    log stdout format raw local0
defaults
    mode http
    log global
    log-format %HM\\ %HP
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    http-reuse always
frontend clients
    bind 127.0.0.1:{port}
    default_backend aegis
backend aegis
    server aegis {server} pool-max-conn 4
"""


@dataclass(frozen=True, slots=True)
class Front:
    """`requests` is a file with a line for each request that it took for one."""

    kind: str
    url: str
    requests: Path

    def took(self) -> str:
        return self.requests.read_text(encoding="utf-8", errors="replace")


@contextmanager
def running(kind: str, url: str, directory: Path) -> Iterator[Front]:
    """Before the server at `url`. Skips where the machine has none."""
    if kind == "nginx":
        config, arguments, requests = _NGINX, ["-p", str(directory), "-c"], directory / "requests"
    else:
        config, arguments, requests = _HAPROXY, ["-db", "-f"], directory / "log"
    with _running(kind, config, url, directory, arguments) as port:
        yield Front(kind, f"http://127.0.0.1:{port}", requests)


@contextmanager
def _running(name: str, config: str, url: str, directory: Path, arguments: list[str]) -> Iterator[int]:
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"no {name}; on Debian: apt-get install {name}")
    directory.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    file = directory / "config"
    user = "user root;\n" if os.getuid() == 0 else ""  # its own may not write here
    file.write_text(config.format(server=urlsplit(url).netloc, port=port, directory=directory, user=user))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([program, *arguments, str(file)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait(process, port, directory / "log")
        yield port
    finally:
        process.terminate()
        process.wait(_START_S)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        assert process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline_s, "it does not listen"
            time.sleep(_POLL_S)
        else:
            return
