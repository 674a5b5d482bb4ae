"""The application behind a real uvicorn, on a free port, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aegis.core.api_keys import Keyring
from proxy.http.app import create_app
from proxy.http.security.http_protocol import Connections
from proxy.http.settings import Settings
from proxy.live.certificate import Certificate
from proxy.live.serving import make_server
from tests.unit.proxy.http.scripted import TEXTS, ScriptedMarket


@contextmanager
def serving(
    behind: ScriptedMarket, keys: Keyring | None = None, together: Connections | None = None, **settings: Any
) -> Iterator[str]:
    """The address of the server, which answers as soon as this is entered."""
    behind.keys = keys or behind.keys
    told = Settings(**settings)
    tls = Certificate(told.tls).context if told.tls else None
    app = create_app(behind, told, texts=TEXTS)
    server = make_server(app, host="127.0.0.1", port=0, shutdown_s=1, together=together, tls=tls)
    started = threading.Event()
    address: list[str] = []

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        address.append(f"{'https' if tls else 'http'}://127.0.0.1:{port}")
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield address[0]
    finally:
        server.should_exit = True
        thread.join(10)
