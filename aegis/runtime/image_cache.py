"""The model cache: weight images in the node's host memory, shared by its instances.

Images are copied in as long as the budget lasts; one that finds no room is read from its file on disk instead.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import msgspec

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.device.host_memory import SharedMemory

_CHUNK = 16 << 20


class ImageCache:
    """Bounded by `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._images: dict[ModelId, SharedMemory] = {}

    @property
    def used_bytes(self) -> int:
        return sum(image.nbytes for image in list(self._images.values()))

    def hold(self, spec: ModelSpec) -> ModelSpec:
        """The spec with `image_path` in memory if there is room. Blocks while it reads."""
        nbytes = spec.manifest.image_bytes
        if self.used_bytes + nbytes > self._capacity:
            return spec
        memory = SharedMemory.create(nbytes, f"image-{spec.manifest.fingerprint}")
        try:
            _fill(memory.path, Path(spec.image_path), nbytes)
        except OSError as error:
            memory.close()
            raise ModelRefused(f"{spec.image_path}: cannot be read: {error.strerror}") from error
        self._images[spec.model] = memory
        return msgspec.structs.replace(spec, image_path=memory.path)

    def drop(self, model: ModelId) -> None:
        """Instances that still map it keep it until they unmap it."""
        memory = self._images.pop(model, None)
        if memory is not None:
            memory.close()

    def close(self) -> None:
        for model in list(self._images):
            self.drop(model)


def _fill(target: str, source: Path, nbytes: int) -> None:
    with open(target, "r+b") as out, mmap.mmap(out.fileno(), nbytes) as memory, source.open("rb") as image:  # noqa: PTH123
        view = memoryview(memory)
        for start in range(0, nbytes, _CHUNK):
            image.readinto(view[start : min(start + _CHUNK, nbytes)])
        view.release()
