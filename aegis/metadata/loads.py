"""The published loads and memory of instances, for readers outside: Aegis itself reads none of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import Telemetry
from aegis.core.role import Role
from aegis.metadata.keys import Keys
from aegis.metadata.lua_scripts import PUBLISH

LEASE_MS = 3_000
"""A load that was not published again for so long has no owner any more."""


class Load(Struct, frozen=True):
    """The load of one instance. Counts are of requests."""

    role: str
    queued: int
    running: int
    running_model: ModelId | None
    resident: tuple[ModelId, ...]
    loading: tuple[ModelId, ...] = ()


def loads_of(reports: Mapping[InstanceId, Telemetry], roles: Mapping[InstanceId, Role]) -> dict[InstanceId, Load]:
    """The load of each instance, as it said last."""
    return {
        instance: Load(roles[instance], told.queued, told.running, told.running_model, told.resident, told.loading)
        for instance, told in reports.items()
    }


class Loads:
    """The loads of a cluster."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._key = keys.loads
        self._publish = redis.register_script(PUBLISH)

    async def publish(self, loads: Mapping[InstanceId, Load]) -> None:
        """Raises one of `connection.FAILURES`."""
        words: list[str | bytes] = []
        for instance, load in loads.items():
            words += (instance, msgspec.json.encode(load))
        await self._publish(keys=[self._key], args=[LEASE_MS, *words])
