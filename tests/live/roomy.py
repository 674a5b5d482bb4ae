"""What is known of the server `roomy`, whose device holds all of the market, and of the services that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from tests.brokers import Broker
from tests.redis_server import RedisServer

DEVICE_MIB = 64
FLOOR_MIB = 2


@dataclass(frozen=True, slots=True)
class Services:
    """A user's own Redis and broker."""

    redis: RedisServer
    broker: Broker
