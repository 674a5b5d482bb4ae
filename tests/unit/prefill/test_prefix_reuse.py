"""A prefill instance that reuses KV: a job runs from where nothing of it is kept, or was just made for another."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from aegis.core.effects import CopyBlocks, MoveBlocks, StreamName, Track
from aegis.core.events import Tick
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import Cancel, CheckPrefix, NeedSlabs, Prefilled, PrefixChecked, Reused, Submit
from aegis.core.request import Job, KeptPrefix
from prefill import prefix_reuse
from prefill.core import PrefillCore
from tests.sim.driven import Driven, ledger, make_job, sides
from tests.unit.prefill.jobs import OUT, TWO_MODELS_FIT, A, B, loaded

IN = StreamName.SWAP_IN
KEPT = KeptPrefix(((50, 52),), 32, 9)


def reusing() -> Driven[PrefillCore]:
    return Driven(PrefillCore(InstanceId("prefill-0"), ledger(TWO_MODELS_FIT), reuses=True), (A, B), slabs=64)


def known(request: int = 1, *, kept: KeptPrefix | None = KEPT) -> Job:
    return replace(make_job(request, A, prompt=40), kept=kept)


def arrived() -> Driven[PrefillCore]:
    """What is kept of request 1 has been copied in."""
    driven = reusing()
    driven.on(Submit(known(), 1))
    loaded(driven)
    (copy,) = driven.asked(CopyBlocks)
    assert sides(copy)[0] == KEPT.blocks and not driven.prompts()
    driven.complete(IN)
    assert driven.said(CheckPrefix) == [CheckPrefix(RequestId(1), 1, KEPT.entry)]
    return driven


def test_a_job_goes_on_from_what_is_kept_of_it() -> None:
    driven = arrived()
    driven.on(PrefixChecked(RequestId(1), 1, intact=True))
    (run,) = driven.prompts()
    assert (run.start, run.stop) == (32, 40) and driven.asked(Track) == [Track(run.job, ())]
    assert driven.said(Reused) == [Reused(RequestId(1), 1, 32)]
    driven.stepped(5)
    assert driven.said(Prefilled)[0].kv.tokens == 40
    assert driven.core.counters.prompt_tokens == 8 and driven.core.counters.reused_tokens == 32


def test_a_job_begins_anew_where_what_was_kept_is_gone() -> None:
    driven = arrived()
    driven.on(PrefixChecked(RequestId(1), 1, intact=False))
    (run,) = driven.prompts()
    assert run.start == 0 and not driven.said(Reused) and not driven.asked(Track)


def test_a_job_that_is_cancelled_meanwhile_frees_what_was_reserved() -> None:
    driven = arrived()
    driven.on(Cancel(RequestId(1), 1))
    driven.on(Submit(known(2, kept=None), 1))
    driven.on(PrefixChecked(RequestId(1), 1, intact=True))
    assert [run.job.request for run in driven.prompts()] == [2]
    driven.stepped(5)
    driven.complete(OUT)
    assert not driven.core.ledger.device.use()


def test_another_choice_goes_on_from_the_last_ones_kv() -> None:
    driven = reusing()
    driven.on(Submit(known(1, kept=None), 1))
    driven.on(Submit(known(2, kept=KeptPrefix(((50, 51),), 16, 8)), 1))
    loaded(driven)
    driven.stepped(5)
    (move,), (run,) = driven.asked(MoveBlocks), driven.prompts()
    assert sum(count for _, _, count in move.copies) == 3
    assert (run.job.request, run.start, run.stop) == (2, 39, 40)
    assert not driven.under_way(IN), "what is kept is less"


def test_jobs_behind_the_first_that_goes_on_from_the_last_kv_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = reusing()
    for request in range(1, 40):
        driven.on(Submit(known(request, kept=None), 1))
    loaded(driven)
    driven.stepped(5)
    compared = Mock(side_effect=prefix_reuse.common_tokens)
    monkeypatch.setattr(prefix_reuse, "common_tokens", compared)
    driven.on(Tick())
    assert compared.call_count == 1


def two_choices(pages: int, *, slabs: int | None) -> Driven[PrefillCore]:
    """Request 1 was run, request 2 begins alike. Without `slabs` the node grants one, and the test the others."""
    driven = Driven(PrefillCore(InstanceId("prefill-0"), ledger(pages), reuses=True), (A, B), slabs=slabs)
    if slabs is None:
        driven.granted(0)
    for request in (1, 2):
        driven.on(Submit(known(request, kept=None), 1))
    loaded(driven)
    driven.stepped(5)
    return driven


def test_kv_stays_for_a_choice_that_has_to_wait_for_room_in_the_host() -> None:
    driven = two_choices(TWO_MODELS_FIT, slabs=None)
    assert driven.said(NeedSlabs)
    driven.complete(OUT)
    assert not driven.prompts() and driven.core.ledger.device.use()
    driven.granted(1)
    (run,) = driven.prompts()
    assert (run.job.request, run.start, run.stop) == (2, 39, 40)
    driven.stepped(5)
    driven.complete(OUT)
    assert not driven.core.ledger.device.use()


def test_kv_leaves_when_nobody_waits_for_it_any_more() -> None:
    driven = two_choices(TWO_MODELS_FIT, slabs=None)
    driven.complete(OUT)
    driven.on(Cancel(RequestId(2), 1))
    assert not driven.core.ledger.device.use(), "nobody waits for it any more"


def test_kv_does_not_stay_where_there_is_need_of_its_room() -> None:
    driven = two_choices(4, slabs=64)
    driven.complete(OUT)
    (run,) = driven.prompts()
    assert (run.job.request, run.start) == (2, 0)


def test_kv_that_has_left_is_of_no_use() -> None:
    driven = reusing()
    driven.on(Submit(known(1, kept=None), 1))
    loaded(driven)
    driven.stepped(5)
    driven.complete(OUT)
    driven.on(Submit(known(2, kept=None), 1))
    (run,) = driven.prompts()
    assert run.start == 0 and not driven.asked(MoveBlocks)
