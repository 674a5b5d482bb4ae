"""The services that a market uses besides its own processes: an embedded one that ends with it, or one of the
user's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aegis.config.config import Config, Mqtt
from aegis.config.mqtt_address import Address, check_ca_file, parse
from aegis.control.bus import Bus, open_bus
from aegis.metadata.store import Store, open_store
from aegis.process.clock import MonotonicClock
from aegis.process.scratch_directory import scratch


@dataclass(frozen=True, slots=True)
class Services:
    """The bus carries the life of instances; the store has the records of requests, without it a retry is a new one.
    Sockets of all processes are in the directory."""

    directory: str
    bus: Bus
    store: Store | None


@asynccontextmanager
async def open_services(config: Config) -> AsyncIterator[Services]:
    """Raises UserError if one of them cannot be used."""
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(scratch("aegis-"))
        bus = await stack.enter_async_context(
            open_bus(_broker(config.mqtt), config.mqtt.prefix, directory, MonotonicClock())
        )
        store = None if config.redis.off else await stack.enter_async_context(open_store(config.redis))
        yield Services(str(directory), bus, store)


def _broker(mqtt: Mqtt) -> Address | None:
    if mqtt.url is None:
        return None
    if mqtt.ca_file:
        check_ca_file(mqtt.ca_file, "mqtt.ca_file")
    return parse(mqtt.url.get_secret_value(), ca_file=mqtt.ca_file)
