"""The core of a mixed instance where requests end with their prefill, and nothing of them is kept."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId
from aegis.core.messages import OfferKv, Submit, Tokens
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import Job
from decode.core import DecodeCore
from tests.sim.driven import Driven, ledger, make_job
from tests.unit.decode.test_core_shared_steps import Joining
from tests.unit.decode.turns import TWO_MODELS_FIT, WEIGHTS, A

LONG = 300
SPEC: ModelSpec = replace(A, manifest=replace(A.manifest, kv=KvShape((), "float32", 4)))


def pooled(request: int, prompt: int) -> Job:
    job = make_job(request, SPEC, prompt=prompt, max_tokens=1)
    return replace(job, sampling=replace(job.sampling, pools=True))


def waiting(*prompts: int, policy: Joining) -> Driven[DecodeCore]:
    core = DecodeCore(InstanceId("mixed-0"), ledger(TWO_MODELS_FIT), policy, Hardware(), reuses=True)
    driven = Driven(core, (SPEC,), slabs=64)
    for number, prompt in enumerate(prompts, 1):
        driven.on(Submit(pooled(number, prompt)))
    driven.complete(WEIGHTS)
    return driven


def test_a_long_text_runs_whole_however_short_the_pieces_of_others_are() -> None:
    driven = waiting(LONG, policy=Joining(free_until_ns=0, step_tokens=32))
    assert [(row.start, row.stop) for row in driven.prompts()] == [(0, LONG)]


def test_texts_that_wait_share_a_step_and_nothing_is_kept() -> None:
    driven = waiting(40, 41, 42, policy=Joining())
    assert [row.job.request for row in driven.prompts()] == [1, 2, 3]
    driven.ran(9)
    assert [each.request for each in driven.said(Tokens)] == [1, 2, 3]
    assert not driven.said(OfferKv) and driven.core.running == driven.core.queued == 0
    assert all(shape.used_blocks + shape.reserved_blocks == 0 for shape in driven.core.ledger.shapes())
