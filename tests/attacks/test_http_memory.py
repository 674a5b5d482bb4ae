"""Endless input takes no memory: trailers, chunk extensions, sizes, heads, unwanted bodies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path

import pytest

from tests.attacks.harness import HEALTH_S, at_once, attacked, under_attack
from tests.attacks.wire import Heard, Wire, request
from tests.live.server import Server
from tests.long_forms import first_rows_of

pytestmark = pytest.mark.alone

KEY = "sk-honest"
ATTACKERS = 4
SENT_MAX = 96 << 20
"""Of each attacker that is not stopped before."""
SEND_S = 3.0
PIECE = 64 << 10
MAIN = "/v1/completions"
CHUNKED = b"Transfer-Encoding: chunked"


def head(path: str = MAIN, *headers: bytes, length: bytes = CHUNKED) -> bytes:
    return b"\r\n".join([b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", length, *headers, b"", b""])


def filled(unit: bytes) -> bytes:
    return unit * (PIECE // len(unit))


ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "trailers of many lines": (head() + b"0\r\n", filled(b"X-A: b\r\n")),
    "a trailer of one line": (head() + b"0\r\nX-A: ", filled(b"b")),
    "a trailer's name": (head() + b"0\r\n", filled(b"b")),
    "a chunk extension": (head() + b"1;", filled(b"a")),
    "chunk extensions": (head() + b"1;", filled(b"a=b;")),
    "a quoted chunk extension": (head() + b'1;a="', filled(b"b")),
    "zeros of a chunk's size": (head(), filled(b"0")),
    "extensions of small chunks": (head(), filled(b"1;" + b"a" * 100 + b"\r\nb\r\n")),
    "an URL": (b"GET /", filled(b"a")),
    "a header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", filled(b"b")),
    "headers": (b"GET / HTTP/1.1\r\nHost: localhost\r\n", filled(b"X-A: b\r\n")),
    "a method": (b"", filled(b"G")),
    "line ends before a request": (b"", filled(b"\r\n")),
    "requests that no answer is awaited of": (b"", filled(request("/health"))),
    "a body that is too large": (head(), filled(b"400\r\n" + b"a" * 1024 + b"\r\n")),
    "a body for nobody": (head("/nowhere"), filled(b"400\r\n" + b"a" * 1024 + b"\r\n")),
    "a body of a GET": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % CHUNKED, filled(b"1\r\na\r\n")),
    "a body behind Upgrade": (
        head(MAIN, b"Connection: Upgrade", b"Upgrade: h2c"),
        filled(b"400\r\n" + b"a" * 1024 + b"\r\n"),
    ),
    "a body whose length is told": (head(length=b"Content-Length: 9000000000"), filled(b"a")),
}


def flood(url: str, begin: bytes, unit: bytes) -> tuple[int, Heard]:
    """How much it took, until it stopped reading or the time is over, and what it said."""
    until_s, sent = time.monotonic() + SEND_S, 0
    with Wire(url) as wire:
        wire.send(begin)
        wire.socket.settimeout(1.0)
        for piece in repeat(unit, SENT_MAX // len(unit)):
            if not wire.send(piece) or time.monotonic() > until_s:
                break
            sent += len(piece)
        return sent, wire.hear(within_s=2.0, silence_s=0.1)


SLOW = ("requests that no answer is awaited of", "a body for nobody", "a body behind Upgrade")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in ENDLESS]
)
def test_what_has_no_end_is_cut_off(server: Server, name: str) -> None:
    begin, unit = ENDLESS[name]
    with under_attack(server, f"endless {name}"):
        for _, heard in at_once(lambda _: flood(server.url, begin, unit), ATTACKERS):
            assert all(status < 500 for status in heard.statuses), heard


@pytest.mark.parametrize("name", [name for name in ENDLESS if not name.startswith(("a body", "requests", "line ends"))])
def test_framing_has_a_bound(server: Server, name: str) -> None:
    """Bytes that are no body are refused after 64 KiB, or a few times that if many come at once."""
    sent, heard = flood(server.url, *ENDLESS[name])
    assert heard.closed and sent < 16 << 20, (sent, heard)
    assert not heard.statuses or heard.statuses[-1] in (400, 431), heard


CROWD = 100
UNENDED = {
    "of the smallest headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 16_000,
    "of as many headers as there may be": b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    + b"a:\r\n" * 120
    + b"X: "
    + b"b" * 60_000,
    "behind others": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 120 + b"\r\n",
    "of bodies that do not come": head(length=b"Content-Length: 10")[:-2] + b"X: " + b"b" * 60_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", UNENDED)
def test_heads_that_do_not_end_take_little_together(server: Server, name: str) -> None:
    sent = UNENDED[name] * (60 if name == "behind others" else 1)
    with under_attack(server, f"{CROWD} heads {name}"), ExitStack() as stack:
        for _ in range(CROWD):
            stack.enter_context(Wire(server.url)).send(sent)
        assert server.get("/health").status_code == 200


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("guarded")
    options = ["--models", str(checkpoints_dir / "llama")]
    with attacked(directory / "server", cache, *options, environment={"AEGIS_API_KEY": KEY}) as running:
        yield running


def test_a_body_of_one_that_may_not_ask_is_not_kept(guarded: Server) -> None:
    begin, unit = head(), filled(b"400\r\n" + b"a" * 1024 + b"\r\n")
    with under_attack(guarded, "bodies behind a 401", key=KEY):
        for _, heard in at_once(lambda _: flood(guarded.url, begin, unit), ATTACKERS):
            assert heard.statuses in ([401], []), heard


def in_chunks(body: bytes, size: int) -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("nbytes", "size", "status"), first_rows_of(1, [(1 << 20, 1, 400), (200, 1, 200), (1 << 20, 64, 200)])
)
def test_small_chunks_are_read_unless_there_are_many(server: Server, nbytes: int, size: int, status: int) -> None:
    body = json.dumps({"model": "llama", "prompt": [5, 6], "max_tokens": 2}).encode().ljust(nbytes)
    with under_attack(server, f"{nbytes} bytes in chunks of {size}"), Wire(server.url) as wire:
        wire.send(head(MAIN, b"Content-Type: application/json"), in_chunks(body, size))
        assert wire.hear(count=1).statuses == [status]


@pytest.mark.long
@pytest.mark.parametrize(
    ("leaves", "health_s"),
    [(False, HEALTH_S), (True, 8 * HEALTH_S)],
    ids=["stay", "leave"],
)
def test_bodies_of_chunks_of_a_byte_that_come_again_and_again_disturb_few(
    server: Server, leaves: bool, health_s: float
) -> None:
    """Those who leave at once come faster than connections are accepted. Then new ones wait in the system's queue, as
    they do whatever comes in it, and no others do."""
    with under_attack(
        server, f"bodies of chunks of a byte, whose clients {'leave' if leaves else 'stay'}", health_s=health_s
    ) as report:
        come_again_and_again(server, head() + b"1\r\nx\r\n" * 60_000, leaves=leaves)
    assert report.kept_s <= HEALTH_S + report.late_s


def come_again_and_again(server: Server, sent: bytes, *, leaves: bool) -> None:
    until_s = time.monotonic() + SEND_S

    def come_again(_: int) -> None:
        while time.monotonic() < until_s:
            with Wire(server.url) as wire:
                wire.send(sent)
                if not leaves:
                    wire.hear(count=1)

    at_once(come_again, 8)


@pytest.mark.long
def test_nothing_is_kept_of_those_who_left_before_they_were_refused(guarded: Server) -> None:
    """Some thousand; with what was read of each kept by the traceback of its refusal, it would be 128 MiB."""
    with under_attack(guarded, "many that leave before a 401", key=KEY, growth_kib=10 << 10, health_s=8 * HEALTH_S):
        come_again_and_again(guarded, head() + b"1\r\nx\r\n" * 60_000, leaves=True)


@pytest.mark.long
def test_many_requests_of_clients_that_leave_at_once_disturb_few(server: Server) -> None:
    """Each would generate 400 tokens. None of those who left is begun, and none that waits behind another is parsed."""
    one = json.dumps({"model": "llama", "prompt": [5, 6], "max_tokens": 400, "ignore_eos": True}).encode()
    with under_attack(server, "requests of clients that leave", health_s=8 * HEALTH_S) as report:
        come_again_and_again(server, request(MAIN, one) * 62, leaves=True)
    assert report.kept_s <= HEALTH_S + report.late_s


def test_many_that_send_a_byte_at_a_time_disturb_nobody(server: Server) -> None:
    """Each byte renews its patience; what bounds the whole is told time in the tests of the protocol."""
    body = request(MAIN, json.dumps({"model": "llama", "prompt": [5], "max_tokens": 1}).encode())

    def trickle(_: int) -> list[int]:
        with Wire(server.url) as wire:
            wire.send(*(body[at : at + 1] for at in range(len(body))), pause_s=0.005)
            return wire.hear(count=1).statuses

    with under_attack(server, "bytes one at a time"):
        assert at_once(trickle, 32) == [[200]] * 32
