"""What an instance is put together from, opened as its settings say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aegis.core.clock import Clock
from aegis.core.effects import StreamName
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.device.base import Device
from aegis.device.cached_images import CachedImages
from aegis.device.mover import Mover
from aegis.device.open import open_device
from aegis.device.shared_words import SharedWords
from aegis.device.stage import StageBuffer
from aegis.engine.base import Engine, KvRegion
from aegis.engine.engines import Engines
from aegis.runtime.clock import MonotonicClock, ThreadClock
from aegis.runtime.instance_settings import InstanceSettings
from aegis.runtime.link import InstanceLink
from aegis.telemetry.decisions import DecisionLog
from decode.core import DecodeCore
from memory.budget import Budget
from memory.ledger import Ledger
from prefill.core import PrefillCore

ADDRESS_PAGES = 1 << 22
"""Address space for weights: 8 TiB of 2 MiB pages. It costs nothing until something is mapped."""

_TRANSFER_POLL_S = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`pause` is called with nothing to do while copies are in flight, until one may have ended, at most to a time.
    `processor` goes on while this thread has one, where that is what runs take."""

    instance: InstanceId
    role: Role
    core: PrefillCore | DecodeCore
    engine: Engine
    device: Device
    images: CachedImages
    mover: Mover
    link: InstanceLink
    clock: Clock
    pause: Callable[[int], None]
    check_laws: bool = False
    decisions: DecisionLog | None = None
    processor: Clock | None = None


@contextmanager
def open_parts(settings: InstanceSettings) -> Iterator[Parts]:
    """Raises UserError. Nothing is closed after an error: copies that go nowhere would be waited for."""
    link = InstanceLink(settings.address, settings.identity)
    words = SharedWords.open(settings.words_path)
    device = open_device(settings.device, settings.device_address, words, stream_words=settings.words[:-1])
    host = device.open_host(settings.host_kv_path, writable=True, populate=False)
    images = CachedImages(device, settings.images_path)
    stage = StageBuffer(device, words, settings.words[-1])
    mover = Mover(device, host, images, stage, slab_bytes=settings.slab_bytes, address_pages=ADDRESS_PAGES)
    region = KvRegion(mover.kv.base, mover.kv.nbytes, settings.slab_bytes)
    yield Parts(
        instance=settings.instance,
        role=settings.role,
        core=_core(settings, device, mover),
        engine=Engines(region, device=device.name, first=settings.engine),
        device=device,
        images=images,
        mover=mover,
        link=link,
        clock=MonotonicClock(),
        processor=ThreadClock() if device.name == "cpu" else None,
        pause=_poll,
        check_laws=settings.check_laws,
    )
    for part in (stage, images, device, link):
        part.close()


def _poll(until_ns: int) -> None:
    """Nobody says when a copy has ended: it is looked for again soon."""
    time.sleep(_TRANSFER_POLL_S)


def _core(settings: InstanceSettings, device: Device, mover: Mover) -> PrefillCore | DecodeCore:
    budget = Budget(
        pages=device.page_count,
        page_bytes=device.page_bytes,
        slab_bytes=settings.slab_bytes,
        host_slabs=settings.host_slabs,
        instances=settings.instances,
    )
    ledger = Ledger(budget, {name: mover.words[name] for name in StreamName}, address_pages=ADDRESS_PAGES)
    if settings.role is Role.PREFILL:
        return PrefillCore(settings.instance, ledger, settings.prefill_order(), explains=settings.explains)
    return DecodeCore(settings.instance, ledger, settings.scheduler(), Hardware(), explains=settings.explains)
