"""Instances that join a running server and leave it for good: streams do not notice, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.live.ctl import Done, ctl, while_streams_run
from tests.live.market import MARKET
from tests.live.server import SPLIT, Server, eventually, launched, processes_of
from tests.live.streams import Body, drawn_bodies, run_all
from tests.long_forms import first_rows_of

MODELS = list(MARKET)[:3]
STREAMS = 12
MAX_TOKENS = 100
_OPTIONS = ("--dtype", "float32", "--device-memory", "96MiB", "--debug-memory")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("joining")
    models = [option for model in MODELS for option in ("--models", str(checkpoints_dir / model))]
    options = [*models, *_OPTIONS, *SPLIT, "--proxies", "2"]
    with launched(directory, cache, *options) as running:
        running.wait_for_ready()
        yield running


def _bodies() -> list[Body]:
    return drawn_bodies("joining", MODELS, STREAMS, MAX_TOKENS)


def _answers(server: Server) -> list[list[int]]:
    streams = run_all(server.url, _bodies())
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert all(stream.done and len(stream.tokens) == MAX_TOKENS for stream in streams)
    return [stream.tokens for stream in streams]


def _while_streams_run(server: Server, undisturbed: list[list[int]], *words: str) -> Done:
    order = partial(ctl, server, *words)
    return while_streams_run(order, server.url, _bodies(), undisturbed, tokens=5 * STREAMS)


def _instances(server: Server) -> dict[str, str]:
    roles: dict[str, str] = server.get("/debug/node").json()["instances"]
    return roles


def _pid(server: Server, instance: str) -> int | None:
    """Whether it is up or not."""
    found = [pid for pid, command in processes_of(server.process.pid).items() if f" {instance}" in command]
    return found[0] if found else None


def _steps(server: Server, instance: str) -> int:
    return server.metrics().total("instance_steps_total", instance=instance)


def test_instances_join_serve_and_leave_while_streams_go_on(server: Server) -> None:
    undisturbed = _answers(server)
    added = _while_streams_run(server, undisturbed, "add", "--role", "decode", "--count", "2")
    assert (added.returncode, added.stdout, added.stderr) == (0, "decode-1, decode-2 serve\n", "")
    assert _instances(server) == {"prefill-0": "prefill"} | {f"decode-{n}": "decode" for n in range(3)}

    def each_has_stepped() -> bool:
        """The policy decides where a few streams go; of many, some reach each instance."""
        assert _answers(server) == undisturbed
        return all(_steps(server, joined) for joined in ("decode-1", "decode-2"))

    eventually(each_has_stepped, "they take their part")

    removed = _while_streams_run(server, undisturbed, "remove", "decode-0")
    assert (removed.returncode, removed.stdout) == (0, "decode-0 is removed\n")
    assert ctl(server, "drain", "decode-1").returncode == 0
    assert ctl(server, "remove", "decode-1").returncode == 0
    last = ctl(server, "remove", "decode-2")
    assert (last.returncode, last.stderr) == (
        1,
        "aegis: the pool would have prefill instances alone; it needs prefill and decode, or mixed only\n",
    )
    assert ctl(server, "add", "--role", "decode").stdout == "decode-3 serves\n", "no name is used twice"
    assert _instances(server) == {"prefill-0": "prefill", "decode-2": "decode", "decode-3": "decode"}
    assert server.ready()
    assert _answers(server) == undisturbed
    assert server.metrics().instances() == sorted(_instances(server))
    server.wait_for_freed_memory()


def _killed_while_it_joins(server: Server) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Its name, and the answer to who added it. Nothing makes an instance wait to be killed: one that serves before has
    to leave, and the next is tried."""
    for n in range(1, 6):
        name = f"prefill-{n}"
        with ThreadPoolExecutor(1) as beside:
            adding = beside.submit(ctl, server, "add", "--role", "prefill")
            os.kill(eventually(lambda name=name: _pid(server, name), "it is started"), signal.SIGKILL)
            added = adding.result()
        if added.returncode:
            return name, added
        eventually(server.ready, "it serves again")
        assert ctl(server, "remove", name).returncode == 0
    raise AssertionError("each of five served before it was killed")


@pytest.mark.long
def test_one_that_dies_before_it_serves_leaves_nothing_behind(server: Server) -> None:
    before = _instances(server)
    name, added = _killed_while_it_joins(server)
    assert added.returncode == 1
    assert added.stderr == f"aegis: {name} did not come up: its process ended with code -9; see the log\n"
    assert _instances(server) == before
    assert server.ready()
    assert server.metrics().instances() == sorted(before)
    assert _answers(server)


@pytest.mark.long
def test_of_two_who_remove_it_one_comes_too_late(server: Server) -> None:
    before = _instances(server)
    assert ctl(server, "add", "--role", "decode").returncode == 0
    (joined,) = _instances(server).keys() - before.keys()
    with ThreadPoolExecutor(3) as beside:
        words = [("remove", joined), ("remove", joined), ("drain", joined)]
        done = list(beside.map(lambda these: ctl(server, *these), words))
    assert sorted(each.returncode for each in done[:2]) == [0, 1]
    (late,) = [each.stderr for each in done[:2] if each.returncode]
    assert late.startswith(f"aegis: there is no instance named '{joined}'")
    assert _instances(server) == before
    assert server.ready()


@pytest.mark.parametrize(
    ("words", "why"),
    first_rows_of(
        2,
        [
            (("add",), "say in which role: the pool has prefill and decode instances"),
            (("add", "--role", "mixed"), "the pool would have decode, mixed, prefill instances alone"),
            (("add", "--role", "cook"), "--role: 'cook' is none of prefill, decode, mixed"),
            (("add", "--role", "decode", "--count", "0"), "--count: should be between 1 and 64, not 0"),
            (("drain", "#"), "there is no instance named '#'"),
            (("drain", ""), "there is no instance named ''"),
            (("remove", "decode-9"), "there is no instance named 'decode-9'"),
        ],
    ),
)
def test_what_cannot_be_added_or_removed_is_refused(server: Server, words: tuple[str, ...], why: str) -> None:
    before = _instances(server)
    done = ctl(server, *words)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"aegis: {why}")
    assert _instances(server) == before


@pytest.mark.long
def test_a_role_that_was_given_up_is_served_again_by_one_that_joins(server: Server) -> None:
    def given_up() -> bool:
        if pid := _pid(server, "prefill-0"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "does not come up any more" in server.get("/health").text

    eventually(given_up, "it is given up, as one that has served is after minutes", within_s=400)
    assert server.post("/v1/completions", _bodies()[0]).status_code == httpx.codes.SERVICE_UNAVAILABLE
    added = ctl(server, "add", "--role", "prefill")
    assert added.returncode == 0, added.stderr
    assert ctl(server, "remove", "prefill-0").stdout == "prefill-0 is removed\n"
    assert server.ready()
    assert _answers(server)
