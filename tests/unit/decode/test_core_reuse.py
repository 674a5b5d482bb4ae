"""A mixed instance that reuses KV: what is kept of a prompt comes in, what others have is copied, what ends offered."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.block_runs import count_blocks
from aegis.core.effects import CopyBlocks, MoveBlocks, Track
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import (
    Cancel,
    CheckPrefix,
    KeepKv,
    KvKept,
    OfferKv,
    PrefixChecked,
    Reused,
    SetSlo,
    Started,
    Submit,
)
from aegis.core.model import ModelSpec
from aegis.core.request import Job, KeptPrefix
from aegis.sim.faults.fake_models import make_adapter
from decode.core import DecodeCore
from decode.policies.weighted_round_robin import WeightedRoundRobin
from memory.kept_prefixes import token_bytes
from tests.sim.driven import Driven, ledger, make_job, sides
from tests.unit.decode.turns import IN, OUT, TWO_MODELS_FIT, WEIGHTS, A, B, running, settle

KEPT = KeptPrefix(((50, 52),), 32, 9)


def reusing(*specs: ModelSpec, pages: int = TWO_MODELS_FIT) -> Driven[DecodeCore]:
    policy = WeightedRoundRobin()
    core = DecodeCore(InstanceId("mixed-0"), ledger(pages), policy, Hardware(), reuses=True)
    return Driven(core, specs or (A, B), slabs=64)


def known(request: int = 1, *, prompt: int = 40, kept: KeptPrefix | None = KEPT) -> Job:
    return replace(make_job(request, A, prompt=prompt), kept=kept)


def arrived() -> Driven[DecodeCore]:
    """What is kept of request 1 has been copied in."""
    driven = reusing()
    driven.on(Submit(known()))
    driven.complete(WEIGHTS)
    driven.complete(IN)
    return driven


def test_a_prompt_goes_on_from_what_is_kept_of_it() -> None:
    driven = reusing()
    driven.on(Submit(known()))
    (copy,) = driven.asked(CopyBlocks)
    assert sides(copy)[0] == KEPT.blocks and copy.after is None
    driven.complete(WEIGHTS)
    driven.complete(IN)
    assert driven.said(CheckPrefix) == [CheckPrefix(RequestId(1), 1, KEPT.entry)]
    assert not driven.prompts(), "nobody knows yet what was copied"
    driven.on(PrefixChecked(RequestId(1), 1, intact=True))
    (run,) = driven.prompts()
    assert (run.start, run.stop) == (32, 40) and count_blocks(run.blocks) == 3
    assert driven.asked(Track) == [Track(run.job, ())], "no engine takes position 32 for a beginning"
    assert driven.said(Reused) == [Reused(RequestId(1), 1, 32)] and driven.said(Started)
    assert driven.core.counters.reused_tokens == 32


def test_a_prompt_begins_anew_where_what_was_kept_is_gone() -> None:
    driven = arrived()
    driven.on(PrefixChecked(RequestId(1), 1, intact=False))
    (run,) = driven.prompts()
    assert (run.start, run.stop) == (0, 40)
    assert not driven.said(Reused) and not driven.asked(Track) and driven.said(Started)


def test_an_answer_about_who_has_left_is_nobodys() -> None:
    driven = arrived()
    driven.on(Cancel(RequestId(1), 1))
    driven.on(PrefixChecked(RequestId(1), 1, intact=True))
    assert not driven.core.ledger.device.use() and not driven.prompts()


def test_another_choice_goes_on_from_the_first_ones_kv() -> None:
    driven = reusing()
    for request in (1, 2):
        driven.on(Submit(known(request, kept=None)))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    (move,), (run,) = driven.asked(MoveBlocks), driven.prompts()
    assert sum(count for _, _, count in move.copies) == 3
    assert (run.job.request, run.start, run.stop) == (2, 39, 40), "whose last token makes the logits"
    assert driven.said(Reused) == [Reused(RequestId(2), 1, 39)]
    driven.stepped(6)
    assert running(driven) == [1, 2]


def test_a_request_that_comes_after_new_deadlines_goes_on_from_kv_that_was_made_before() -> None:
    driven = reusing()
    driven.on(Submit(known(1, kept=None)))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    driven.on(SetSlo(A.model, replace(A.slo, ttft_ns=1)))
    driven.on(Submit(known(2, kept=None)))
    driven.stepped(6)
    assert driven.said(Reused) == [Reused(RequestId(2), 1, 39)]


def test_an_adapter_goes_on_from_none_of_its_bases_kv() -> None:
    adapter = make_adapter(4, A)
    driven = reusing(A, adapter)
    driven.on(Submit(known(1, kept=None)))
    driven.on(Submit(replace(known(2, kept=None), adapter=adapter.model)))
    settle(driven)
    driven.stepped(5)
    settle(driven)
    driven.stepped(6)
    assert [run.start for run in driven.prompts(driven.effects)] == [0, 0] and not driven.said(Reused, driven.effects)


def test_what_differs_in_its_first_block_is_run() -> None:
    driven = reusing()
    driven.on(Submit(known(1, kept=None)))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    other = replace(known(2, kept=None), prompt=(9, *range(39)))
    driven.on(Submit(other))
    driven.stepped(2)
    (run,) = driven.prompts()
    assert run.start == 0 and not driven.asked(MoveBlocks)


def ended() -> Driven[DecodeCore]:
    """Request 1, of 40 tokens, has made three, the last of which was the end."""
    driven = reusing()
    driven.on(Submit(known(kept=None)))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    driven.stepped(6)
    driven.stepped(7)
    return driven


def test_what_ends_is_offered_with_all_tokens_that_have_kv() -> None:
    driven = ended()
    tokens = token_bytes([*range(40), 5, 6][:32])
    assert driven.said(OfferKv) == [OfferKv(1, A.model, tokens)]
    driven.on(KeepKv(1, 0, ((70, 72),)))
    assert sides(driven.asked(CopyBlocks)[0])[1] == ((70, 72),)
    driven.complete(OUT)
    assert driven.said(KvKept) == [KvKept(1, done=True)] and not driven.core.ledger.device.use()


def test_an_offer_gives_way_to_what_lives() -> None:
    """Three slabs are left beside the weights, of four blocks each; the next request needs all twelve."""
    driven = reusing(A, pages=6)
    driven.on(Submit(known(1, prompt=150, kept=None)))
    driven.complete(WEIGHTS)
    driven.stepped(7)
    assert driven.said(OfferKv) and driven.core.ledger.device.use()[A.manifest.kv].used == 9
    driven.on(Submit(known(2, prompt=180, kept=None)))
    assert [run.job.request for run in driven.prompts()] == [2]
    driven.on(KeepKv(1, 0, ((70, 79),)))
    assert driven.said(KvKept) == [KvKept(1, done=False)]


def test_whoever_leaves_in_a_step_is_offered_after_it() -> None:
    driven = reusing()
    driven.on(Submit(known(kept=None)))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    assert driven.runs()
    driven.on(Cancel(RequestId(1), 1))
    assert not driven.said(OfferKv)
    driven.stepped(6)
    assert driven.said(OfferKv) == [OfferKv(1, A.model, token_bytes(range(32)))]
