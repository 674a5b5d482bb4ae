"""A server's start and its recovery: `aegis lab start`.

`aegis launch` is started as users start it, and asked for a token as soon as it says that it serves. Then the memory of
all its processes is added up, in which a page that n of them share counts as an nth in each (PSS, proc(5)). Then
instances are killed, one after the other, while streams run.

Besides the wall clock there is the processor time that the start took, for machines that have other work too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import httpx
from msgspec import Struct
from rich.console import Console

from aegis.core.errors import UserError
from bench.common import result_files
from bench.common.figures import Figure, at_most
from bench.common.machine import Machine, describe
from bench.common.processes import command_of, cpu_s, family, shared_out_bytes
from bench.common.served import launched

OPTIONS = ("--prefill", "6", "--decode", "10")
KILLS = 11
STREAMS = 4
FIRST_TOKEN_S_MAX = 20.0
MEMORY_GB_MAX = 3.5
RECOVERY_S_MAX = 1.0
_STEADY_S = 12.0  # an instance that ends sooner after its start is started again after a pause
_INSTANCE = "-m aegis.instance.process "
_WAIT_S = 60.0
_POLL_S = 0.005
_BETWEEN_S = 1.0
_PROMPT_ROOM = 64  # tokens of the context


class Recovery(Struct, frozen=True):
    """After `kill -9` of an instance: until its place has a process again, until that serves, and what processor time
    that has had by then."""

    instance: str
    process_s: float
    serves_s: float
    processor_s: float


class Start(Struct, frozen=True):
    """After the command, and what its processes held when the first token had come and after the kills."""

    ready_s: float
    first_token_s: float
    processor_s: float
    memory_bytes: int
    memory_after_bytes: int
    processes: int


class Result(Struct, frozen=True):
    machine: Machine
    options: tuple[str, ...]
    start: Start
    recoveries: tuple[Recovery, ...]
    figures: tuple[Figure, ...]


def run(
    json_path: Path | None = None,
    *,
    kills: int = KILLS,
    streams: int = STREAMS,
    options: Sequence[str] = OPTIONS,
    steady_s: float = _STEADY_S,
) -> Result:
    """Measures, prints the figures and writes all to `json_path`. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    machine = describe()
    with launched(options, remembers=False) as server:
        url, launcher, began_s = server.url, server.launcher, server.began_s
        ready_s = time.monotonic() - began_s
        _first_token(url)
        first_token_s = time.monotonic() - began_s
        processor_s, processes = cpu_s(launcher), family(launcher)
        memory_bytes = shared_out_bytes(processes)
        with _streams(url, streams):
            time.sleep(max(began_s + ready_s + steady_s - time.monotonic(), 0))
            recoveries = tuple(_recoveries(url, launcher, kills))
        after_bytes = shared_out_bytes(family(launcher))
    start = Start(ready_s, first_token_s, processor_s, memory_bytes, after_bytes, len(processes))
    result = Result(machine, tuple(options), start, recoveries, _figures(start, recoveries))
    _print(result)
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _figures(start: Start, recoveries: Sequence[Recovery]) -> tuple[Figure, ...]:
    memory_gb, after_gb = start.memory_bytes / 1e9, start.memory_after_bytes / 1e9
    figures = [
        Figure("ready", start.ready_s, "s"),
        at_most("first token", start.first_token_s, "s", FIRST_TOKEN_S_MAX),
        Figure("processor time until then", start.processor_s, "s"),
        at_most(f"memory of {start.processes} processes", memory_gb, "GB", MEMORY_GB_MAX),
    ]
    if recoveries:
        served_s = [each.serves_s for each in recoveries]
        figures += [
            at_most("memory after the kills", after_gb, "GB", MEMORY_GB_MAX),
            Figure("killed, until there is a process", median(each.process_s for each in recoveries), "s"),
            at_most(f"killed, until it serves, median of {len(served_s)}", median(served_s), "s", RECOVERY_S_MAX),
            Figure("killed, until it serves, longest", max(served_s), "s"),
            Figure("processor time of the new process by then", median(each.processor_s for each in recoveries), "s"),
        ]
    return tuple(figures)


def _print(result: Result) -> None:
    console = Console(markup=False, highlight=False)
    for figure in result.figures:
        console.print(f"{figure.name:44} {figure.value:8.3g} {figure.unit:3} {figure.wanted}".rstrip())


# --- the server -------------------------------------------------------------------------------------------------------


def _first_token(url: str) -> None:
    """Returns when the first model has made one."""
    with _client(url) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "Tell me a story.", "max_tokens": 1, "temperature": 0}
        reply = client.post("/v1/completions", json=body)
    if reply.status_code != httpx.codes.OK:
        raise UserError(f"the server answers {reply.status_code}: {reply.text}")


def _recoveries(url: str, launcher: int, kills: int) -> Iterator[Recovery]:
    """Each kill is of another instance, as long as there are any: whose process is young waits for the next one."""
    with _client(url) as client:
        names = sorted(_instances(launcher), key=lambda name: name.rpartition("-")[::-1])
        for number in range(kills):
            yield _killed(client, launcher, names[number % len(names)])
            time.sleep(_BETWEEN_S)


def _killed(client: httpx.Client, launcher: int, name: str) -> Recovery:
    pid = _instances(launcher)[name]
    deadline_s = time.monotonic() + _WAIT_S
    began_s, process_s = time.monotonic(), None
    os.kill(pid, signal.SIGKILL)
    while time.monotonic() < deadline_s:
        if process_s is None and _instances(launcher).get(name, pid) != pid:
            process_s = time.monotonic() - began_s
        if process_s is not None and client.get("/ready").status_code == httpx.codes.OK:
            serves_s = time.monotonic() - began_s
            return Recovery(name, process_s, serves_s, cpu_s(_instances(launcher)[name]))
        time.sleep(_POLL_S)
    raise UserError(f"{name} does not serve {_WAIT_S:.0f} s after it was killed")


def _instances(launcher: int) -> dict[str, int]:
    """The process of each."""
    commands = ((command_of(pid), pid) for pid in family(launcher))
    return {command.rpartition(_INSTANCE)[2]: pid for command, pid in commands if _INSTANCE in command}


# --- clients ----------------------------------------------------------------------------------------------------------


@contextmanager
def _streams(url: str, count: int) -> Iterator[None]:
    """So many that ask again when they are answered, each another model."""
    stop = threading.Event()
    threads = [threading.Thread(target=_stream, args=(url, number, stop), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _stream(url: str, number: int, stop: threading.Event) -> None:
    with _client(url) as client, suppress(httpx.TransportError):
        cards = client.get("/v1/models").json()["data"]
        card = cards[number % len(cards)]
        body = {"model": card["id"], "prompt": f"Tell me story {number}.", "max_tokens": card["max_model_len"] // 2}
        while not stop.is_set():
            with client.stream("POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as reply:
                for _ in reply.iter_lines():
                    if stop.is_set():
                        break


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_WAIT_S, trust_env=False)
