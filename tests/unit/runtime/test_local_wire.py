"""Wires within one machine lose nothing, mix nothing up and make nobody wait."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.clock import NS_PER_S
from aegis.runtime.clock import MonotonicClock
from aegis.runtime.local_wire import LocalEnd, LocalPort, LocalWire, LocalWires

LARGE = os.urandom(3 << 20)  # many times what a socket holds
Heard = list[tuple[str, bytes]]


def pair() -> tuple[LocalWire, LocalWire]:
    here, there = socket.socketpair()
    return LocalWire(here), LocalWire(there)


def with_port(tmp_path: Path, work: Callable[[LocalPort, Heard], Coroutine[Any, Any, None]]) -> None:
    heard: Heard = []

    async def main() -> None:
        port = LocalPort(f"ipc://{tmp_path}/port", lambda who, said: heard.extend((who, body) for body in said))
        try:
            async with asyncio.timeout(30):
                await work(port, heard)
        finally:
            port.close()

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


@given(st.lists(st.binary(max_size=50), max_size=20), st.data())
def test_messages_come_whole_and_in_order_however_they_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    here, there = pair()
    raw, other = socket.socketpair()
    for body in bodies:
        here.send(body)
    here.close()
    stream = b"".join(iter(lambda: there._socket.recv(1 << 16), b""))
    wire, came = LocalWire(other), list[bytes]()
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        raw.sendall(stream[:cut])
        came += wire.receive()
        stream = stream[cut:]
    assert came == bodies
    for each in (there, wire, raw):
        each.close()


def test_a_sender_never_waits_for_who_does_not_read() -> None:
    here, there = pair()
    bodies = [LARGE, b"", b"small", LARGE]
    for body in bodies:
        here.send(body)
    assert here.unsent
    came: list[bytes] = []
    while len(came) < len(bodies):
        came += there.receive()
        here.flush()
    assert came == bodies and not here.unsent
    here.close()
    there.close()


def test_what_a_process_said_before_it_was_killed_is_heard(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/port"
    program = f"""
import os
from aegis.runtime.local_wire import LocalWire
wire = LocalWire.to({address!r}, "decode-0/1")
wire.send(b"last words")
os.kill(os.getpid(), 9)
"""

    async def work(port: LocalPort, heard: Heard) -> None:
        done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False)
        assert done.returncode == -9
        await until(lambda: bool(heard))
        assert heard == [("decode-0/1", b"last words")]
        port.send("decode-0/1", b"to nobody")

    with_port(tmp_path, work)


def test_what_was_said_to_an_end_before_it_closed_is_not_lost_by_answering(tmp_path: Path) -> None:
    here, there = pair()
    there.send(b"last words")
    there.close()
    here.send(b"to nobody")
    assert here.receive() == [b"last words"]
    assert here.receive() == [] and not here.open
    here.send(b"to nobody")
    assert not here.unsent
    here.close()


def test_a_wire_to_nobody_is_closed(tmp_path: Path) -> None:
    (tmp_path / "left").touch()
    for name in ("never", "left"):
        wire = LocalWire.to(f"ipc://{tmp_path}/{name}", "decode-0/1")
        wire.send(b"anything")
        assert not wire.open and wire.receive() == []


def test_a_port_takes_the_place_of_one_whose_process_was_killed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "port"))

    async def work(port: LocalPort, heard: Heard) -> None:
        wire = LocalWire.to(port.address, "decode-0/1")
        wire.send(b"hello")
        await until(lambda: bool(heard))
        wire.close()

    with_port(tmp_path, work)


def test_both_sides_say_much_at_once(tmp_path: Path) -> None:
    async def work(port: LocalPort, heard: Heard) -> None:
        told: list[bytes] = []
        end = LocalEnd(LocalWire.to(port.address, "proxy-1"), told.extend)
        end.send(LARGE)
        await until(lambda: bool(heard))
        for _ in range(4):
            port.send("proxy-1", LARGE)
            end.send(LARGE)
        await until(lambda: len(told) == 4 and len(heard) == 5)
        assert heard == [("proxy-1", LARGE)] * 5 and told == [LARGE] * 4
        end.close()

    with_port(tmp_path, work)


def test_the_loss_of_an_end_is_told_once_and_its_name_is_free(tmp_path: Path) -> None:
    async def work(port: LocalPort, heard: Heard) -> None:
        lost: list[str] = []
        first = LocalWire.to(port.address, "decode-0/1")
        first.send(b"one")
        await until(lambda: len(heard) == 1)
        first.close()
        await until(lambda: not port._ends)
        second = LocalEnd(LocalWire.to(port.address, "decode-0/1"), lambda said: None, lambda: lost.append("second"))
        second.send(b"two")
        await until(lambda: len(heard) == 2)
        port._ends["decode-0/1"].close()
        await until(lambda: bool(lost))
        assert lost == ["second"]

    with_port(tmp_path, work)


def test_a_thread_waits_for_any_wire_and_sends_meanwhile(tmp_path: Path) -> None:
    clock = MonotonicClock()

    async def work(port: LocalPort, heard: Heard) -> None:
        def in_thread() -> list[bytes]:
            wires = LocalWires("decode-0/1")
            wires.connected(f"ipc://{tmp_path}/nobody")
            wires.cut(wires.connected(port.address))
            wire = wires.connected(port.address)
            wire.send(LARGE)
            assert wire.unsent
            came: list[bytes] = []
            deadline_ns = clock.now_ns() + 20 * NS_PER_S
            while not came and clock.now_ns() < deadline_ns:
                wires.wait(1_000)
                came = wire.receive()
            began_ns = clock.now_ns()
            wires.wait(30)
            assert 25_000_000 <= clock.now_ns() - began_ns < 10 * NS_PER_S, "a closed wire wakes nobody"
            wire.send(LARGE)
            wires.close()  # and sends what is left
            return came

        thread = asyncio.create_task(asyncio.to_thread(in_thread))
        await until(lambda: len(heard) == 1)
        port.send("decode-0/1", b"heard")
        assert await thread == [b"heard"]
        await until(lambda: len(heard) == 2)
        assert heard == [("decode-0/1", LARGE)] * 2

    with_port(tmp_path, work)


def test_many_connect_at_once(tmp_path: Path) -> None:
    count = 300

    async def work(port: LocalPort, heard: Heard) -> None:
        wires = [LocalWire.to(port.address, f"decode-{n}/1") for n in range(count)]
        for wire in wires:
            wire.send(b"hello")
        await until(lambda: len(heard) == count)
        assert {who for who, _ in heard} == {f"decode-{n}/1" for n in range(count)}
        for wire in wires:
            wire.close()

    with_port(tmp_path, work)
