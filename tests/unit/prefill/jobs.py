"""A prefill core driven by hand, as all its tests need it."""

from __future__ import annotations

from aegis.core.effects import StreamName
from aegis.sim.faults.fake_models import PAGE, make_spec
from prefill.core import PrefillCore
from tests.sim.driven import Driven

A, B, C = (make_spec(i, image_pages=3, block_bytes=PAGE // 4) for i in range(3))
WIDE = make_spec(8, image_pages=3, block_bytes=PAGE)  # one block fills a slab
TWO_MODELS_FIT = 8  # pages: 3 + 3, and 2 slabs of KV
WEIGHTS, PREFETCH = StreamName.WEIGHTS, StreamName.PREFETCH
OUT, SCRUB = StreamName.SWAP_OUT, StreamName.SCRUB


def ran(driven: Driven[PrefillCore]) -> list[int]:
    return [effect.job.request for effect in driven.prompts(driven.effects)]


def finish(driven: Driven[PrefillCore], token: int = 1) -> None:
    """The running job's step ends and its KV leaves."""
    driven.stepped(token)
    if driven.under_way(OUT):
        driven.complete(OUT)


def loaded(driven: Driven[PrefillCore]) -> None:
    """The weights under way have come, be it for now or for later."""
    streams = [stream for stream in (WEIGHTS, PREFETCH) if driven.under_way(stream)]
    assert streams, "no weights are under way"
    for stream in streams:
        driven.complete(stream)
