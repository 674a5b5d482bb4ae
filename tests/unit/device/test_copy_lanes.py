"""The order of copies on a lane, without bytes and with them."""

from __future__ import annotations

import ctypes

from aegis.core.copy_order import AHEAD, NOW, WEIGHTS
from aegis.device.copy_lanes import CopyLane, Place
from aegis.device.cpu.pages import PhysicalPages
from aegis.device.cpu.pool import CpuPool
from aegis.device.cpu.streams import CpuStream
from aegis.device.shared_events import SharedWords

LONG_NS = 60_000_000_000


def place(lane: CopyLane, *urgencies: int) -> Place:
    """In whose stream copies of these urgencies are, the first in hand."""
    made = Place(lane)
    for urgency in urgencies:
        made.submitted(urgency)
    made.begin()
    return made


def waits(asked: Place) -> bool:
    """Nobody who need not wait is asked whether to give up."""
    told: list[bool] = []

    def gave_up() -> bool:
        told.append(True)
        return True

    asked.wait(gave_up)
    return bool(told)


def test_the_most_urgent_goes_and_the_others_wait_until_it_has_ended() -> None:
    lane = CopyLane()
    ahead, weights, now = place(lane, AHEAD), place(lane, WEIGHTS), place(lane, NOW)
    assert [waits(each) for each in (ahead, weights, now)] == [True, True, False]
    now.end()
    assert [waits(each) for each in (ahead, weights)] == [True, False]
    weights.end()
    assert not waits(ahead)


def test_equals_go_side_by_side() -> None:
    lane = CopyLane()
    assert [waits(each) for each in (place(lane, AHEAD), place(lane, AHEAD))] == [False, False]


def test_what_is_in_front_of_something_urgent_is_as_urgent() -> None:
    lane = CopyLane()
    weights, swaps = place(lane, WEIGHTS), place(lane, AHEAD)
    assert waits(swaps)
    swaps.submitted(NOW)
    assert waits(weights) and not waits(swaps)
    swaps.end()
    assert not waits(weights), "the urgent one has not begun: it may wait for something itself"


def test_a_stream_copies_nothing_while_something_more_urgent_is_copied(pool: CpuPool, words: SharedWords) -> None:
    lane = CopyLane()
    urgent = place(lane, NOW)
    source, target = ctypes.create_string_buffer(b"kv"), ctypes.create_string_buffer(3)
    pages = PhysicalPages(pool.address)
    stream = CpuStream("prefetch", 3, words, pages, lane)
    event = stream.copy([(ctypes.addressof(target), ctypes.addressof(source), 3)], urgency=AHEAD)
    assert not words.wait(event.word, event.value, timeout_ns=1_000_000) and target.value == b""
    urgent.end()
    assert words.wait(event.word, event.value, timeout_ns=LONG_NS) and target.value == b"kv"
    stream.close()
    pages.close()


def test_what_is_abandoned_or_closed_waits_for_nobody(pool: CpuPool, words: SharedWords) -> None:
    lane = CopyLane()
    place(lane, NOW)
    source, target = ctypes.create_string_buffer(1 << 20), ctypes.create_string_buffer(1 << 20)
    pages = PhysicalPages(pool.address)
    stream = CpuStream("prefetch", 3, words, pages, lane)
    copies = [(ctypes.addressof(target), ctypes.addressof(source), 1 << 20)]
    event = stream.copy(copies, urgency=AHEAD)
    stream.abandon(event)
    assert words.wait(event.word, event.value, timeout_ns=LONG_NS)
    stream.copy(copies, urgency=AHEAD)
    stream.close()
    pages.close()
