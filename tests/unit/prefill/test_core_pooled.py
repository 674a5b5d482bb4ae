"""The prefill core where jobs end with their prefill, and nothing of them is kept."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.effects import CopyBlocks
from aegis.core.events import Stepped
from aegis.core.ids import InstanceId
from aegis.core.messages import Broken, Submit, Tokens
from aegis.core.model import KvShape, ModelSpec, Slo
from aegis.core.request import FinishReason, Job, Token
from aegis.sim.faults.fake_models import PAGE, make_spec
from prefill.core import PrefillCore
from prefill.policies.least_slack import LeastSlackPrefill
from tests.sim.driven import Driven, ledger, make_job
from tests.unit.prefill.jobs import loaded

LONG = 300  # tokens, of which 96 are believed to take less than the gap
GAP_NS, WIDE_NS = 2_000_000, 500_000_000


def of_gap(gap_ns: int) -> ModelSpec:
    made = make_spec(0, image_pages=3, block_bytes=PAGE // 64, slo=Slo(gap_ns=gap_ns))
    return replace(made, manifest=replace(made.manifest, kv=KvShape((), "float32", 4)))


def pooled(request: int, spec: ModelSpec, prompt: int) -> Job:
    job = make_job(request, spec, prompt=prompt, max_tokens=1)
    return replace(job, sampling=replace(job.sampling, pools=True))


def waiting(*prompts: int, gap_ns: int = GAP_NS) -> Driven[PrefillCore]:
    """Request 0 runs, and these have come meanwhile."""
    spec = of_gap(gap_ns)
    core = PrefillCore(InstanceId("prefill-0"), ledger(20), LeastSlackPrefill(), reuses=True)
    driven = Driven(core, (spec,), slabs=64)
    driven.on(Submit(pooled(0, spec, 10), 1))
    loaded(driven)
    for number, prompt in enumerate(prompts, 1):
        driven.on(Submit(pooled(number, spec, prompt), 1))
    return driven


def ends(driven: Driven[PrefillCore], *vectors: bytes) -> None:
    driven.on(Stepped((tuple(Token(0, vector=vector) for vector in vectors),), 1_000_000))


def test_a_long_text_runs_whole_and_its_vector_is_its_last_token() -> None:
    driven = waiting(LONG)
    ends(driven, b"zero")
    assert [(row.start, row.stop) for row in driven.prompts()] == [(0, LONG)]
    ends(driven, b"long")
    (tokens,) = driven.said(Tokens)
    assert (tokens.request, tokens.tokens[0].vector, tokens.finish) == (1, b"long", FinishReason.LENGTH)


def test_texts_that_wait_share_a_step() -> None:
    driven = waiting(11, 12, 13, gap_ns=WIDE_NS)
    ends(driven, b"zero")
    assert [row.job.request for row in driven.prompts()] == [1, 2, 3]
    ends(driven, b"a", b"b", b"c")
    assert [(each.request, each.tokens[0].vector) for each in driven.said(Tokens)] == [(1, b"a"), (2, b"b"), (3, b"c")]


def test_nothing_is_copied_out_and_nothing_stays() -> None:
    driven = waiting(11, LONG)
    ends(driven, b"zero")
    ends(driven, b"a")
    ends(driven, b"b")
    assert not [effect for effect in driven.effects if isinstance(effect, CopyBlocks)] and not driven.said(Broken)
    assert driven.core.handed == driven.core.running == driven.core.queued == 0
    assert all(shape.used_blocks + shape.reserved_blocks == 0 for shape in driven.core.ledger.shapes())
