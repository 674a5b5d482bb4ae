"""A machine of the cluster: an actor with its memory, whose children its instances are.

It does what the launcher asks and decides nothing. When it ends, for whatever reason, so do its instances.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from zlib import crc32

import msgspec

from aegis import __version__
from aegis.cluster.actor_messages import Opened, Opening, PoolOpened
from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import ModelId, PageRun
from aegis.core.model import ModelSpec
from aegis.device.image_file import ImageDamaged, check
from aegis.device.open_device import create_pool
from aegis.device.protocol import PhysicalPool
from aegis.instance.settings import InstanceSettings
from aegis.models.cache import default_cache_dir, lock_file
from aegis.models.disk_cache import only_one
from aegis.node import instance_processes
from aegis.node.instance_processes import Processes
from aegis.node.local_machine import LocalMachine
from aegis.process.scratch_directory import scratch

_MANIFEST = "manifest.json"


class ArrivingImage:
    """A model's weight image, with what lies beside it, as it comes to a machine that lacks it: the directory `name`
    among the `images`. It is there whole, or not at all."""

    def __init__(self, images: Path, name: str) -> None:
        assert _is_plain(name)
        self._directory = images / name
        self._draft = images / f".{name}.{os.getpid()}.arriving"
        self._lock: IO[str] | None = None  # that says that this process lives

    def is_here(self, manifest: bytes) -> bool:
        """Whether the image is here with just that manifest."""
        try:
            return (self._directory / _MANIFEST).read_bytes() == manifest
        except OSError:
            return False

    def drop_damaged(self, spec: ModelSpec) -> None:
        """Drops the model's directory, unless the image of each rank is what it should be. Raises OSError where that
        cannot be seen."""
        try:
            for rank in range(spec.manifest.ranks):
                shard = spec.shard(rank)
                check(shard.image_path, shard.manifest)
        except ImageDamaged:
            shutil.rmtree(self._directory, ignore_errors=True)

    def begin(self) -> None:
        """What processes that ended meanwhile left behind is removed."""
        self._draft.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock_file(self._draft).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        for draft in self._draft.parent.glob(".*.arriving"):
            with only_one(lock_file(draft)) as left:
                if left:
                    shutil.rmtree(draft, ignore_errors=True)
                    lock_file(draft).unlink(missing_ok=True)
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir()

    def write(self, file: str, at: int, content: bytes, checksum: int) -> None:
        """Raises ValueError if the content is not what was sent."""
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
        lock_file(self._draft).unlink(missing_ok=True)
        if self._lock:
            self._lock.close()


def _is_plain(name: str) -> bool:
    """Whether the name is that of something in the directory itself."""
    return Path(name).name == name and name not in ("", ".", "..")


_COPIED_NS = 10 * NS_PER_S
_UUIDS = ("GPU-", "MIG-")


def boot_id() -> str:
    """The id of this start of the operating system: processes with the same one see the same files and sockets."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def ordinal_of(gpu: str, visible: str | None) -> int:
    """The number that the driver has for a GPU that Ray names, as the node does, where CUDA_VISIBLE_DEVICES is
    `visible`; 0 for none. Raises UserError if it is not seen."""
    if not gpu:
        return 0
    if visible is None and gpu.isdecimal():
        return int(gpu)
    for ordinal, seen in enumerate((visible or "").split(",")):
        name = seen.strip()
        short = name.startswith(_UUIDS) and (name.startswith(gpu) or gpu.startswith(name))  # a UUID may be cut short
        if name == gpu or short:
            return ordinal
    sees = "no CUDA_VISIBLE_DEVICES" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    raise UserError(
        f"Ray gives an instance GPU {gpu} of a node whose processes have {sees}: start that node of the Ray cluster "
        "again, with CUDA_VISIBLE_DEVICES set before `ray start`, or not at all"
    )


