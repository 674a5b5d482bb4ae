"""Names of things. Every ordering in aegis ends in one of these, so each sorts totally."""

from typing import NamedTuple, NewType

ModelId = NewType("ModelId", str)
"""The name a client puts in `model`."""

MODEL_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}"
"""The pattern of a whole model name."""

ProxyId = NewType("ProxyId", int)
"""A proxy's process. One that is started again has another, so nothing of the lost one is ever taken for its."""

RequestId = NewType("RequestId", int)
"""One sequence being generated; increasing in order of arrival at its proxy, whose number is in the high bits. A call
with n choices makes n of them."""

_COUNT_BITS = 40

InstanceId = NewType("InstanceId", str)
"""`prefill-0`, `decode-3`: a place in the pool. Outlives the process that fills it."""

MachineId = NewType("MachineId", str)
"""A machine that instances are on, as long as its memory lasts: one that comes back has another. Empty if there is
but one."""

ONLY_MACHINE = MachineId("")

SlabId = NewType("SlabId", int)
"""A slab's position in its region: it starts at `slab * slab_bytes`."""

BlockId = NewType("BlockId", int)
"""A KV block within a region, for one shape: `slab * blocks_per_slab + index`."""


class PageRun(NamedTuple):
    """Adjacent extents `[start, stop)` of a device's page pool, or of the host's image cache."""

    start: int
    stop: int

    @property
    def pages(self) -> int:
        return self.stop - self.start


def nth_request(proxy: ProxyId, count: int) -> RequestId:
    """The proxy's request number `count`. Those of proxy 0 are numbered just so."""
    return RequestId(proxy << _COUNT_BITS | count)


def proxy_of(request: RequestId) -> ProxyId:
    """The proxy that the request came from, and that its tokens go to."""
    return ProxyId(request >> _COUNT_BITS)


BlockRun = tuple[int, int]
"""Adjacent KV blocks `[start, stop)` of one shape in one region, which may go on from slab to slab."""
