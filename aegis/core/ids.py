"""Names of things. Every ordering in aegis ends in one of these, so each sorts totally."""

from typing import NamedTuple, NewType

ModelId = NewType("ModelId", str)
"""The name a client puts in `model`."""

MODEL_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}"
"""What the whole of a model's name looks like."""

RequestId = NewType("RequestId", int)
"""One sequence being generated; increasing in order of arrival. A call with n choices makes n of them."""

InstanceId = NewType("InstanceId", str)
"""`prefill-0`, `decode-3`: a place in the pool. Outlives the process that fills it."""

SlabId = NewType("SlabId", int)
"""A slab's position in its region: it starts at `slab * slab_bytes`."""

BlockId = NewType("BlockId", int)
"""A KV block within a region, for one shape: `slab * blocks_per_slab + index`."""

PageId = NewType("PageId", int)
"""A physical extent of a device's page pool."""


class PageRun(NamedTuple):
    """Adjacent extents `[start, stop)` of a device's page pool, or of the host's image cache."""

    start: int
    stop: int

    @property
    def pages(self) -> int:
        return self.stop - self.start


BlockRun = tuple[int, int]
"""Adjacent KV blocks `[start, stop)` of one shape in one region, which may go on from slab to slab."""
