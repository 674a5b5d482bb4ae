"""SIGTERM ends a server soon, whatever its clients do; who streams is told. What never comes back is ended, too."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event

import httpx
import pytest

from tests import checkpoints
from tests.attacks import test_http_memory
from tests.attacks.harness import HONEST, attacked, ends_soon, recorded
from tests.attacks.test_bodies import HEAVY
from tests.attacks.test_grammars import ambiguous
from tests.attacks.wire import Wire, request
from tests.live.server import ROOT, WAIT_S, Server, leaves_nothing
from tests.live.streams import Stream, run_all, until
from tests.long_forms import first_of

HALF_SENT = 50
UNREAD = 5
ATTACKERS = 6
ANSWERED_MAX = 100
"""Answers that may come before the thread notices that it is to hang."""

ENDLESS = HONEST | {"max_tokens": 4000}
LASTING_TOKENS = 50_000
LASTING = HONEST | {"max_tokens": LASTING_TOKENS}
"""Outlives the time that streams are given at the end, however fast steps are."""
LAST_S = 16.0
"""That the end may take where nothing of the orderly one works. It is no 5 s: so long the launcher
gives an orderly end before it is killed, besides `--shutdown-timeout`."""

HANGS = """
import ctypes, os, sys, threading, time

def hang():
    while not os.path.exists({file!r}):
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(1000)  # and keeps the interpreter to itself

if "launch" in sys.orig_argv:
    threading.Thread(target=hang, daemon=True).start()
"""


@contextmanager
def hanging_connections(server: Server) -> Iterator[None]:
    body = json.dumps(LASTING | {"stream": True}).encode()
    whole = request("/v1/completions", body)
    with ExitStack() as stack:
        for _ in range(UNREAD):
            wire = stack.enter_context(Wire(server.url))
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            assert wire.send(whole)
        for _ in range(HALF_SENT):
            assert stack.enter_context(Wire(server.url)).send(whole[:-10])
        yield


@pytest.mark.alone
@pytest.mark.parametrize("proxies", first_of(1, [2, 1]))
def test_nobody_who_hangs_keeps_it_from_ending(tmp_path: Path, cache: Path, proxies: int) -> None:
    model = checkpoints.write(tmp_path / "llama", "llama", max_position_embeddings=LASTING_TOKENS + 64)
    options = ["--models", str(model), "--proxies", str(proxies)]
    with attacked(tmp_path / "server", cache, *options) as server, hanging_connections(server):

        async def end(streams: list[Stream]) -> None:
            await until(lambda: all(stream.tokens for stream in streams), "all stream")
            await asyncio.to_thread(ends_soon, server)

        streams = run_all(server.url, [LASTING] * proxies, end)  # type: ignore[arg-type]
        for stream in streams:
            assert stream.error and stream.error["message"].startswith("the server is shutting down")
    assert "Traceback" not in server.output()


def _flood(server: Server, number: int) -> None:
    begin, unit = list(test_http_memory.ENDLESS.values())[number % len(test_http_memory.ENDLESS)]
    test_http_memory.flood(server.url, begin, unit)


def _heavy_body(server: Server, number: int) -> None:
    content = list(HEAVY.values())[number % len(HEAVY)]
    httpx.post(server.url + "/v1/completions", content=content, timeout=WAIT_S, trust_env=False, verify=False)


def _tokenize(server: Server, number: int) -> None:
    body = {"model": "llama", "prompt": ("the cat", "x", "0123456789")[number % 3] * 50_000}
    httpx.post(server.url + "/tokenize", json=body, timeout=WAIT_S, trust_env=False, verify=False)


def _leave(server: Server, number: int) -> None:
    with Wire(server.url) as wire:
        wire.send(request("/v1/completions", json.dumps(ENDLESS).encode()) * (1 + 60 * (number % 2)))


def _slow_grammar(server: Server, number: int) -> None:
    letters = server.post("/tokenize", {"model": "llama", "prompt": "ca", "add_special_tokens": False}).json()["tokens"]
    grammar = 'root ::= [^c] [^c]* | "c" s0\n' + ambiguous(20) + f"\n# {number}"
    body = HONEST | {"structured_outputs": {"grammar": grammar}, "logit_bias": dict.fromkeys(letters, 100)}
    httpx.post(server.url + "/v1/completions", json=body, timeout=WAIT_S, trust_env=False, verify=False)


def _all(server: Server, number: int) -> None:
    each, turn = list(EACH.values()), number // len(EACH)
    each[number % len(EACH)](server, turn)


EACH: dict[str, Callable[[Server, int], None]] = {
    "floods": _flood,
    "heavy bodies": _heavy_body,
    "texts to tokenize": _tokenize,
    "clients that leave": _leave,
    "slow grammars": _slow_grammar,
}
ATTACKS = EACH | {"all of them": _all}


@pytest.fixture
def ending(
    request: pytest.FixtureRequest, name: str, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> Iterator[Server]:
    """A server of two proxies that nobody needs any more."""
    if name == "texts to tokenize":
        yield request.getfixturevalue("of_two")
        return
    options = ["--models", str(checkpoints_dir / "llama"), "--proxies", "2"]
    with attacked(tmp_path / "server", cache, *options) as server:
        yield server


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("all of them", signal.SIGTERM),
        pytest.param("texts to tokenize", signal.SIGHUP, marks=pytest.mark.long),
        *(pytest.param(name, signal.SIGTERM, marks=pytest.mark.long) for name in EACH if name != "texts to tokenize"),
    ],
)
def test_it_ends_soon_under_attack(ending: Server, name: str, number: signal.Signals) -> None:
    over = Event()

    def attack(which: int) -> None:
        while not over.is_set():
            with suppress(OSError, httpx.HTTPError):
                ATTACKS[name](ending, which)
            which += ATTACKERS

    with ThreadPoolExecutor(ATTACKERS) as pool:
        for which in range(ATTACKERS):
            pool.submit(attack, which)
        try:
            time.sleep(1.0)  # all are at it
            ends_soon(ending, number=number)
        finally:
            over.set()


@pytest.mark.long
def test_a_thread_that_keeps_the_interpreter_does_not_keep_it_from_ending(
    tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    """Neither at SIGTERM nor at SIGINT. Two servers hang at once, for nothing of either runs meanwhile."""
    hangs = tmp_path / "hangs"
    (tmp_path / "sitecustomize.py").write_text(HANGS.format(file=str(hangs)))
    options = ["--models", str(checkpoints_dir / "llama"), "--shutdown-timeout", "0"]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    numbers = (signal.SIGTERM, signal.SIGINT)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(number: signal.Signals) -> Server:
            return stack.enter_context(attacked(tmp_path / number.name, cache, *options, environment=environment))

        def ends(server: Server, number: signal.Signals) -> None:
            with pytest.raises(httpx.TimeoutException):
                for _ in range(ANSWERED_MAX):
                    httpx.get(server.url + "/health", timeout=1, trust_env=False, verify=False)
            began_s = time.monotonic()
            server.process.send_signal(number)
            assert server.process.wait(WAIT_S) == -signal.SIGKILL
            assert LAST_S - 2 < time.monotonic() - began_s < LAST_S + 2
            leaves_nothing(server)

        servers = [start(number) for number in numbers]
        for server in servers:
            recorded(server)
        hangs.touch()
        list(threads.map(ends, servers, numbers))
