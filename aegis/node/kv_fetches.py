"""KV that instances want from other machines, on its way."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from aegis.core.ids import InstanceId, MachineId
from aegis.core.messages import FetchKv, KvFetched
from aegis.process.tasks import watched


class Fetching(Protocol):
    """The way in which KV gets from one machine to another."""

    async def fetch(self, wanted: FetchKv, into: MachineId) -> str:
        """The reason why it did not come; empty if it did. Nothing writes to the host blocks any more when it
        returns."""
        ...


class Fetches:
    """The fetches of one node. `answer` is called when a fetch has ended, unless the instance is lost."""

    def __init__(self, fetching: Fetching, answer: Callable[[InstanceId, KvFetched], None]) -> None:
        self._fetching = fetching
        self._answer = answer
        self._under_way: defaultdict[InstanceId, set[asyncio.Task[None]]] = defaultdict(set)
        self._lost: set[InstanceId] = set()

    def begin(self, instance: InstanceId, into: MachineId, wanted: FetchKv) -> None:
        task = watched(self._fetch(instance, into, wanted))
        self._under_way[instance].add(task)
        task.add_done_callback(self._under_way[instance].discard)

    async def lost(self, instance: InstanceId) -> None:
        """Nothing waits for KV that the instance wanted. When this returns, nothing is written to its blocks any
        more."""
        under_way = self._under_way.pop(instance, set())
        self._lost.add(instance)
        if under_way:
            await asyncio.wait(under_way)
        self._lost.discard(instance)

    async def _fetch(self, instance: InstanceId, into: MachineId, wanted: FetchKv) -> None:
        reason = await self._fetching.fetch(wanted, into)
        if instance not in self._lost:
            self._answer(instance, KvFetched(wanted.request, wanted.attempt, reason))
