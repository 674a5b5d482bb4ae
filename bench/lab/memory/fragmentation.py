"""Slab fragmentation of a device while the demo market serves many clients whose interest wanders from model to model.

The instances' own telemetry is sampled several times a second. Fragmentation is the share of the bytes of the slabs
held that is in no block in use: free blocks, and the ends of slabs where no block fits. Beside it stands what one fixed
pool per shape, as large as that shape's own peak in the same run, would leave empty on average.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random

import uvloop
from msgspec import Struct

from aegis.config.config import Config
from aegis.core.ids import ModelId
from aegis.launcher.live_market import LiveMarket
from aegis.models.cache import default_cache_dir
from aegis.models.demo.market import demo_models, make_market
from aegis.models.sources import Source
from aegis.telemetry.memory_report import SlabsReport
from bench.lab.in_process_market import Stream, draw_prompt, follow, serving
from bench.lab.memory.slab_replay import Load, Waste, WasteMeter

_SAMPLE_S = 0.1
_WARM_S = 5.0


class Fragmentation(Struct, frozen=True):
    """`waste` of the device's slabs over a run of `seconds`."""

    seconds: float
    clients: int
    samples: int
    requests: int
    failed: int
    tokens: int
    waste: Waste


def fragmentation(
    seconds: float = 45.0, load: Load | None = None, *, shift_s: float = 5.0, sources: Sequence[Source] | None = None
) -> Fragmentation:
    """Popularity moves on by a model every `shift_s`. Serves the demo market, which is made if it is missing, or
    `sources`."""
    if sources is None:
        make_market()
        sources = demo_models(default_cache_dir())
    return uvloop.run(_measure(seconds, load or Load(), shift_s, sources))


async def _measure(seconds: float, load: Load, shift_s: float, sources: Sequence[Source]) -> Fragmentation:
    config = Config.model_validate(
        {
            "instances": {"decode": 2},
            "memory": {"device": 256 << 20, "host": 3 << 30},
            "scheduling": {"policy": "aegaeon"},
        }
    )
    streams: list[Stream] = []
    async with serving(config, sources) as market:
        start_s = time.monotonic()
        models = [source.model for source in sources]
        clients = [
            asyncio.create_task(_client(market, models, load, Random(f"{load.seed} {at}"), shift_s, streams))
            for at in range(load.concurrent)
        ]
        await asyncio.sleep(min(_WARM_S, seconds))
        samples, meter = 0, WasteMeter()
        while time.monotonic() - start_s < seconds or not samples:
            await asyncio.sleep(_SAMPLE_S)
            samples += _add(meter, market.queries.memory().devices[0].slabs, config.memory.slab)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return Fragmentation(
        seconds=seconds,
        clients=load.concurrent,
        samples=samples,
        requests=len(streams),
        failed=sum(bool(stream.failure) for stream in streams),
        tokens=sum(len(stream.tokens_ns) for stream in streams),
        waste=meter.result(),
    )


async def _client(
    market: LiveMarket, models: Sequence[ModelId], load: Load, rng: Random, shift_s: float, streams: list[Stream]
) -> None:
    """One request after the other."""
    start_s = time.monotonic()
    while True:
        turn = int((time.monotonic() - start_s) / shift_s)
        model = models[load.draw_model(rng, len(models), turn)]
        prompt_tokens, output_tokens = load.draw_lengths(rng)
        streams.append(Stream())
        prompt = draw_prompt(market, model, rng, prompt_tokens)
        await follow(market, model, prompt, output_tokens, streams[-1])


def _add(meter: WasteMeter, slabs: SlabsReport, slab_bytes: int) -> bool:
    """Whether any were held."""
    for_each = {
        (shape.models, shape.block_bytes): (
            shape.slabs * slab_bytes,
            (shape.reserved_blocks + shape.used_blocks + shape.moving_blocks) * shape.block_bytes,
        )
        for shape in slabs.shapes
    }
    if for_each:
        meter.add(for_each)
    return bool(for_each)
