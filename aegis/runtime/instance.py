"""The process of one instance: initialises its engine once, then lets its core decide and its hands do.

Started as `python -m aegis.runtime.instance` with its settings as JSON on standard input.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import asdict

import msgspec

from aegis.core.clock import Clock
from aegis.core.effects import StreamName
from aegis.core.errors import UserError
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, Tick
from aegis.core.messages import ImageCached, Ready, Shutdown, Telemetry
from aegis.device.cached_images import CachedImages
from aegis.device.mover import Mover
from aegis.device.open import open_device
from aegis.device.shared_words import SharedWords
from aegis.device.stage import StageBuffer
from aegis.engine.base import KvRegion
from aegis.engine.transformers_engine import TransformersEngine
from aegis.runtime.binder import Binder
from aegis.runtime.clock import MonotonicClock
from aegis.runtime.hands import Hands
from aegis.runtime.instance_settings import InstanceSettings
from aegis.runtime.link import InstanceLink
from decode.core import DecodeCore
from decode.policy import WeightedRoundRobin
from decode.worker import DecodeWorker
from memory.budget import Budget
from memory.ledger import Ledger
from prefill.core import PrefillCore
from prefill.worker import PrefillWorker

ADDRESS_PAGES = 1 << 22
"""Address space for weights: 8 TiB of 2 MiB pages. It costs nothing until something is mapped."""

_TELEMETRY_NS = 200_000_000
_IDLE_MS = 100
_OWING_MS = 5
_TRANSFER_POLL_S = 0.0001
_SWITCH_INTERVAL_S = 0.0005  # how long a copy thread may wait for the interpreter beside Python code


class Instance:
    """Core, hands and link of this process."""

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings
        self._clock: Clock = MonotonicClock()
        self._link = InstanceLink(settings.address, settings.identity)
        words = SharedWords.open(settings.words_path)
        self._device = open_device(
            settings.device,
            settings.device_address,
            words,
            stream_words=settings.words[:-1],
        )
        host = self._device.open_host(settings.host_kv_path, writable=True, populate=False)
        self._images = CachedImages(self._device, settings.images_path)
        self._stage = StageBuffer(self._device, words, settings.words[-1])
        self._mover = Mover(
            self._device, host, self._images, self._stage, slab_bytes=settings.slab_bytes, address_pages=ADDRESS_PAGES
        )
        self._engine = TransformersEngine(
            KvRegion(self._mover.kv.base, self._mover.kv.nbytes, settings.slab_bytes), device=self._device.name
        )
        self._core = self._make_core()
        self._binder = Binder(self._engine)
        self._hands = Hands(self._engine, self._mover, self._link, self._make_worker())
        self._reported: Telemetry | None = None
        self._reported_busy = False
        self._report_due_ns = 0

    def serve(self) -> None:
        """Until `Shutdown`. One event at a time: messages first, then what the streams completed, then the step's."""
        self._link.send([Ready(os.getpid())])
        pending: list[InstanceEvent] = []
        while True:
            busy = self._core.queued + self._core.running > 0
            messages = [m for m in self._receive(waiting=not pending) if not self._binder.defer(m, busy=busy)]
            events = [*messages, *self._binder.ready(), *self._mover.progress(), *pending]
            if not events and self._core.ledger.balloon.owes:
                events = [Tick()]
            pending = []
            for event in events:
                if isinstance(event, Shutdown):
                    return
                if isinstance(event, ImageCached):
                    self._images.touch(event.extents)
                pending += self._hands.perform(self._core.on(event, self._clock.now_ns()))
                if self._settings.check_laws:
                    self._core.ledger.check()
            self._report()

    def close(self) -> None:
        self._binder.close()
        self._stage.close()
        self._images.close()
        self._device.close()
        self._link.close()

    def _receive(self, *, waiting: bool) -> list[InstanceEvent]:
        if not waiting:
            return list(self._link.receive(0))
        if not self._mover.in_flight:
            return list(self._link.receive(_OWING_MS if self._core.ledger.balloon.owes else _IDLE_MS))
        messages = self._link.receive(0)
        if not messages:
            time.sleep(_TRANSFER_POLL_S)
        return list(messages)

    def _make_core(self) -> PrefillCore | DecodeCore:
        settings = self._settings
        budget = Budget(
            pages=self._device.page_count,
            page_bytes=self._device.page_bytes,
            slab_bytes=settings.slab_bytes,
            host_slabs=settings.host_slabs,
            instances=settings.instances,
        )
        ledger = Ledger(budget, {name: self._mover.words[name] for name in StreamName}, address_pages=ADDRESS_PAGES)
        if settings.prefill:
            return PrefillCore(settings.instance, ledger)
        policy = WeightedRoundRobin(settings.q_max_ns, settings.switching_share)
        return DecodeCore(settings.instance, ledger, policy, Hardware())

    def _make_worker(self) -> PrefillWorker | DecodeWorker:
        if self._settings.prefill:
            return PrefillWorker(self._engine, self._clock)
        return DecodeWorker(self._engine, self._clock)

    def _report(self) -> None:
        """Now and then; at once when work comes or ends, for what an idle instance holds others may have."""
        core, now_ns = self._core, self._clock.now_ns()
        busy = core.queued + core.running > 0
        if now_ns < self._report_due_ns and busy == self._reported_busy:
            return
        self._report_due_ns, self._reported_busy = now_ns + _TELEMETRY_NS, busy
        counters = {f"{name}_total": value for name, value in asdict(core.counters).items()}
        counters["engine_initialisations_total"] = self._engine.initialisations
        counters["device_wide_waits_total"] = self._device.device_wide
        ledger = core.ledger
        report = Telemetry(
            core.active,
            ledger.weights.resident(),
            core.queued,
            core.running,
            counters,
            ledger.accounts(),
            loading=tuple(model for model, _ in ledger.weights.loading()),
            shapes=ledger.shapes(),
        )
        if report != self._reported:
            self._reported = report
            self._link.send([report])


def main() -> int:
    _die_with_parent()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=InstanceSettings)
    try:
        instance = Instance(settings)
    except UserError as error:
        sys.stderr.write(f"aegis: {settings.instance}: {error.message}\n")
        return 2
    instance.serve()
    instance.close()
    return 0


def _die_with_parent() -> None:
    """A launcher that is killed outright leaves no orphans (prctl PR_SET_PDEATHSIG, Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # taking torch down in order takes seconds
