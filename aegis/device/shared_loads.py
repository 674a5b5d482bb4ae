"""Loads that peers carry parts of: the second hop, from their staging pages to this device, beside the own link.

The own link copies every piece of the image, from the first one on. Peers that join are asked for pieces from the last
one on. When a piece has come from a peer, its copy over the own link is abandoned: so nothing depends on peers, and
one that is slow or lost costs nothing but a piece that was on its way twice. A copy of a piece from a peer
waits for the event of its staging; the load is over when the own link is through and no such copy is under way.

A peer whose process was lost passes all its events (`SharedWords.poison`), and its pages are other instances' from then
on. What was taken from it meanwhile is copied again over the own link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread

from aegis.core.copy_order import WEIGHTS
from aegis.core.ids import PageRun
from aegis.core.model import PIECE_BYTES, PLACES
from aegis.core.request import EventHandle
from aegis.device.image_relay import Copy, piece_copies
from aegis.device.piece_requests import over, request_of
from aegis.device.protocol import Device, PeerMemory, Stream
from aegis.device.shared_events import POISON, SharedWords

_POLL_NS = 1_000_000  # between looks at whether a load is over
_CLOSING_POLL_NS = 20_000_000
_CLOSING_POLLS = 100


@dataclass(slots=True, eq=False)
class _Load:
    number: int
    image: Sequence[Copy]
    target: int
    pieces: int
    before: int  # copies of the own link before this load's
    unasked: int  # pieces that no peer was asked for, from the first on
    pulls: int = 0  # under way
    ended: bool = False


class SharedLoads:
    """`requests` are the words in which peers are asked, `word` is one for this object alone; all are still 0."""

    def __init__(self, device: Device, words: SharedWords, word: int, requests: Sequence[Sequence[int]]) -> None:
        self._device = device
        self._words = words
        self._word = word
        self._requests = requests
        self._own = device.stream("shared weights")
        self._pulls: dict[int, Stream] = {}
        self._submitted = 0
        self._loads: dict[int, _Load] = {}
        self._changed = Condition()
        self._left: SimpleQueue[PeerMemory] = SimpleQueue()  # to be closed
        self._closing = False
        self._queue: SimpleQueue[_Load | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name="shared loads", daemon=True)]
        self._threads[0].start()
        self.carried_bytes = 0  # by peers

    def load(self, number: int, image: Sequence[Copy], target: int) -> EventHandle:
        """Brings an image to the address `target` of the device. `image`: its parts as `(offset, address, nbytes)`, in
        order. Numbers increase. The event passes when all of it is there."""
        pieces = -(-sum([nbytes for _, _, nbytes in image]) // PIECE_BYTES)
        load = _Load(number, image, target, pieces, before=self._submitted, unasked=pieces)
        for piece in range(pieces):
            self._own.copy(piece_copies(image, piece, target + piece * PIECE_BYTES), urgency=WEIGHTS)
        self._submitted += pieces
        self._loads[number] = load
        self._queue.put(load)
        return EventHandle(self._word, number)

    def join(self, number: int, peer: int, address: str, runs: Sequence[PageRun], staged: int) -> None:
        """A peer that stages pieces in these pages carries a part from now on, as number `peer` of the load; its
        progress is the word `staged`."""
        load = self._loads.get(number)
        memory = self._device.open_peer(address, runs) if load else None
        with self._changed:
            if load is None or memory is None or load.ended:
                self._end(number, peer)
                if memory:
                    memory.close()
                return
            load.pulls += 1
        stream = self._pulls.get(peer) or self._device.stream(f"weights of peer {peer}", between=True)
        self._pulls[peer] = stream
        arguments = (load, peer, stream, memory, staged)
        thread = Thread(target=self._pull, args=arguments, name=f"pull of peer {peer}", daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()] + [thread]
        thread.start()

    def abandon(self, number: int) -> None:
        """The rest of it need not be done; its event passes all the same."""
        load = self._loads.get(number)
        if load is not None:
            for piece in range(load.pieces):
                self._own.abandon(self._copied(load, piece))

    def settle(self) -> None:
        """Closes what loads that have ended needed. In the thread that made the device. Raises what a copy raised."""
        for stream in (self._own, *self._pulls.values()):
            stream.completed()
        for _ in range(self._left.qsize()):
            self._left.get().close()
        for number in [number for number in self._loads if self._words.load(self._word) >= number]:
            del self._loads[number]

    def close(self) -> None:
        """Ends the threads; before the device is closed."""
        self._closing = True
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        while not self._left.empty():
            self._left.get().close()

    # --- threads ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Ends loads, in order."""
        while (load := self._queue.get()) is not None:
            while not self._device.wait(self._copied(load, load.pieces - 1), timeout_ns=_CLOSING_POLL_NS):
                if self._closing:
                    return
            with self._changed:
                load.ended = True
                self._changed.wait_for(lambda load=load: not load.pulls)  # type: ignore[misc]
                for peer in range(len(self._requests)):
                    self._end(load.number, peer)
            if self._closing:
                return
            self._words.store(self._word, load.number)

    def _pull(self, load: _Load, peer: int, stream: Stream, memory: PeerMemory, staged: int) -> None:
        try:
            self._take(load, self._requests[peer], stream, memory, staged)
        finally:
            with self._changed:
                self._end(load.number, peer)
                load.pulls -= 1
                self._changed.notify_all()
            self._left.put(memory)

    def _take(self, load: _Load, requests: Sequence[int], stream: Stream, memory: PeerMemory, staged: int) -> None:
        before = self._words.load(staged)
        asked: deque[int] = deque()
        taken = 0
        while before < POISON:
            while len(asked) < PLACES and (wanted := self._claim(load)) is not None:
                count = taken + len(asked)
                self._words.store(requests[count % PLACES], request_of(load.number, count, wanted))
                asked.append(wanted)
            ready = EventHandle(staged, before + taken + 1)
            if not asked or not self._is_staged(load, ready):
                return
            stream.wait(ready)
            self._carry(load, asked.popleft(), memory.base + taken % PLACES * PIECE_BYTES, stream, staged)
            taken += 1

    def _claim(self, load: _Load) -> int | None:
        """The piece that a peer is to be asked for next; None if the own link is about to reach it."""
        with self._changed:
            reached = self._words.load(self._own.word) - load.before
            if load.unasked - 1 <= reached:
                return None
            load.unasked -= 1
            return load.unasked

    def _is_staged(self, load: _Load, event: EventHandle) -> bool:
        """Waits for that; False if the load is over before."""
        last = self._copied(load, load.pieces - 1)
        while not self._device.wait(event, timeout_ns=_POLL_NS):
            if self._closing or self._device.passed(last):
                return False
        return True

    def _carry(self, load: _Load, piece: int, place: int, stream: Stream, staged: int) -> None:
        """Copies a staged piece to where it belongs."""
        target = load.target + piece * PIECE_BYTES
        from_host = piece_copies(load.image, piece, target)
        nbytes = sum([count for _, _, count in from_host])
        if not self._wait(stream.copy([(target, place, nbytes)])):
            return
        if self._words.load(staged) >= POISON:
            self._wait(stream.copy(from_host))
            return
        self._own.abandon(self._copied(load, piece))
        with self._changed:
            self.carried_bytes += nbytes

    def _wait(self, event: EventHandle) -> bool:
        """For a copy that waits for nothing; False if it has not ended although the instance is closing."""
        for _ in range(_CLOSING_POLLS):
            while not self._device.wait(event, timeout_ns=_CLOSING_POLL_NS):
                if self._closing:
                    break
            else:
                return True
        return False

    def _copied(self, load: _Load, piece: int) -> EventHandle:
        """The event of the piece's copy over the own link."""
        return EventHandle(self._own.word, load.before + piece + 1)

    def _end(self, number: int, peer: int) -> None:
        """Tells a peer that the load wants no more, unless a later one asks it already."""
        for word in self._requests[peer]:
            if self._words.load(word) < over(number):
                self._words.store(word, over(number))
