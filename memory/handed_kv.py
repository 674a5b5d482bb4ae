"""KV that an instance has handed over: it stays in the instance's host slabs until whoever adopts the request says that
nothing reads it any more."""

from __future__ import annotations

from aegis.core.block_runs import Blocks
from aegis.core.ids import InstanceId, MachineId, ProxyId, RequestId, proxy_of
from aegis.core.model import KvShape
from aegis.core.request import EventHandle, Job, KvHandle
from memory.slab_pool import SlabPool


class HandedKv:
    """The KV that one instance has handed over, all of it in `host`, its host slabs."""

    def __init__(self, instance: InstanceId, machine: MachineId, host: SlabPool) -> None:
        self._instance = instance
        self._machine = machine
        self._host = host
        self._handed: dict[tuple[RequestId, int], tuple[KvShape, KvHandle]] = {}

    def __len__(self) -> int:
        return len(self._handed)

    def hand(self, job: Job, shape: KvShape, blocks: Blocks, tokens: int, saved: EventHandle) -> KvHandle:
        """The address of the job's KV in these blocks, which the swap-out `saved` fills."""
        key = (job.request, job.attempt)
        assert key not in self._handed
        kv = KvHandle(self._instance, blocks, tokens, saved, self._machine)
        self._handed[key] = (shape, kv)
        return kv

    def take_back(self, job: Job) -> KvHandle:
        """The job goes on here: the blocks are its own again."""
        _, kv = self._handed.pop((job.request, job.attempt))
        return kv

    def release(self, request: RequestId, attempt: int) -> None:
        shape, kv = self._handed.pop((request, attempt))
        self._host.free_after(shape, kv.blocks, kv.ready)

    def release_all(self, proxy: ProxyId) -> None:
        """Releases the KV of all requests of the proxy."""
        for request, attempt in [key for key in self._handed if proxy_of(key[0]) == proxy]:
            self.release(request, attempt)
