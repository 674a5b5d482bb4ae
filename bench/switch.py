"""How long a model switch takes, against a plain memcpy of as many bytes.

Two models take turns in a device memory that holds one. For each size:

* first: the device's memory is taken from the operating system on the way;
* switch: the other model's pages are unmapped, mapped into this model's range, the image copied by the weights
  stream and the event awaited: what every later activation costs;
* remapped: the same onto other, scattered pages than last time (each page apart from its neighbour: the worst case);
* prefetched: the model was loaded while the other one was active, in a memory that holds both; only the promotion is
  timed: its event has passed and its first and last bytes are read.

Each switch is followed by libc's memcpy of the same image to the same, now mapped, addresses by the calling thread;
`ratio` is the median of the quotients of such neighbours, so that a machine whose speed drifts does not spoil it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from math import gcd
from pathlib import Path
from typing import ParamSpec

import msgspec
from msgspec import Struct

from aegis.core.ids import PageId
from aegis.core.request import EventHandle
from aegis.device.cpu import CpuDevice
from aegis.device.cpu_pages import PAGE_BYTES
from aegis.device.host_memory import SharedMemory
from aegis.device.libc import copy
from aegis.device.shared_words import SharedWords
from bench.machine import Machine, describe

SIZES = tuple(mib << 20 for mib in (64, 128, 256, 512, 1024))
_TIMEOUT_NS = 60_000_000_000
_BYTES_PER_SIZE = 2 << 30  # small sizes are repeated until they have copied as much, at most 32 times
P = ParamSpec("P")


class SizeResult(Struct, frozen=True):
    """Medians over `repetitions` switches each way; `first_ns` was seen once."""

    nbytes: int
    repetitions: int
    first_ns: int
    switch_ns: int
    memcpy_ns: int
    ratio: float
    remapped_ns: int
    remapped_ratio: float
    prefetched_ns: int


class Result(Struct, frozen=True):
    machine: Machine
    sizes: tuple[SizeResult, ...]


class TwoModels:
    """Two models of `nbytes` (whole pages), A = 0 and B = 1, on a device memory that holds `slots` of them."""

    def __init__(self, nbytes: int, *, slots: int) -> None:
        self.nbytes = nbytes
        self.page_count = nbytes // PAGE_BYTES
        self._words = SharedWords.create(8)
        self.device = CpuDevice(slots * nbytes, self._words)
        self._stream = self.device.stream("weights")
        self._memory = [SharedMemory.create(nbytes, f"image-{model}") for model in (0, 1)]
        self._images = [self.device.open_host(memory.path, writable=True) for memory in self._memory]
        self._ranges = [self.device.reserve(nbytes) for _ in (0, 1)]
        self._resident = [False, False]
        for model, image in enumerate(self._images):
            ctypes.memset(image.base, model + 1, nbytes)

    def load(self, model: int, pages: Sequence[PageId]) -> EventHandle:
        """Maps the pages and starts the copy."""
        self._ranges[model].map(0, pages)
        self._resident[model] = True
        return self._stream.copy([(self._ranges[model].base, self._images[model].base, self.nbytes)])

    def evict(self, model: int) -> None:
        if self._resident[model]:
            self._ranges[model].unmap(0, self.page_count)
            self._resident[model] = False

    def promote(self, model: int, loaded: EventHandle) -> None:
        """Waits until the model can run, and looks at both ends of it."""
        assert self.device.wait(loaded, timeout_ns=_TIMEOUT_NS)
        for address in (self._ranges[model].base, self._ranges[model].base + self.nbytes - 1):
            assert ctypes.c_ubyte.from_address(address).value == model + 1

    def switch_to(self, model: int, pages: Sequence[PageId]) -> None:
        self.evict(1 - model)
        self.promote(model, self.load(model, pages))

    def memcpy(self, model: int) -> None:
        copy(self._ranges[model].base, self._images[model].base, self.nbytes)

    def close(self) -> None:
        self.device.close()
        for memory in self._memory:
            memory.close()
        self._words.close()


def run(json_path: Path | None = None, sizes: Sequence[int] = SIZES, repetitions: int = 9) -> Result:
    """Measures, prints a table and writes it to `json_path`.

    Sizes are in bytes, whole pages. Each way is switched at least `repetitions` times.
    """
    results = []
    print("     size      first     switch     memcpy  ratio   remapped  ratio  prefetched")
    for nbytes in sizes:
        result = measure(nbytes, max(repetitions, min(32, _BYTES_PER_SIZE // nbytes)))
        results.append(result)
        print(_row(result))
    whole = Result(describe(), tuple(results))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    return whole


def measure(nbytes: int, repetitions: int) -> SizeResult:
    models = TwoModels(nbytes, slots=1)
    in_order = [PageId(page) for page in range(models.page_count)]
    first_ns = _timed(models.switch_to, 0, in_order)
    switch_ns, memcpy_ns = _alternate(models, repetitions, lambda _: in_order)
    remapped_ns, beside_ns = _alternate(models, repetitions, lambda turn: _scattered(models.page_count, turn))
    models.close()
    return SizeResult(
        nbytes=nbytes,
        repetitions=repetitions,
        first_ns=first_ns,
        switch_ns=_median(switch_ns),
        memcpy_ns=_median(memcpy_ns),
        ratio=_ratio(switch_ns, memcpy_ns),
        remapped_ns=_median(remapped_ns),
        remapped_ratio=_ratio(remapped_ns, beside_ns),
        prefetched_ns=_prefetched_ns(nbytes, repetitions),
    )


def _alternate(
    models: TwoModels, repetitions: int, pages: Callable[[int], Sequence[PageId]]
) -> tuple[list[int], list[int]]:
    """Durations of switches, and of the memcpy after each; A is active before, and again afterwards."""
    switches_ns, copies_ns = [], []
    for turn in range(2 * repetitions):
        model = (turn + 1) % 2
        switches_ns.append(_timed(models.switch_to, model, pages(turn)))
        copies_ns.append(_timed(models.memcpy, model))
    return switches_ns, copies_ns


def _prefetched_ns(nbytes: int, repetitions: int) -> int:
    models = TwoModels(nbytes, slots=2)
    pages = [[PageId(model * models.page_count + page) for page in range(models.page_count)] for model in (0, 1)]
    models.switch_to(0, pages[0])
    durations_ns = []
    for turn in range(repetitions):
        model = (turn + 1) % 2
        loaded = models.load(model, pages[model])
        assert models.device.wait(loaded, timeout_ns=_TIMEOUT_NS)
        durations_ns.append(_timed(models.promote, model, loaded))
        models.evict(1 - model)
    models.close()
    return _median(durations_ns)


def _scattered(count: int, turn: int) -> list[PageId]:
    """All pages in strides that change with the turn: no two adjacent ones side by side, unless there are few."""
    step = next(step for step in range(3 + 2 * turn, 2 * count + 3 + 2 * turn) if gcd(step, count) == 1)
    return [PageId(index * step % count) for index in range(count)]


def _timed(action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> int:
    start_ns = time.perf_counter_ns()
    action(*args, **kwargs)
    return time.perf_counter_ns() - start_ns


def _median(values: Sequence[int]) -> int:
    return round(statistics.median(values))


def _ratio(numerators: Sequence[int], denominators: Sequence[int]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _row(r: SizeResult) -> str:
    def ms(ns: int) -> str:
        return f"{ns / 1e6:8.2f}ms"

    return (
        f"{r.nbytes >> 20:6d}MiB {ms(r.first_ns)} {ms(r.switch_ns)} {ms(r.memcpy_ns)} {r.ratio:6.3f}"
        f" {ms(r.remapped_ns)} {r.remapped_ratio:6.3f} {r.prefetched_ns / 1e6:9.4f}ms"
    )
