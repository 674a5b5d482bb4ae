"""The bytes that arrive are those that were sent, over real connections: whole ones, bad ones, and ones that end."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from aegis.cluster.chunk_stream import KEY_BYTES, NAME_BYTES, Copy, HandOverFailed, Receiver, admit, answer, set_timeout
from aegis.cluster.chunks import CHUNK_BYTES, Bytes

KEY = bytes(range(KEY_BYTES))
NAME = "f" * NAME_BYTES
SOURCE: Bytes = np.random.default_rng(0).integers(0, 256, 5 * CHUNK_BYTES + 17, dtype=np.uint8)
WHOLE = ((0, 0, len(SOURCE)),)
CHUNKS = -(-len(SOURCE) // CHUNK_BYTES)
TIMEOUT_S = 0.2

Serve = Callable[[socket.socket], None]


class Sender:
    """Serves connection number n with the n-th of these, all later ones with the last."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.serving: list[Serve] = [honest]
        self.key = KEY

    def connect(self) -> socket.socket:
        here, there = socket.socketpair()
        serve = self.serving.pop(0) if len(self.serving) > 1 else self.serving[0]
        thread = threading.Thread(target=self._run, args=(serve, there))
        thread.start()
        self._threads.append(thread)
        set_timeout(here, TIMEOUT_S)
        here.sendall(self.key)
        return here

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    @staticmethod
    def _run(serve: Serve, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            serve(connection)


def honest(connection: socket.socket) -> None:
    if admit(connection, KEY):
        answer(connection, {NAME: SOURCE}.get)


def answering(change: Callable[[int, bytes], tuple[int, bytes]], count: int = 1000) -> Serve:
    """Answers so many questions, with another chunk or other bytes than the right ones."""

    def serve(connection: socket.socket) -> None:
        connection.recv(KEY_BYTES, socket.MSG_WAITALL)
        for _ in range(count):
            asked = _requested(connection)
            if not asked:
                return
            chunk, right = asked
            number, content = change(chunk, right)
            connection.sendall(struct.pack("!IQQ", number, len(content), xxh3_64_intdigest(right, chunk)) + content)

    return serve


def _requested(connection: socket.socket) -> tuple[int, bytes] | None:
    """Number and content of the chunk, of one piece, that somebody wants."""
    asked = connection.recv(NAME_BYTES + 24, socket.MSG_WAITALL)
    if not asked:
        return None
    chunk, count, start, nbytes = struct.unpack("!IIQQ", asked[NAME_BYTES:])
    assert count == 1
    return chunk, SOURCE[start : start + nbytes].tobytes()


@pytest.fixture
def sender() -> Iterator[Sender]:
    running = Sender()
    yield running
    running.join()


def received(sender: Sender, name: str = NAME, copies: Sequence[Copy] = WHOLE) -> Bytes:
    target = np.full(len(SOURCE), 7, np.uint8)
    connection = Receiver(name, target, copies, sender.connect).run()
    assert connection
    connection.close()
    return target


def why(sender: Sender, name: str = NAME, copies: Sequence[Copy] = WHOLE) -> str:
    with pytest.raises(HandOverFailed) as failed:
        received(sender, name, copies)
    return failed.value.why


def test_brings_all_bytes(sender: Sender) -> None:
    assert np.array_equal(received(sender), SOURCE)


def test_brings_pieces_to_where_they_belong_and_touches_nothing_else(sender: Sender) -> None:
    piece, gap = 3001, 4000
    copies = [(at * gap, len(SOURCE) - (at + 1) * gap, piece) for at in range(len(SOURCE) // gap)]
    target = received(sender, copies=copies)
    wanted = np.full(len(SOURCE), 7, np.uint8)
    for to, start, nbytes in copies:
        wanted[to : to + nbytes] = SOURCE[start : start + nbytes]
    assert np.array_equal(target, wanted)


def test_a_connection_serves_one_transfer_after_another(sender: Sender) -> None:
    kept = first = sender.connect()
    for _ in range(3):
        target = np.zeros(len(SOURCE), np.uint8)
        connection = Receiver(NAME, target, WHOLE, sender.connect, kept).run()
        assert connection is first
        kept = connection
        assert np.array_equal(target, SOURCE)
    kept.close()


def test_a_connection_that_was_closed_meanwhile_is_no_loss(sender: Sender) -> None:
    target = np.zeros(len(SOURCE), np.uint8)
    sender.serving = [answering(lambda *right: right, count=0), honest]
    connection = Receiver(NAME, target, WHOLE, sender.connect, sender.connect()).run()
    assert connection
    connection.close()
    assert np.array_equal(target, SOURCE)


def test_damage_on_the_way_is_mended(sender: Sender) -> None:
    seen = set[int]()

    def flip_once(chunk: int, content: bytes) -> tuple[int, bytes]:
        if chunk in seen:
            return chunk, content
        seen.add(chunk)
        return chunk, content[:-1] + bytes([content[-1] ^ 1])

    sender.serving = [answering(flip_once)]
    assert np.array_equal(received(sender), SOURCE)
    assert len(seen) == CHUNKS


def test_damage_at_the_source_is_told(sender: Sender) -> None:
    sender.serving = [answering(lambda chunk, content: (chunk, bytes([content[0] ^ 1]) + content[1:]))]
    assert why(sender) == "damaged"


def test_a_connection_that_ends_is_made_again(sender: Sender) -> None:
    sender.serving = [answering(lambda *right: right, count=2), answering(lambda *right: right, count=1), honest]
    assert np.array_equal(received(sender), SOURCE)


def test_a_sender_that_is_gone_is_told(sender: Sender) -> None:
    sender.serving = [answering(lambda *right: right, count=2), lambda connection: None]
    assert why(sender) == "lost"


def test_a_timeout_is_told(sender: Sender) -> None:
    def say_nothing(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    sender.serving = [say_nothing]
    assert why(sender) == "silent"


def test_what_there_is_not_is_told(sender: Sender) -> None:
    assert why(sender, "0" * NAME_BYTES) == "unknown"
    assert why(sender, copies=[(0, 1, len(SOURCE))]) == "unknown"


def test_a_wrong_key_opens_nothing(sender: Sender) -> None:
    sender.key = bytes(KEY_BYTES)
    assert why(sender) == "lost"


def test_who_connects_and_does_not_say_the_key_is_let_go(sender: Sender) -> None:
    let_in: list[bool] = []
    sender.serving = [lambda connection: let_in.append(admit(connection, KEY, within_s=0.05))]
    sender.key = KEY[:5]
    with sender.connect() as connection:
        set_timeout(connection, 30.0)
        assert connection.recv(1) == b""
    assert not any(let_in)


def test_who_has_said_the_key_may_be_silent_between_transfers(sender: Sender) -> None:
    ends: list[socket.socket] = []

    def keep(connection: socket.socket) -> None:
        ends.append(connection)
        honest(connection)

    sender.serving = [keep]
    connection = Receiver(NAME, np.zeros(len(SOURCE), np.uint8), WHOLE, sender.connect).run()
    assert connection
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        assert not any(ends[0].getsockopt(socket.SOL_SOCKET, option, 16))
    connection.close()


def test_an_answer_of_another_length_is_damage(sender: Sender) -> None:
    sender.serving = [answering(lambda chunk, content: (chunk, content[1:]))]
    assert why(sender) == "damaged"


def test_a_chunk_that_is_called_another_is_damage(sender: Sender) -> None:
    sender.serving = [answering(lambda chunk, content: ((chunk + 1) % (CHUNKS - 1), content))]
    assert why(sender) == "damaged"


def test_what_came_already_is_put_nowhere(sender: Sender) -> None:
    """The first chunk comes twice, the second time all zeros."""

    def twice(connection: socket.socket) -> None:
        connection.recv(KEY_BYTES, socket.MSG_WAITALL)
        while asked := _requested(connection):
            chunk, right = asked
            for content in (right, bytes(len(right))) if chunk == 0 else (right,):
                digest = xxh3_64_intdigest(content, chunk)
                connection.sendall(struct.pack("!IQQ", chunk, len(content), digest) + content)

    sender.serving = [twice]
    assert np.array_equal(received(sender), SOURCE)
