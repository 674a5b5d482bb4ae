"""A weight image on local disk, read in pieces by any number of threads, each piece checked against the manifest."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from zlib import crc32

from aegis.core.model import IMAGE_PIECE_BYTES, Manifest
from aegis.process.buffers import left_after

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ImageDamaged(Exception):
    """The image on disk is not what its manifest says; the message is one line without its path."""


class ImageNotOpened(OSError):
    """The system lacked what opening it takes, which says nothing of the image; the message is one line."""


class ImageFile:
    """One image, open. Reading through the system's page cache: an image that was read lately comes from memory."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        """Raises ImageDamaged if there is no file or it has another size, ImageNotOpened."""
        self.nbytes = manifest.image_bytes
        self.pieces = -(-self.nbytes // IMAGE_PIECE_BYTES)
        self._checksums = manifest.checksums
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            kind = ImageNotOpened if error.errno in _SHORTAGES else ImageDamaged
            raise kind(f"its weight image cannot be opened: {error.strerror}") from error
        size = os.fstat(self._fd).st_size
        if size != self.nbytes:
            os.close(self._fd)
            raise ImageDamaged(f"its weight image has {size} bytes instead of {self.nbytes}")

    def piece_bytes(self, piece: int) -> int:
        return min(IMAGE_PIECE_BYTES, self.nbytes - piece * IMAGE_PIECE_BYTES)

    def read(self, piece: int, into: Sequence[memoryview]) -> None:
        """Fills the buffers, which together are as long as the piece. Raises ImageDamaged."""
        left, at = list(into), piece * IMAGE_PIECE_BYTES
        try:
            while left:
                count = os.preadv(self._fd, left, at)
                if count == 0:
                    raise ImageDamaged("its weight image ends too early")
                at += count
                left = left_after(left, count)
        except OSError as error:
            raise ImageDamaged(f"its weight image cannot be read: {error.strerror}") from error
        self._check(piece, into)

    def close(self) -> None:
        os.close(self._fd)

    def _check(self, piece: int, content: Sequence[memoryview]) -> None:
        if not self._checksums:
            return
        found = 0
        for part in content:
            found = crc32(part, found)
        if found != int.from_bytes(self._checksums[4 * piece : 4 * piece + 4], "little"):
            raise ImageDamaged("its weight image is damaged: a checksum does not match")


def check(path: str, manifest: Manifest) -> None:
    """Reads all of an image. Raises ImageDamaged, ImageNotOpened."""
    buffer = memoryview(bytearray(IMAGE_PIECE_BYTES))
    with closing(ImageFile(path, manifest)) as image:
        for piece in range(image.pieces):
            image.read(piece, [buffer[: image.piece_bytes(piece)]])


def checksums(path: str) -> bytes:
    """The checksums that a manifest holds for the image at `path`: CRC-32 of each piece, 4 bytes each,
    little-endian."""
    sums = bytearray()
    with open(path, "rb") as image:  # noqa: PTH123
        while piece := image.read(IMAGE_PIECE_BYTES):
            sums += crc32(piece).to_bytes(4, "little")
    return bytes(sums)
