"""The core of a mixed instance, scripted: what runs on the second lane of its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
from msgspec.structs import replace

from aegis.core.clock import NS_PER_MS
from aegis.core.effects import DivideDevice, EndRun, LoadWeights, MoveBlocks, Run, UnmapWeights
from aegis.core.estimators import Hardware
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lane_views import LaneChoice, LanesView
from aegis.core.messages import (
    Broken,
    Cancel,
    DropModel,
    GaveBack,
    HandedOver,
    HandOver,
    Prefilled,
    Reused,
    SetSlo,
    Submit,
    TakeBack,
)
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import Token
from aegis.core.views import BatchView, Renewal, RoundPolicy, Turn
from aegis.sim.faults.fake_models import make_spec
from decode.core import DecodeCore
from decode.policies.least_slack import LeastSlack
from decode.policies.muxwise import MuxWise
from decode.policies.prefill_first import PrefillFirst
from decode.policies.weighted_round_robin import WeightedRoundRobin
from decode.second_lane import LaneOffers
from decode.sequences import Where
from tests.sim.driven import Driven, ledger, make_job
from tests.unit.decode.turns import running, settle, take

SLO = Slo(10**10, 50 * NS_PER_MS, 50 * NS_PER_MS)
A, B = (make_spec(i, image_pages=3, block_bytes=1 << 19, slo=SLO) for i in range(2))
LANES = ((250, 750), (500, 500), (750, 250))
WHOLE = MuxWise(WeightedRoundRobin(q_max_ns=10**15), layer_wise=False)
PIECES = MuxWise(WeightedRoundRobin(q_max_ns=10**15), piece_steps=1, join_steps=1)


class Joined:
    """Prompts are not cut if they take less than 5 ms, and others join them for so long."""

    rules = WHOLE.rules
    plan = WHOLE.plan

    def __init__(self, joins_ns: int) -> None:
        self.joins_ns = joins_ns

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        (companion,) = lanes.companions
        return LaneChoice(companion.batch.batch, True, (250, 750), 5 * NS_PER_MS, self.joins_ns)


def divided(
    *specs: ModelSpec,
    policy: RoundPolicy = WHOLE,
    lane_shares: tuple[tuple[int, ...], ...] = LANES,
    pages: int = 60,
    reuses: bool = False,
) -> Driven[DecodeCore]:
    """Request 1 of model A decodes."""
    offers = LaneOffers(lane_shares)
    core = DecodeCore(InstanceId("mixed-0"), ledger(pages), policy, Hardware(), lanes=offers, reuses=reuses)
    driven = Driven(core, specs or (A,), slabs=64)
    take(driven, 1, A)
    settle(driven)
    assert running(driven) == [1] and not driven.asked(DivideDevice, driven.effects)
    return driven


def prompt_comes(driven: Driven[DecodeCore], request: int = 2, tokens: int = 400) -> None:
    """It ends the run under way, whose step ends then."""
    driven.on(Submit(make_job(request, A, prompt=tokens)))
    assert driven.asked(EndRun) == [EndRun(0)]
    driven.stepped(2)


class Sheds(Joined):
    """Who arrives for another batch makes no new plan before the turn is over."""

    rules = dataclasses.replace(WHOLE.rules, renewal=Renewal.ARRIVAL)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return [replace(turn, forecast=True) for turn in WHOLE.plan(batches, now_ns)]

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        prompt = next((companion for companion in lanes.companions if companion.prefills), None)
        return None if prompt is None else LaneChoice(prompt.batch.batch, True, (250, 750))


def lanes(driven: Driven[DecodeCore]) -> list[tuple[int, list[int]]]:
    return [(run.lane, [row.job.request for row in run.rows]) for run in driven.asked(Run)]


def beside_ended(driven: Driven[DecodeCore], *tokens: int) -> None:
    driven.on(Stepped((tuple(Token(token) for token in tokens),) if tokens else (), 1_000_000, lane=1))


def test_a_prompt_runs_beside_the_decode_which_begins_first() -> None:
    driven = divided()
    prompt_comes(driven)
    kinds = [type(effect) for effect in driven.last]
    assert kinds[-3:] == [DivideDevice, Run, Run] and lanes(driven) == [(0, [1]), (1, [2])]
    assert driven.asked(DivideDevice) == [DivideDevice((250, 750))]


def test_what_was_prefilled_decodes_on_the_first_lane_in_the_next_step() -> None:
    driven = divided()
    prompt_comes(driven)
    beside_ended(driven, 3)
    assert [message.request for message in driven.said(Prefilled)] == [2] and driven.asked(EndRun) == [EndRun(0)]
    driven.stepped(2)
    assert lanes(driven) == [(0, [1, 2])] and driven.asked(DivideDevice) == [DivideDevice((1000,))]


@pytest.mark.parametrize("there", [True, False])
def test_who_comes_for_another_batch_runs_beside_a_turn_that_goes_on_if_its_model_is_there(there: bool) -> None:
    driven = divided(A, B, policy=Sheds(0))
    if there:
        take(driven, 2, B)
        settle(driven)
        driven.on(Cancel(RequestId(2), 1))
        driven.stepped(2)
    assert running(driven) == [1]
    driven.on(Submit(make_job(3, B, prompt=400)))
    assert driven.asked(EndRun) == ([EndRun(0)] if there else [])
    if there:
        driven.stepped(2)
        assert lanes(driven) == [(0, [1]), (1, [3])]


def test_the_decode_goes_on_while_the_prompt_runs() -> None:
    driven = divided()
    prompt_comes(driven)
    for _ in range(3):
        driven.stepped(2)
        assert lanes(driven) == [(0, [1])] and not driven.asked(DivideDevice)


def test_a_second_prompt_waits_for_the_lane_and_does_not_end_the_run() -> None:
    driven = divided()
    prompt_comes(driven)
    driven.on(Submit(make_job(3, A, prompt=50)))
    assert not driven.asked(EndRun) and not driven.asked(Run)
    beside_ended(driven, 3)
    assert lanes(driven) == [(1, [3])]


def test_prompts_that_wait_for_the_second_lane_share_its_next_step() -> None:
    """As MuxWise prefills batches (§3.4.2); what they took is learnt of all of them."""
    driven = divided()
    prompt_comes(driven)
    for request in (3, 4):
        driven.on(Submit(make_job(request, A, prompt=50)))
    beside_ended(driven, 3)
    assert lanes(driven) == [(1, [3, 4])]
    beside_ended(driven, 5, 6)
    assert {message.request: message.token.id for message in driven.said(Prefilled)} == {3: 5, 4: 6}
    driven.stepped(2)
    assert lanes(driven) == [(0, [1, 2, 3, 4])] or lanes(driven) == [(0, [1, 3, 4, 2])]


def test_prompts_join_one_that_is_not_cut_for_longer_than_a_piece() -> None:
    """The first one takes 3 ms on the whole device and 4 on three quarters of it, each of the others two thirds."""
    joined = []
    for joins_ns in (0, 7 * NS_PER_MS, 100 * NS_PER_MS):
        driven = divided(policy=Joined(joins_ns))
        prompt_comes(driven, tokens=200)
        for request in (3, 4, 5):
            driven.on(Submit(make_job(request, A, prompt=200)))
        driven.on(Stepped(((Token(3),),), 4_000_000, lane=1))
        joined.append(lanes(driven))
    assert joined == [[(1, [3])], [(1, [3, 4])], [(1, [3, 4, 5])]]


def test_prompts_join_one_only_until_it_is_due_by_the_deadlines_that_are_set_now() -> None:
    driven = divided(policy=Joined(100 * NS_PER_MS))
    prompt_comes(driven, tokens=200)
    for request in (3, 4):
        driven.on(Submit(make_job(request, A, prompt=200)))
    driven.on(SetSlo(A.model, replace(SLO, ttft_ns=driven.now_ns + 7 * NS_PER_MS)))
    driven.on(Stepped(((Token(3),),), 4_000_000, lane=1))
    assert lanes(driven) == [(1, [3])], "two of them take seven ms, and five are left"


def test_a_device_that_was_profiled_gives_the_least_share_at_once() -> None:
    offers = LaneOffers(LANES, profile=lambda share: 1000 / share * 40)
    core = DecodeCore(InstanceId("mixed-0"), ledger(60), WHOLE, Hardware(), lanes=offers)
    driven = Driven(core, (A,), slabs=64)
    take(driven, 1, A)
    settle(driven)
    prompt_comes(driven)
    assert driven.asked(DivideDevice) == [DivideDevice((750, 250))], "smaller shares were too slow in the profile"


def test_a_prompt_runs_in_pieces_on_the_same_division() -> None:
    driven = divided(policy=PIECES)
    prompt_comes(driven, tokens=3_000)
    stops = []
    while not driven.said(Prefilled):
        (row,) = driven.prompts()
        stops.append((row.start, row.stop))
        beside_ended(driven, *((3,) if row.samples else ()))
    assert len(stops) > 1 and stops[0][0] == 0 and stops[-1][1] == 3_000
    assert all(before[1] == after[0] for before, after in pairwise(stops))
    assert len(driven.asked(DivideDevice, driven.effects)) == 1


def test_nothing_begins_on_the_second_lane_while_pages_are_owed() -> None:
    """Pages are given back while nothing runs, and one lane or the other would always be busy."""
    driven = divided(policy=PIECES)
    prompt_comes(driven, tokens=3_000)
    driven.on(TakeBack(1, 56, 100 * NS_PER_MS))
    assert not driven.said(GaveBack)
    beside_ended(driven)
    assert not driven.asked(Run)


def test_without_streams_a_prompt_has_the_whole_device() -> None:
    driven = divided()
    driven.on(Cancel(RequestId(1), 1))
    driven.stepped(2)
    driven.on(Submit(make_job(2, A, prompt=400)))
    assert lanes(driven) == [(0, [2])] and not driven.asked(DivideDevice, driven.effects)


def test_the_first_lane_prefills_nothing_while_the_second_one_does() -> None:
    """Its prompts wait, and nothing is put away for them."""
    driven = divided()
    prompt_comes(driven)
    driven.on(Submit(make_job(3, A, prompt=50)))
    driven.on(Cancel(RequestId(1), 1))
    driven.stepped(2)
    assert not driven.asked(Run)
    beside_ended(driven, 3)
    assert lanes(driven) == [(0, [2]), (1, [3])] or lanes(driven) == [(0, [3])]


def test_who_is_cancelled_keeps_its_blocks_until_its_run_ends() -> None:
    driven = divided()
    prompt_comes(driven)
    used = driven.core.ledger.device.use()
    driven.on(Cancel(RequestId(2), 1))
    assert driven.core.ledger.device.use() == used
    beside_ended(driven, 3)
    assert not driven.said(Prefilled) and driven.core.ledger.device.use() != used


@pytest.mark.parametrize(("lane", "broken", "runs"), [(1, [2], [1]), (0, [1], [])])
def test_a_lane_that_fails_breaks_its_own_requests_alone(lane: int, broken: list[int], runs: list[int]) -> None:
    driven = divided()
    prompt_comes(driven)
    driven.on(StepFailed("drawn", lane))
    assert [message.request for message in driven.said(Broken)] == broken
    assert {s.job.request for s in driven.core._by_request.values()} == {1, 2} - set(broken)


def test_weights_stay_while_they_are_used_on_the_second_lane() -> None:
    driven = divided()
    prompt_comes(driven)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(Cancel(RequestId(2), 1))
    driven.stepped(2)
    driven.on(DropModel(A.model))
    assert not driven.asked(UnmapWeights, driven.effects)
    beside_ended(driven, 3)
    assert [effect.model for effect in driven.asked(UnmapWeights, driven.effects)] == [A.model]


def test_steps_beside_a_prompt_teach_the_guard_and_not_the_estimate_of_the_whole_device() -> None:
    driven = divided()
    second = driven.core._second
    assert second is not None
    prompt_comes(driven)
    before_ns = driven.core._step_times.latency[A.model].decode_ns(100, 1)
    for _ in range(20):
        driven.stepped(2, after_ns=100 * NS_PER_MS)
    assert driven.core._step_times.latency[A.model].decode_ns(100, 1) == before_ns
    driven.on(Submit(make_job(3, A, prompt=400)))
    driven.on(Cancel(RequestId(2), 1))
    beside_ended(driven, 3)
    driven.stepped(2, after_ns=100 * NS_PER_MS)
    assert driven.asked(DivideDevice) == [DivideDevice((500, 500))], "the smaller one was seen to be too small"


def test_steps_beside_a_prompt_are_counted_and_those_that_took_longer_than_the_guard_had_said() -> None:
    driven = divided()
    prompt_comes(driven, tokens=3_000)
    assert driven.core.counters.guarded_steps == 0
    alone_ns = driven.core._step_times.latency[A.model].decode_ns(100)
    driven.stepped(2, after_ns=alone_ns)
    assert (driven.core.counters.guarded_steps, driven.core.counters.guard_exceeded_steps) == (1, 0)
    driven.stepped(2, after_ns=100 * alone_ns)
    assert (driven.core.counters.guarded_steps, driven.core.counters.guard_exceeded_steps) == (2, 1)
    driven.stepped(2, after_ns=100 * alone_ns)  # the guard has learned
    assert (driven.core.counters.guarded_steps, driven.core.counters.guard_exceeded_steps) == (3, 1)


@pytest.mark.parametrize(
    ("policy", "offers", "rows"),
    [(WHOLE, (), [2, 1]), (PrefillFirst(WeightedRoundRobin(q_max_ns=10**15)), LANES, [2])],
    ids=["no lanes", "no policy of lanes"],
)
def test_without_lanes_there_is_one_run(
    policy: RoundPolicy, offers: tuple[tuple[int, ...], ...], rows: list[int]
) -> None:
    """In which the stream has its step beside the prompt, where prompts are cut."""
    driven = divided(policy=policy, lane_shares=offers)
    prompt_comes(driven)
    assert lanes(driven) == [(0, rows)] and not driven.asked(DivideDevice, driven.effects)


def test_two_models_step_side_by_side() -> None:
    """Under `least-slack`, where both are there and both gain."""
    driven = divided(A, B, policy=LeastSlack())
    take(driven, 2, B)
    settle(driven)
    driven.stepped(2)
    assert sorted(lanes(driven)) in ([(0, [1]), (1, [2])], [(0, [2]), (1, [1])])
    assert driven.asked(DivideDevice) == [DivideDevice((500, 500))]
    assert {run.model for run in driven.asked(Run)} == {A.model, B.model}


def test_a_batch_that_steps_on_the_second_lane_is_left_alone_there() -> None:
    """Its KV stays, and it has no row on the first one."""
    driven = divided(A, B, policy=LeastSlack())
    take(driven, 2, B)
    settle(driven)
    driven.stepped(2)
    beside = {row.job.request for run in driven.asked(Run) if run.lane for row in run.rows}
    for _ in range(5):
        driven.stepped(2)
        assert not beside & set(running(driven))
    assert all(s.where is Where.DEVICE for s in driven.core._by_request.values())
    assert len(driven.asked(LoadWeights, driven.effects)) == 2 and ModelId("m1") in driven.loads


def test_who_is_to_go_on_elsewhere_leaves_the_second_lane_at_the_end_of_its_step() -> None:
    driven = divided(A, B, policy=LeastSlack())
    take(driven, 2, B)
    settle(driven)
    driven.stepped(2)
    (there,) = [row.job.request for run in driven.asked(Run) if run.lane for row in run.rows]
    driven.on(HandOver(there, 1))
    assert driven.asked(EndRun) == [EndRun(1)] and not driven.said(HandedOver)
    beside_ended(driven, 2)
    assert [message.request for message in driven.said(HandedOver)] == [there]


def test_a_prompt_of_another_batch_that_has_no_room_is_not_waited_for() -> None:
    """The own one runs, in the steps of its streams or beside them."""
    driven = divided(A, B, policy=LeastSlack(), pages=17)
    driven.on(Submit(make_job(2, B, prompt=4_000)))
    settle(driven)
    driven.on(Submit(make_job(3, A, prompt=50)))
    driven.stepped(2)
    assert 3 in [row.job.request for row in driven.prompts()]


def test_turns_grow_with_the_time_in_which_two_batches_go_on() -> None:
    """Of which views tell."""
    driven = divided(A, B, policy=LeastSlack())
    driven.stepped(2)
    assert seen_abreast(driven) == 0
    take(driven, 2, B)
    settle(driven)
    driven.stepped(2)
    for _ in range(4):
        beside_ended(driven, 2)
        driven.stepped(2)
    assert seen_abreast(driven) > 0


def seen_abreast(driven: Driven[DecodeCore]) -> float:
    return driven.core._views.of(driven.core._work.batches[0], driven.now_ns).abreast


SHARED = LeastSlack()
"""Its guard takes a step beside a prompt for 1.3 times its share, so that there is time for a short prompt in it."""


def long_and_short(short: int, prompt_logprobs: int | None = None, *, reuses: bool = False) -> Driven[DecodeCore]:
    """A prompt of 5 000 tokens runs beside request 1, and a shorter one has come."""
    driven = divided(policy=SHARED, lane_shares=((500, 500), (750, 250)), pages=240, reuses=reuses)
    prompt_comes(driven, tokens=5000)
    assert [lane for lane, _ in lanes(driven)] == [0, 1]
    job = make_job(3, A, prompt=short, arrival_ns=1_000_000)
    driven.on(Submit(replace(job, sampling=replace(job.sampling, prompt_logprobs=prompt_logprobs))))
    return driven


def test_a_short_prompt_has_its_step_with_the_decode_and_waits_for_none_beside_it() -> None:
    driven = long_and_short(50)
    assert driven.asked(EndRun) == [EndRun(0)]
    driven.stepped(2)
    assert lanes(driven) == [(0, [3, 1])]
    (run,) = driven.asked(Run)
    assert [(row.start, row.stop) for row in run.prompts] == [(0, 50)]
    before = driven.core._step_times.latency[A.model].prefill_ns(50)
    driven.stepped(4, 2)
    assert [message.request for message in driven.said(Prefilled)] == [3]
    assert lanes(driven) == [(0, [1, 3])], "and the long one goes on meanwhile"
    assert driven.core._step_times.latency[A.model].prefill_ns(50) == before, "on a share it says nothing of the whole"


def test_it_takes_no_kv_that_the_run_beside_it_is_about_to_make() -> None:
    """Both prompts begin alike."""
    driven = long_and_short(50, reuses=True)
    driven.stepped(2)
    assert lanes(driven) == [(0, [3, 1])]
    assert not driven.asked(MoveBlocks) and not driven.said(Reused)


def test_a_short_prompt_waits_for_the_second_lane_where_streams_may_wait_no_longer_now() -> None:
    driven = long_and_short(50)
    driven.on(SetSlo(A.model, replace(SLO, gap_ns=1)))
    driven.stepped(2)
    assert lanes(driven) == [(0, [1])]


@pytest.mark.parametrize(
    ("short", "prompt_logprobs"),
    [(3200, None), (50, 0), (5100, None)],
    ids=["streams would wait", "it runs alone", "it is no shorter"],
)
def test_other_prompts_wait_for_the_second_lane(short: int, prompt_logprobs: int | None) -> None:
    scene = long_and_short(short, prompt_logprobs)
    scene.stepped(2)
    assert lanes(scene) == [(0, [1])]
