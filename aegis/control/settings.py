"""The settings of every client of the bus."""

from __future__ import annotations

from msgspec import Struct

from aegis.config.mqtt_address import Address
from aegis.control.messages import PROTOCOL


class BusSettings(Struct, frozen=True, kw_only=True):
    """From the launcher to an instance. `cluster` is the launcher's, new with each start."""

    address: Address
    prefix: str
    cluster: str
    protocol: int = PROTOCOL
