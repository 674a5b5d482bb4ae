"""A model's weight image, with what lies beside it, as it comes to a machine that has not got it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from zlib import crc32

from aegis.core.model import ModelSpec
from aegis.device.image_file import ImageDamaged, check

_MANIFEST = "manifest.json"


class ArrivingImage:
    """The directory `name` among the `images`. It is there whole, or not at all."""

    def __init__(self, images: Path, name: str) -> None:
        assert _is_plain(name)
        self._directory = images / name
        self._draft = images / f".{name}.{os.getpid()}.arriving"

    def is_here(self, manifest: bytes) -> bool:
        """With just that manifest."""
        try:
            return (self._directory / _MANIFEST).read_bytes() == manifest
        except OSError:
            return False

    def drop_damaged(self, spec: ModelSpec) -> None:
        """It is not here any more, unless the image of each rank is what it should be."""
        try:
            for rank in range(spec.manifest.ranks):
                shard = spec.shard(rank)
                check(shard.image_path, shard.manifest)
        except ImageDamaged:
            shutil.rmtree(self._directory, ignore_errors=True)

    def begin(self) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)

    def write(self, file: str, at: int, content: bytes, checksum: int) -> None:
        """Raises ValueError where the content is not what was sent."""
        assert _is_plain(file)
        if crc32(content) != checksum:
            raise ValueError(f"{file} was damaged on its way")
        fd = os.open(self._draft / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, content, at)
        finally:
            os.close(fd)

    def end(self) -> None:
        """All of it has come."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._draft.rename(self._directory)


def _is_plain(name: str) -> bool:
    """It names something in the directory itself."""
    return Path(name).name == name and name not in ("", ".", "..")
