"""Streams of a model that moves between two instances, beside some of another one, and who moves it."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.admin_client import AdminClient
from aegis.config.mqtt_address import parse
from aegis.control.client import order
from aegis.control.messages import MoveModel, Reply
from tests.checkpoints import VOCAB_SIZE
from tests.live.market import MARKET
from tests.live.server import Server
from tests.live.streams import Body, Stream, run_all, until
from tests.long_forms import LONG

MOVED, OTHER = list(MARKET)[:2]
STREAMS, BESIDE = 16, 4
MOVES = 20 if LONG else 3
MAX_TOKENS = 1500 if LONG else 500
BETWEEN = MAX_TOKENS // (2 * MOVES)
"""Tokens from move to move of the stream that is last; others are ahead of it, by hundreds from node to node or where
prompts of some wait for a busy machine, and may have ended."""
BEHIND = 10
"""The tokens that a client may have still to read when it is told that the model has moved."""
GAP_S = 1.0 if LONG else 5.0
"""The longest that a stream may stand still; the short form shares its cores with other tests, and only sees whether
one is stuck."""

_FACTORS = (17, 17, 13, 13, 17, 17, 17, 17, 17, 17, 17, 17, 17, 17, 13, 17, 13, 19, 13, 31)
"""Of prompts whose answers have no two tokens that are nearly as likely, which rounding would decide."""
INSTANCES = ("mixed-0", "mixed-1")


def bodies() -> list[Body]:
    """Streams of the model that moves, some of them sampled, then those of another one beside it."""
    made: list[Body] = []
    for n in range(STREAMS + BESIDE):
        prompt = [(_FACTORS[n] * n + at * at) % VOCAB_SIZE for at in range(1 + 9 * n)]
        asked = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": n, "temperature": int(n % 5 == 0)}
        made.append({"model": MOVED if n < STREAMS else OTHER, "prompt": prompt} | asked)
    return made


class Mover:
    """Moves the model to and fro, each time when every one of its streams has got on. `running` has, of each move, how
    many of them had tokens to come after it and before it, as clients see it: each of the former has moved."""

    def __init__(self, server: Server, moves: int) -> None:
        place = AdminClient(server.url).node().bus
        assert place
        self.address, self.prefix = parse(place.url), place.prefix
        self._moves = moves
        self.replies: list[Reply] = []
        self.running: list[range] = []

    async def __call__(self, streams: Sequence[Stream]) -> None:
        moving = streams[:STREAMS]
        for number in range(self._moves):
            await until(lambda: min(len(s.tokens) for s in moving) >= (number + 1) * BETWEEN, "the moment to move")  # noqa: B023
            target = INSTANCES[number % 2]
            wanted = MoveModel(MOVED)
            before = unfinished(moving)
            self.replies.append(await order(self.address, self.prefix, target, wanted, timeout_s=90.0))
            self.running.append(range(unfinished(moving, BEHIND), before + 1))


def unfinished(streams: Sequence[Stream], behind: int = 0) -> int:
    """With more than `behind` tokens to come."""
    return sum(len(stream.tokens) + behind < MAX_TOKENS for stream in streams)


def answers(streams: Sequence[Stream]) -> list[list[int]]:
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert all(stream.done and len(stream.tokens) == MAX_TOKENS for stream in streams)
    return [stream.tokens for stream in streams]


def check_moves(server: Server) -> None:
    """Fails where a token differs from what comes undisturbed, a stream stands still for long, or anything is left."""
    undisturbed = answers(run_all(server.url, bodies()))
    mover = Mover(server, MOVES)
    streams = run_all(server.url, bodies(), mover)
    assert answers(streams) == undisturbed
    assert [reply.done for reply in mover.replies] == [True] * MOVES, mover.replies
    counts = [int(reply.message.split(": ")[1].split()[0]) for reply in mover.replies]
    moved = list(zip(counts, mover.running, strict=True))
    assert all(count in running for count, running in moved[1:]), (moved, mover.replies)
    assert max(counts) > 0
    assert max(stream.longest_gap_s for stream in streams) <= GAP_S
    check_counts(server, counts, mover.replies)
    server.wait_for_freed_memory()


def check_counts(server: Server, counts: Sequence[int], replies: Sequence[Reply]) -> None:
    """No other moves of the model came before these."""
    metrics = server.metrics()

    def counted(name: str, **labels: str) -> int:
        return metrics.total(f"{name}_total", cause="operator", model_name=MOVED, **labels)

    assert [counted(f"model_moves_{what}") for what in ("begun", "done", "failed")] == [MOVES, MOVES, 0]
    prefilled = sum(int(reply.message.split(", ")[1].split()[0]) for reply in replies)
    assert [counted("moved_requests", how=how) for how in ("kv", "prefilled")] == [sum(counts), prefilled]
    assert counted("moved_kv_tokens") > sum(counts) * BETWEEN
