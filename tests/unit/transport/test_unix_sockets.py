"""Wires within one machine lose nothing, mix nothing up and make nobody wait."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.clock import NS_PER_S
from aegis.process.clock import MonotonicClock
from aegis.transport.unix_sockets import LocalEnd, LocalPort, LocalWire, LocalWires

LARGE = os.urandom(3 << 20)  # many times what a socket holds
Heard = list[tuple[str, bytes]]


def pair() -> tuple[LocalWire, LocalWire]:
    here, there = socket.socketpair()
    return LocalWire(here), LocalWire(there)


WithPort = Callable[[Callable[[LocalPort, Heard], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def with_port(tmp_path: Path, request: pytest.FixtureRequest) -> WithPort:
    """Servers run in uvloop, which is told of some things once where asyncio is told again."""
    return partial(run_with_port, tmp_path, request.param)


def run_with_port(
    tmp_path: Path,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    work: Callable[[LocalPort, Heard], Coroutine[Any, Any, None]],
) -> None:
    heard: Heard = []

    async def main() -> None:
        port = LocalPort(f"ipc://{tmp_path}/port", lambda who, said: heard.extend((who, body) for body in said))
        try:
            async with asyncio.timeout(30):
                await work(port, heard)
        finally:
            port.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


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


def test_what_a_process_said_before_it_was_killed_is_heard(tmp_path: Path, with_port: WithPort) -> None:
    address = f"ipc://{tmp_path}/port"
    program = f"""
import os
from aegis.transport.unix_sockets import LocalWire
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

    with_port(work)


def test_an_end_that_dies_with_much_unread_on_both_sides_is_heard_and_forgotten(with_port: WithPort) -> None:
    async def work(port: LocalPort, heard: Heard) -> None:
        for incarnation in range(20):
            who = f"decode-0/{incarnation}"
            wire = LocalWire.to(port.address, who)
            await until(lambda who=who: who in port._ends)  # type: ignore[misc]
            port.send(who, LARGE)
            await asyncio.sleep(0)
            said = [b"%d" % number for number in range(200)]
            for body in said:
                wire.send(body)
            wire.close()
            await until(lambda who=who: who not in port._ends)  # type: ignore[misc]
            assert [body for name, body in heard if name == who] == said

    with_port(work)


def test_all_that_a_dead_process_said_is_heard_however_much(with_port: WithPort) -> None:
    async def work(port: LocalPort, heard: Heard) -> None:
        wire = LocalWire.to(port.address, "decode-0/1")
        wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        await until(lambda: bool(port._ends))
        port.send("decode-0/1", LARGE)
        bodies = [bytes([number]) * (1 << 16) for number in range(40)]
        said = []
        while not wire.unsent and bodies:
            said.append(bodies.pop())
            wire.send(said[-1])
        whole = said[:-1] if wire.unsent else said
        wire.close()
        await until(lambda: not port._ends)
        assert [body for _, body in heard] == whole

    with_port(work)


def test_a_port_out_of_descriptors_rests_and_then_takes_who_waits(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, resource, uvloop
from aegis.transport import unix_sockets as local_wire
from aegis.transport.unix_sockets import LocalPort, LocalWire

async def main():
    errors, heard = [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    port = LocalPort("ipc://{tmp_path}/port", lambda who, said: heard.append(who))
    wire = LocalWire.to(port.address, "decode-0/1")
    wire.send(b"hello")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), 4096))
    while port._pause is None:
        await asyncio.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    async with asyncio.timeout(20):
        while not heard:
            await asyncio.sleep(0.01)
    assert not errors, errors
    port.close()

uvloop.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nobody can connect") == 1


def test_what_was_said_to_an_end_before_it_closed_is_not_lost_by_answering() -> None:
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


def test_a_port_takes_the_place_of_one_whose_process_was_killed(tmp_path: Path, with_port: WithPort) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "port"))

    async def work(port: LocalPort, heard: Heard) -> None:
        wire = LocalWire.to(port.address, "decode-0/1")
        wire.send(b"hello")
        await until(lambda: bool(heard))
        wire.close()

    with_port(work)


def test_both_sides_say_much_at_once(with_port: WithPort) -> None:
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

    with_port(work)


def test_the_loss_of_an_end_is_told_once_and_its_name_is_free(with_port: WithPort) -> None:
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

    with_port(work)


def test_a_thread_waits_for_any_wire_and_sends_meanwhile(tmp_path: Path, with_port: WithPort) -> None:
    clock = MonotonicClock()

    async def work(port: LocalPort, heard: Heard) -> None:
        def in_thread() -> list[bytes]:
            wires = LocalWires("decode-0/1")
            wires.connected(f"ipc://{tmp_path}/nobody")
            wires.cut(wires.connected(port.address))
            wire = wires.connected(port.address)
            wire.send(LARGE)
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

    with_port(work)


def test_many_connect_at_once(with_port: WithPort) -> None:
    count = 300

    async def work(port: LocalPort, heard: Heard) -> None:
        wires = [LocalWire.to(port.address, f"decode-{n}/1") for n in range(count)]
        for wire in wires:
            wire.send(b"hello")
        await until(lambda: len(heard) == count)
        assert {who for who, _ in heard} == {f"decode-{n}/1" for n in range(count)}
        for wire in wires:
            wire.close()

    with_port(work)
