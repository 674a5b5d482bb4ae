"""A decode core driven by hand, as all its tests need it."""

from __future__ import annotations

from aegis.core.effects import Run, StreamName
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import GrantPages
from aegis.core.model import ModelSpec
from aegis.core.views import RoundPolicy
from aegis.sim.faults.fake_models import PAGE, make_spec
from decode.core import DecodeCore
from decode.policies.weighted_round_robin import WeightedRoundRobin
from memory.ledger import Ledger
from tests.sim.driven import WORDS, Driven, adopt, budget, decode, make_job

A, B, C = (make_spec(i, image_pages=3, block_bytes=PAGE // 4) for i in range(3))
WIDE, WIDE_2 = (make_spec(i, image_pages=3, block_bytes=PAGE) for i in (8, 9))  # one block fills a slab
TWO_MODELS_FIT = 9  # pages: 3 + 3, and 3 slabs of KV
WEIGHTS, PREFETCH = StreamName.WEIGHTS, StreamName.PREFETCH
IN, OUT, SCRUB = StreamName.SWAP_IN, StreamName.SWAP_OUT, StreamName.SCRUB
STEP_NS = 1_000_000


def take(driven: Driven[DecodeCore], request: int, spec: ModelSpec, *, prompt: int = 10, max_tokens: int = 100) -> None:
    driven.on(adopt(make_job(request, spec, prompt=prompt, max_tokens=max_tokens), spec, first_block=100 * request))


def step(driven: Driven[DecodeCore], token: int = 2) -> list[int]:
    """One step ends; the requests whose rows run next."""
    rows = driven.runs(driven.effects)[-1].rows
    driven.stepped(*[token] * len(rows))
    return running(driven)


def beside(driven: Driven[DecodeCore]) -> list[int]:
    """Requests that decode in the step of prompts that the last event has begun."""
    return [row.job.request for run in driven.asked(Run) if run.prompts for row in run.rows if row.decodes]


def running(driven: Driven[DecodeCore]) -> list[int]:
    return [row.job.request for run in driven.runs() for row in run.rows]


def settle(driven: Driven[DecodeCore]) -> None:
    """Whatever is under way completes."""
    while any(driven.under_way(stream) for stream in StreamName):
        for stream in (WEIGHTS, PREFETCH, OUT, IN, SCRUB):
            if driven.under_way(stream):
                driven.complete(stream)


def short_turns(*specs: ModelSpec, pages: int, slabs: int | None = 64) -> Driven[DecodeCore]:
    """A turn is over after each step."""
    return decode(*specs, pages=pages, slabs=slabs, policy=WeightedRoundRobin(q_max_ns=1))


def lent(*specs: ModelSpec, pages: int, policy: RoundPolicy | None = None) -> Driven[DecodeCore]:
    """So many pages of a device of 30, for which the test answers; a slab of the host; turns last for ever."""
    books = Ledger(budget(30), WORDS, address_pages=1000)
    books.balloon.granted(GrantPages((PageRun(0, pages),)))
    books.drain()
    core = DecodeCore(InstanceId("decode-0"), books, policy or WeightedRoundRobin(q_max_ns=10**15), Hardware())
    driven = Driven(core, specs, slabs=None)
    driven.refusing = False
    driven.granted(0)
    return driven


def two_turns(
    pages: int, first: ModelSpec = WIDE, second: ModelSpec = WIDE_2, *, slabs: int | None = 64
) -> Driven[DecodeCore]:
    """In a round of two: request 1 runs its step, request 2 of the other model has the next turn."""
    driven = short_turns(first, second, pages=pages, slabs=slabs)
    take(driven, 1, first)
    settle(driven)
    take(driven, 2, second)
    assert step(driven) == [1]
    return driven
