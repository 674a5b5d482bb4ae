"""The memory that an instance may hold, and how much of a model fits in it."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.model import KvShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`pages` are all of the device: weights and KV of every instance on it come from them."""

    pages: int
    page_bytes: int
    slab_bytes: int
    host_slabs: int  # of the node's region, which its instances share
    instances: int  # that share it
    on_device: int = 1  # of them, share the device

    @property
    def equal_pages(self) -> int:
        """What each instance on the device can count on, whatever the others need (`PageArbiter`)."""
        return self.pages // self.on_device

    @property
    def pages_per_slab(self) -> int:
        return self.slab_bytes // self.page_bytes

    def weight_pages(self, image_bytes: int) -> int:
        return -(-image_bytes // self.page_bytes)

    def least_pages(self, image_bytes: int) -> int:
        """The fewest pages with which a token of the model can be made: its weights and one slab."""
        return self.weight_pages(image_bytes) + self.pages_per_slab

    def holds(self, image_bytes: int, shape: KvShape) -> bool:
        """Whether an instance can make tokens of the model."""
        return self.least_pages(image_bytes) <= self.pages and shape.block_bytes <= self.slab_bytes

    def device_tokens(self, image_bytes: int, shape: KvShape) -> int:
        """The tokens whose KV fits on the device beside the model's weights. 0 or less: none does."""
        slabs = (self.pages - self.weight_pages(image_bytes)) // self.pages_per_slab
        return slabs * self._slab_tokens(shape)

    def sequence_tokens(self, image_bytes: int, shape: KvShape) -> int:
        """The longest sequence whose KV fits on the device beside the model's weights, and in the host region while
        every other instance keeps a slab. 0 or less: the model cannot be served."""
        in_host = self.host_slabs - self.instances + 1
        return min(self.device_tokens(image_bytes, shape), in_host * self._slab_tokens(shape))

    def _slab_tokens(self, shape: KvShape) -> int:
        return self.slab_bytes // shape.block_bytes * shape.block_tokens
