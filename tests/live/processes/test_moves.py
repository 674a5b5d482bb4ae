"""Models move with their running streams between instances, again and again: no token is lost, doubled or another, no
stream stands still for long, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from aegis.control.client import order
from aegis.control.messages import MoveModel, Reply
from tests.live.ctl import ctl
from tests.live.market import RANKS
from tests.live.processes.moving import (
    INSTANCES,
    MAX_TOKENS,
    MOVED,
    OTHER,
    STREAMS,
    Mover,
    answers,
    bodies,
    check_moves,
)
from tests.live.server import Server, eventually, launched
from tests.live.streams import Stream, run_all, until

_OPTIONS = ("--dtype", "float32", "--device-memory", "96MiB", "--host-memory", "64MiB", "--debug-memory")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    models = [option for model in (MOVED, OTHER) for option in ("--models", str(checkpoints_dir / model))]
    options = [*models, *_OPTIONS, "--mixed", "2", "--proxies", "2", "--tensor-parallel-size", str(RANKS)]
    with launched(tmp_path_factory.mktemp("moves"), cache, *options) as running:
        running.wait_for_ready()
        yield running


@pytest.mark.long
def test_streams_go_on_where_their_model_goes(server: Server) -> None:
    check_moves(server)


def test_a_model_without_requests_moves_at_once_and_what_comes_goes_there(server: Server) -> None:
    for target in INSTANCES:
        done = ctl(server, "move", OTHER, target)
        said = f"{OTHER} goes on at {target}: 0 requests moved with their KV, 0 prefilled again\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
        before = prefills(server, target)
        run_all(server.url, [{"model": OTHER, "prompt": [5] * 9, "max_tokens": 2, "temperature": 0}] * 6)
        eventually(partial(has_prefilled, server, target, before + 6), f"{target} has prefilled all")


def prefills(server: Server, instance: str) -> float:
    """As the instance has last told: it tells when it has time."""
    return server.metrics().total("instance_prefills_total", instance=instance)


def has_prefilled(server: Server, instance: str, requests: float) -> bool:
    return prefills(server, instance) == requests


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("move", "nothing", "mixed-0"), "there is no model named 'nothing'"),
        (("move", MOVED, "mixed-7"), "there is no instance named 'mixed-7', only mixed-0, mixed-1"),
    ],
)
def test_what_cannot_move_is_refused(server: Server, words: tuple[str, ...], why: str) -> None:
    done = ctl(server, *words)
    assert (done.returncode, done.stderr) == (1, f"aegis: {why}\n")


def test_a_model_that_is_being_moved_is_not_moved_by_another_one_meanwhile(server: Server) -> None:
    async def both() -> list[Reply]:
        mover = Mover(server, 0)
        wanted = [order(mover.address, mover.prefix, name, MoveModel(MOVED), timeout_s=60.0) for name in INSTANCES]
        return list(await asyncio.gather(*wanted))

    done = asyncio.run(both())
    assert any(reply.done for reply in done)
    assert all(reply.done or "is being moved already" in reply.message for reply in done)


@pytest.mark.long
@pytest.mark.parametrize("dies", INSTANCES)
def test_who_dies_in_the_middle_of_a_move_costs_a_moment(server: Server, dies: str) -> None:
    """Source or target: its requests are prefilled again."""
    expected = answers(run_all(server.url, bodies()))
    replies: list[Reply] = []

    async def strike(streams: Sequence[Stream]) -> None:
        mover = Mover(server, 0)
        for target in reversed(INSTANCES):
            await until(lambda: min(len(s.tokens) for s in streams[:STREAMS]) > MAX_TOKENS // 4, "streams run")
            moving = asyncio.create_task(order(mover.address, mover.prefix, target, MoveModel(MOVED), timeout_s=60.0))
            if target == INSTANCES[0]:
                os.kill(server.pid_of(dies), signal.SIGKILL)
            replies.append(await moving)

    assert answers(run_all(server.url, bodies(), strike)) == expected
    assert replies[0].done
    server.wait_for_ready()
    server.wait_for_freed_memory()
