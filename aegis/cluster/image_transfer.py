"""A model's image sent to a machine of the cluster that has not got it, through Ray's object store, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec

from aegis.cluster.remote_machine import RemoteMachine
from aegis.core.model import ModelSpec

_PIECE_BYTES = 8 << 20
_AT_ONCE = 4


async def ship(spec: ModelSpec, machine: RemoteMachine, *, renewed: bool = False) -> None:
    """Once: what is there already, also because both have one disk, is not sent. That their paths are the same says
    nothing. One that was `renewed` here may be damaged there, where it is read before it is taken to be there. Of two
    models with one image the second finds it there. Raises MachineLost, OSError, ValueError where something was damaged
    on its way."""
    directory = Path(spec.directory)
    manifest = await asyncio.to_thread((directory / "manifest.json").read_bytes)
    async with machine.shipping[directory.name]:
        if renewed:
            await machine.call("drop_damaged", directory.name, msgspec.msgpack.encode(machine.localised(spec)))
        if not await machine.call("has_image", directory.name, manifest):
            await _send(directory, machine)
    machine.shipped.add((spec.model, spec.manifest.fingerprint))


async def _send(directory: Path, machine: RemoteMachine) -> None:
    """A few pieces at a time, so that neither side holds more."""
    under_way: set[asyncio.Task[None]] = set()
    try:
        for file, at in _pieces(directory):
            if len(under_way) == _AT_ONCE:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*done)
            under_way.add(asyncio.create_task(_send_piece(directory / file, at, machine)))
        await asyncio.gather(*under_way)
    finally:
        for task in under_way:
            task.cancel()
    await machine.call("end_image", directory.name)


async def _send_piece(path: Path, at: int, machine: RemoteMachine) -> None:
    content = await asyncio.to_thread(_read, path, at)
    await machine.call("write_image", path.parent.name, path.name, at, content, crc32(content))


def _pieces(directory: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(directory.iterdir()):
        if path.is_file():
            for at in range(0, max(path.stat().st_size, 1), _PIECE_BYTES):
                yield path.name, at


def _read(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(_PIECE_BYTES)
