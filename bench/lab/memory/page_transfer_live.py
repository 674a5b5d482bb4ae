"""Handing memory from one serving instance to another: two decode processes on one device, streams running on both.

The giver holds a model's weights that it fetched ahead, the taker waits for room for as large a model. Then the giver's
limit is lowered by as much, and all happens as it does in a server: it throws the weights out, wipes the pages and
gives them back, the arbiter grants them, the taker maps them and starts its load. A command that the taker was sent
behind the grant is answered when it has mapped them; until then the time is taken. Then it goes the other way round.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import uvloop
from msgspec import Struct

from aegis.config.config import Config
from aegis.core.ids import InstanceId, ModelId
from aegis.device.cpu.pool import PAGE_BYTES
from aegis.launcher.live_market import LiveMarket
from aegis.models.sources import Source
from bench.lab.in_process_market import Stream, draw_prompt, follow, serving, until, write_llama

NBYTES = 256 << 20
_SLACK_PAGES = 24  # for what streams write, and less than a second large model needs
_PREFILL, _FIRST, _SECOND = (InstanceId(name) for name in ("prefill-0", "decode-0", "decode-1"))
_SMALL = {_FIRST: ModelId("small-0"), _SECOND: ModelId("small-1")}
_LARGE = {_FIRST: ModelId("large-0"), _SECOND: ModelId("large-1")}
_SMALL_BYTES = 56 << 20  # its weights, and KV
_SETTLE_S = 0.2
_TIMEOUT_S = 10.0


class LiveHanding(Struct, frozen=True):
    """`nbytes` were mapped at the taker `total_ns` after the command, of which the giver and the accounts took
    `given_ns`; medians of `repetitions`, and the longest. `late_ns` is by how much the longest gap between two tokens
    of any stream during a handing exceeds the usual one; `late_otherwise_ns` the same while nothing is handed over."""

    nbytes: int
    repetitions: int
    streams: int
    first_ns: int
    given_ns: int
    total_ns: int
    total_max_ns: int
    usual_gap_ns: int
    late_ns: int
    late_max_ns: int
    late_otherwise_ns: int


class _Window(Struct, frozen=True):
    start_ns: int
    given_ns: int
    end_ns: int


def handing_live(nbytes: int = NBYTES, repetitions: int = 10, streams: int = 2) -> LiveHanding:
    """`streams` run on each of the two instances. `nbytes` is about what the large model's weights take."""
    with tempfile.TemporaryDirectory(prefix="aegis-bench-") as directory:
        return uvloop.run(_measure(Path(directory), nbytes, repetitions, streams))


async def _measure(directory: Path, nbytes: int, repetitions: int, streams: int) -> LiveHanding:
    small = write_llama(directory / "small", hidden=256, layers=4, heads=1, inner=1024, context=16384)
    large = write_llama(directory / "large", hidden=256, layers=1, heads=4, inner=_inner(nbytes))
    sources = [Source(model, str(small)) for model in _SMALL.values()]
    sources += [Source(model, str(large)) for model in _LARGE.values()]
    assigned = {model: instance for models in (_SMALL, _LARGE) for instance, model in models.items()}
    placement = {_PREFILL: 0, _FIRST: 1, _SECOND: 1}
    cache = directory / "cache"
    async with serving(_config(nbytes), sources, assigned=assigned, placement=placement, cache_dir=cache) as market:
        seen = [Stream() for _ in range(2 * streams)]
        models = [*_SMALL.values()] * streams
        clients = [
            asyncio.create_task(follow(market, model, draw_prompt(market, model, Random(at), 16), 16000, stream))
            for at, (model, stream) in enumerate(zip(models, seen, strict=True))
        ]
        await until(lambda: all(len(stream.tokens_ns) > 20 for stream in seen))
        waiting = [await _requesting(market, instance) for instance in (_FIRST, _SECOND)]
        windows = [await _hand(market, nbytes, *_direction(turn)) for turn in range(repetitions)]
        assert not any(client.done() for client in clients), "the streams were too short"
        for client in (*clients, *waiting):
            client.cancel()
        await asyncio.gather(*clients, *waiting, return_exceptions=True)
    return _result(nbytes, seen, windows)


def _inner(nbytes: int) -> int:
    """The inner width of a layer of 256: three matrices in float32, and some 4 MiB beside them."""
    return (nbytes - (4 << 20)) // (3 * 256 * 4) // 64 * 64