class MachineActor:
    """Methods are called by Ray, concurrently, on one event loop."""

    def __init__(self) -> None:
        self._pools: list[PhysicalPool] = []
        self._ended: set[int] = set()  # of the pools
        self._running: dict[int, Processes] = {}
        self._arriving: dict[str, ArrivingImage] = {}
        self._closing = ExitStack()

    async def open(self, order: bytes) -> bytes:
        """`Opening` to `Opened`."""
        opening = msgspec.msgpack.decode(order, type=Opening)
        if opening.version != __version__:
            return msgspec.msgpack.encode(Opened(__version__))
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray says how many an actor without a CPU should have
        directory = self._closing.enter_context(scratch("aegis-"))
        self._fork_server = instance_processes.fork_server(opening.instances * opening.ranks, opening.engine)
        self._machine = LocalMachine(
            host_kv_bytes=opening.host_kv_bytes,
            cache_bytes=opening.cache_bytes,
            ranks=opening.ranks,
            instances=opening.instances,
            rendezvous=f"{directory}/",
            fork_server=self._fork_server,
            machine=opening.machine,
        )
        opened = Opened(
            __version__,
            boot_id(),
            str(default_cache_dir()),
            self._machine.rendezvous,
            tuple(self._machine.memory),
            self._machine.filler.extents,
        )
        return msgspec.msgpack.encode(opened)

    async def clock(self) -> int:
        return time.monotonic_ns()

    # --- processes ----------------------------------------------------------------------------------------------------

    async def start(self, key: int, ranks: bytes) -> int:
        """The first rank's process id. Raises OSError."""
        running = await self._machine.start(msgspec.msgpack.decode(ranks, type=list[InstanceSettings]))
        self._running[key] = running
        return running.pid

    async def ended(self, key: int) -> int:
        """The exit code, when there is one."""
        code = await self._running[key].wait()
        del self._running[key]
        return code

    async def kill(self, key: int) -> None:
        if key in self._running:
            self._running[key].kill()

    async def poison(self, words: list[int]) -> None:
        self._machine.poison(words)

    async def wait_for_copy(self, word: int, value: int) -> bool:
        """Whether it has ended on all ranks. The words of a process that is no more are poisoned."""
        words = self._machine.words
        return all([await asyncio.to_thread(rank.wait, word, value, timeout_ns=_COPIED_NS) for rank in words])

    # --- memory -------------------------------------------------------------------------------------------------------

    async def open_pool(self, kind: str, nbytes: int, gpu: str) -> bytes:
        """To `PoolOpened`. The GPU has the name that Ray has for it."""
        try:
            ordinal = ordinal_of(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
            pool = create_pool(kind, nbytes, ordinal=ordinal)
        except UserError as error:
            return msgspec.msgpack.encode(PoolOpened(refusal=error.message))
        opened = PoolOpened(len(self._pools), pool.address, pool.page_bytes, pool.page_count)
        self._pools.append(pool)
        return msgspec.msgpack.encode(opened)

    async def end_pool(self, pool: int) -> None:
        self._ended.add(pool)
        self._pools[pool].close()

    async def wipe(self, pool: int, runs: list[tuple[int, int]]) -> None:
        await asyncio.to_thread(self._pools[pool].wipe, [PageRun(*run) for run in runs])

    async def fill(self, spec: bytes, runs: list[tuple[int, int]]) -> tuple[bool, str]:
        extents = tuple(PageRun(*run) for run in runs)
        filled = await self._machine.filler.fill(msgspec.msgpack.decode(spec, type=ModelSpec), extents)
        return filled.whole, filled.damage

    async def abandon_fill(self, model: str) -> None:
        self._machine.filler.abandon(ModelId(model))

    # --- images -------------------------------------------------------------------------------------------------------

    async def has_image(self, name: str, manifest: bytes) -> bool:
        """Whether that directory of images is here already; else it is to come, file by file."""
        arriving = ArrivingImage(default_cache_dir() / "images", name)
        if await asyncio.to_thread(arriving.is_here, manifest):
            return True
        await asyncio.to_thread(arriving.begin)
        self._arriving[name] = arriving
        return False

    async def drop_damaged(self, name: str, spec: bytes) -> None:
        """Reads an image here that was found damaged elsewhere: if it is damaged here too, it has to be sent again."""
        image = ArrivingImage(default_cache_dir() / "images", name)
        await asyncio.to_thread(image.drop_damaged, msgspec.msgpack.decode(spec, type=ModelSpec))

    async def write_image(self, name: str, file: str, at: int, content: bytes, checksum: int) -> None:
        await asyncio.to_thread(self._arriving[name].write, file, at, content, checksum)

    async def end_image(self, name: str) -> None:
        await asyncio.to_thread(self._arriving.pop(name).end)

    async def close(self) -> None:
        """Closes what the machine has; its instances are gone, or going."""
        for running in self._running.values():
            running.kill()
        self._fork_server.close()
        for number, pool in enumerate(self._pools):
            if number not in self._ended:
                pool.close()
        self._machine.close()
        self._closing.close()
