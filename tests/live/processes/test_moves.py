"""Models move with their running streams between instances, again and again: no token is lost, doubled or another, no
stream stands still for long, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from aegis.admin_client import AdminClient
from aegis.config.mqtt_address import parse
from aegis.control.client import order
from aegis.control.messages import MoveModel, Reply
from tests.checkpoints import VOCAB_SIZE
from tests.live.ctl import ctl
from tests.live.market import MARKET
from tests.live.server import Server, launched
from tests.live.streams import Body, Stream, run_all, until
from tests.long_forms import LONG

MOVED, OTHER = list(MARKET)[:2]
STREAMS, BESIDE = 16, 4
MOVES = 20 if LONG else 6
MAX_TOKENS = 1500 if LONG else 500
GAP_S = 1.0
INSTANCES = ("mixed-0", "mixed-1")
_OPTIONS = ("--dtype", "float32", "--device-memory", "96MiB", "--host-memory", "64MiB", "--debug-memory")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    models = [option for model in (MOVED, OTHER) for option in ("--models", str(checkpoints_dir / model))]
    options = [*models, *_OPTIONS, "--mixed", "2", "--proxies", "2"]
    with launched(tmp_path_factory.mktemp("moves"), cache, *options) as running:
        running.wait_for_ready()
        yield running


def bodies() -> list[Body]:
    """Streams of the model that moves, some of them sampled, then those of another one beside it."""
    made: list[Body] = []
    for n in range(STREAMS + BESIDE):
        prompt = [(7 * n + at * at) % VOCAB_SIZE for at in range(1 + 9 * n)]
        asked = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": n, "temperature": n % 2}
        made.append({"model": MOVED if n < STREAMS else OTHER, "prompt": prompt} | asked)
    return made


class Mover:
    """Moves the model to and fro, each time when every one of its streams has got on."""

    def __init__(self, server: Server, moves: int) -> None:
        place = AdminClient(server.url).node().bus
        assert place
        self._address, self._prefix = parse(place.url), place.prefix
        self._moves = moves
        self.replies: list[Reply] = []

    async def __call__(self, streams: Sequence[Stream]) -> None:
        moving = streams[:STREAMS]
        step = MAX_TOKENS // (self._moves + 2)
        for number in range(self._moves):
            await until(lambda: min(len(s.tokens) for s in moving) >= (number + 1) * step, "the moment to move")  # noqa: B023
            target = INSTANCES[number % 2]
            wanted = MoveModel(MOVED)
            self.replies.append(await order(self._address, self._prefix, target, wanted, timeout_s=90.0))


def answers(streams: Sequence[Stream]) -> list[list[int]]:
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert all(stream.done and len(stream.tokens) == MAX_TOKENS for stream in streams)
    return [stream.tokens for stream in streams]


def test_streams_go_on_where_their_model_goes(server: Server) -> None:
    undisturbed = answers(run_all(server.url, bodies()))
    mover = Mover(server, MOVES)
    streams = run_all(server.url, bodies(), mover)
    assert answers(streams) == undisturbed
    assert [reply.done for reply in mover.replies] == [True] * MOVES, mover.replies
    counts = [int(reply.message.split(": ")[1].split()[0]) for reply in mover.replies]
    assert all(count == STREAMS for count in counts[1:]), mover.replies
    assert max(stream.longest_gap_s for stream in streams) <= GAP_S
    server.wait_for_freed_memory()


def test_a_model_without_requests_moves_at_once_and_what_comes_goes_there(server: Server) -> None:
    for target in INSTANCES:
        done = ctl(server, "move", OTHER, target)
        said = f"{OTHER} goes on at {target}: 0 requests moved with their KV, 0 prefilled again\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
        before = server.metrics().total("instance_prefills_total", instance=target)
        run_all(server.url, [{"model": OTHER, "prompt": [5] * 9, "max_tokens": 2, "temperature": 0}] * 6)
        assert server.metrics().total("instance_prefills_total", instance=target) - before == 6


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
        wanted = [order(mover._address, mover._prefix, name, MoveModel(MOVED), timeout_s=60.0) for name in INSTANCES]
        return list(await asyncio.gather(*wanted))

    done = asyncio.run(both())
    assert any(reply.done for reply in done)
    assert all(reply.done or "is being moved already" in reply.message for reply in done)