def _config(nbytes: int) -> Config:
    """No turn ends while it is measured: what the large models' requests want is fetched ahead and waits."""
    return Config.model_validate(
        {
            "instances": {"prefill": 1, "decode": 2, "devices": 2},
            "memory": {
                "device": nbytes + 2 * _SMALL_BYTES + _SLACK_PAGES * PAGE_BYTES,
                "host": 3 * nbytes + (512 << 20),
                "model_cache": 3 * nbytes,
                "floor": 2 * nbytes + 2 * _SMALL_BYTES,
            },
            "scheduling": {"policy": "aegaeon", "decode": {"q_max_s": 600, "switching_share": 0}},
            "slo": {"tbt_ms": 1000},
        }
    )


def _direction(turn: int) -> tuple[InstanceId, InstanceId]:
    return (_FIRST, _SECOND) if turn % 2 == 0 else (_SECOND, _FIRST)


async def _requesting(market: LiveMarket, instance: InstanceId) -> asyncio.Task[Stream]:
    """A request for the large model, whose turn does not come; the first gets the memory, the second waits for it."""
    (_, arbiter) = market.node.devices.arbiters()
    free, model = arbiter.free, _LARGE[instance]
    client = asyncio.create_task(follow(market, model, draw_prompt(market, model, Random(0), 16), 2, Stream()))
    await until(lambda: arbiter.free < free // 2 or arbiter.use()[instance].requested > 0)
    await asyncio.sleep(_SETTLE_S)
    return client


async def _hand(market: LiveMarket, nbytes: int, giver: InstanceId, taker: InstanceId) -> _Window:
    devices, (_, arbiter) = market.node.devices, market.node.devices.arbiters()
    await devices.limit(taker, arbiter.capacity * PAGE_BYTES, least_bytes=0, timeout_s=_TIMEOUT_S)
    await until(lambda: arbiter.use()[taker].requested > 0)
    await asyncio.sleep(_SETTLE_S)
    limit = arbiter.held(giver) * PAGE_BYTES - nbytes
    before = arbiter.held(taker)
    start_ns = time.monotonic_ns()
    await devices.limit(giver, limit, least_bytes=0, timeout_s=_TIMEOUT_S)
    given_ns = time.monotonic_ns()
    await _mapped(market, taker)
    end_ns = time.monotonic_ns()
    assert before * PAGE_BYTES < nbytes <= arbiter.held(taker) * PAGE_BYTES, "the taker has not mapped them"
    await asyncio.sleep(_SETTLE_S)
    return _Window(start_ns, given_ns, end_ns)


async def _mapped(market: LiveMarket, taker: InstanceId) -> None:
    """Until the taker has all it requested and has seen to it: a trim that takes nothing, for it holds less than
    the floor, is answered after what was sent before it."""
    (_, arbiter) = market.node.devices.arbiters()
    held = -1
    while held != arbiter.held(taker) or arbiter.use()[taker].requested:
        held = arbiter.held(taker)
        await market.node.devices.trim(taker, timeout_s=_TIMEOUT_S)


def _result(nbytes: int, streams: Sequence[Stream], windows: Sequence[_Window]) -> LiveHanding:
    gaps = [gap for stream in streams for gap in pairwise(stream.tokens_ns) if gap[1] > windows[0].start_ns]
    usual_ns = round(statistics.median(b - a for a, b in gaps))
    late_ns = [max(b - a for a, b in gaps if b > w.start_ns and a < w.end_ns) - usual_ns for w in windows]
    others_ns = [b - a for a, b in gaps if not any(b > w.start_ns and a < w.end_ns + 100_000_000 for w in windows)]
    totals_ns = [w.end_ns - w.start_ns for w in windows]
    return LiveHanding(
        nbytes=nbytes,
        repetitions=len(windows),
        streams=len(streams),
        first_ns=totals_ns[0],
        given_ns=round(statistics.median(w.given_ns - w.start_ns for w in windows[1:])),
        total_ns=round(statistics.median(totals_ns[1:])),
        total_max_ns=max(totals_ns),
        usual_gap_ns=usual_ns,
        late_ns=round(statistics.median(late_ns)),
        late_max_ns=max(late_ns),
        late_otherwise_ns=max(others_ns) - usual_ns,
    )
