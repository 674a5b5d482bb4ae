"""How uvicorn runs the application."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

from proxy.http.security.http_protocol import Protocol


def make_server(app: ASGIApp, *, host: str, port: int, shutdown_s: float = 30) -> uvicorn.Server:
    """A server that is not running yet: `await server.serve(sockets)`, end it with `server.should_exit = True`.

    Requests are logged by `edge`, so uvicorn's own access log is off; logging is configured by whoever runs this.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=4096,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=shutdown_s,  # type: ignore[arg-type]  # any number of seconds will do
    )
    return uvicorn.Server(config)
