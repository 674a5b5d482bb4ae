"""The process of the embedded broker: `amqtt` on a Unix socket. `python -m aegis.control.broker_process SOCKET`.

Only the user may enter the socket's directory and so use it. It ends with the launcher.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from typing import Any

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker

_CONFIG = {
    "listeners": {"default": {"type": "external"}},
    "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
}


class _Writer(StreamWriterAdapter):  # type: ignore[misc]
    """The other end of a Unix socket has no address; amqtt takes one without for gone."""

    def get_peer_info(self) -> tuple[str, int]:
        return "unix", 0


class _Subscriptions(dict[str, Any]):
    """Subscriptions by topic. amqtt awaits while it goes through them; a client that had just connected when another
    one subscribed or left was never served, and got no error."""

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.keys()))


async def serve(path: str) -> None:
    """Runs until it is cancelled."""
    broker = Broker(_CONFIG)
    broker._subscriptions = _Subscriptions()
    await broker.start()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await broker.external_connected(StreamReaderAdapter(reader), _Writer(writer), "default")

    server = await asyncio.start_unix_server(connected, path)
    await server.serve_forever()


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # it warns of whatever its clients do
    asyncio.run(serve(sys.argv[1]))
