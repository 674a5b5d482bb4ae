"""The core of a mixed instance, scripted: a turn with a long prompt pauses for streams and for short prompts."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.clock import NS_PER_S
from aegis.core.effects import EndRun, LoadWeights, Run, StreamName
from aegis.core.estimators import Hardware
from aegis.core.events import Stepped, Tick
from aegis.core.ids import InstanceId, RequestId
from aegis.core.lane_views import LaneChoice, LanesView
from aegis.core.messages import Cancel, Phase, Submit, SwitchDone, TakeBack
from aegis.core.request import Token
from aegis.core.views import BatchView, Renewal, Turn, TurnRules
from decode.core import DecodeCore
from decode.second_lane import NO_LANES, LaneOffers
from decode.sequences import Where
from tests.sim.driven import Driven, decode, ledger, make_job
from tests.unit.decode.turns import IN, A, B, C, running, settle, take

ROOM = 40  # pages
TIGHT = 7  # for the weights of two models and a slab
PATIENCE_NS = 40_000_000


class Pausing:
    """The first batch has the turn, for ever, in pieces of a block. It pauses for these batches in every plan."""

    rules = TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=16)

    def __init__(self) -> None:
        self.front = 1
        self.pauses: list[Turn] = []

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        others = [batch.batch for batch in batches if batch.batch != self.front]
        return [*self.pauses, Turn(self.front, None, 0), *[Turn(batch, None, 0) for batch in others]]


class PausingOnLanes(Pausing):
    """What can run beside a decode does, in pieces."""

    beside_at_all = False

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        companion = next(each for each in lanes.companions if each.batch.batch == 2)
        shares = companion.divisions[0].shares
        return LaneChoice(companion.batch.batch, True, shares, 1) if self.beside_at_all else None


def beside_a_stream(pages: int = ROOM) -> tuple[Driven[DecodeCore], Pausing]:
    """Batch 1 streams, of model A, and has stopped for batch 2, of model B, whose prompt of 400 tokens has begun."""
    policy = Pausing()
    driven = decode(A, B, pages=pages, policy=policy)
    return _begun(driven, policy), policy


def _begun(driven: Driven[DecodeCore], policy: Pausing) -> Driven[DecodeCore]:
    take(driven, 1, A)
    settle(driven)
    policy.front = 2
    driven.on(Submit(make_job(2, B, prompt=400)))
    driven.stepped(2)
    settle(driven)
    assert prefills(driven) == [(2, 0, 16)]
    return driven


def test_a_prompt_goes_on_beside_the_stream_that_it_pauses_for() -> None:
    """And when it comes back, turns are planned anew: they were planned without it, and might run all of the rest."""
    policy = PausingOnLanes()
    core = DecodeCore(InstanceId("mixed-0"), ledger(ROOM), policy, Hardware(), lanes=LaneOffers(((250, 750),)))
    driven = _begun(Driven(core, (A, B), slabs=64), policy)
    policy.pauses, policy.beside_at_all = [Turn(1, 1, prefills=False, pause=True)], True
    piece_ran(driven)
    assert [(run.lane, run.model) for run in driven.asked(Run)] == [(0, A.model), (1, B.model)]
    driven.stepped(2)
    assert running(driven) == [1], "it has the first lane as long as the prompt has the second"
    policy.pauses, policy.beside_at_all = [], False
    driven.on(Stepped((), 1_000_000, lane=1))
    driven.stepped(2)
    assert [request for request, _, _ in prefills(driven)] == [2]


def test_a_prompt_whose_pause_the_second_lane_leaves_no_room_for_comes_once_that_is_idle() -> None:
    """It lacked no memory, for which it would wait for as long as a stream may stand still."""
    policy = PausingOnLanes()
    core = DecodeCore(InstanceId("mixed-0"), ledger(ROOM), policy, Hardware(), lanes=LaneOffers(((250, 750),)))
    driven = _begun(Driven(core, (A, B, C), slabs=64), policy)
    policy.front = 3
    take(driven, 3, C)
    piece_ran(driven)
    settle(driven)
    policy.beside_at_all = True
    driven.stepped(2)
    assert [(run.lane, run.model) for run in driven.asked(Run)] == [(0, C.model), (1, B.model)]
    driven.on(Submit(make_job(4, A, prompt=10)))
    policy.pauses, policy.beside_at_all = [Turn(1, 1, decodes=False, pause=True)], False
    driven.stepped(2)
    assert running(driven) == [3]
    driven.on(Stepped((), 1_000_000, lane=1))
    driven.stepped(2)
    assert prefills(driven) == [(4, 0, 10)]


def prefills(driven: Driven[DecodeCore]) -> list[tuple[int, int, int]]:
    return [(run.job.request, run.start, run.stop) for run in driven.prompts()]


def piece_ran(driven: Driven[DecodeCore]) -> None:
    driven.ran()


def test_a_turn_pauses_for_a_step_and_goes_on() -> None:
    """However often a batch is to have a pause, there is a run of the turn between two of them."""
    driven, policy = beside_a_stream()
    policy.pauses = [Turn(1, 1, prefills=False, pause=True)]
    for start in (16, 32, 48):
        piece_ran(driven)
        assert running(driven) == [1] and not driven.asked(LoadWeights)
        driven.stepped(2)
        assert prefills(driven) == [(2, start, start + 16)]


def test_a_pause_waits_for_nothing() -> None:
    """Weights that have left come back for a turn of their own."""
    driven, policy = beside_a_stream()
    driven.core.ledger.weights.evict(A.model)
    policy.pauses = [Turn(1, 1, prefills=False, pause=True)]
    piece_ran(driven)
    assert prefills(driven) == [(2, 16, 32)]


def test_a_short_prompt_comes_in_a_pause() -> None:
    driven, policy = beside_a_stream()
    driven.on(Submit(make_job(3, A, prompt=10)))
    policy.pauses = [Turn(1, 1, decodes=False, pause=True)]
    piece_ran(driven)
    assert prefills(driven) == [(3, 0, 10)]
    driven.on(Stepped(((Token(4),),), 1_000_000))
    assert prefills(driven) == [(2, 16, 32)]


def test_whoever_makes_way_in_a_pause_has_stopped() -> None:
    """The streams of the batch whose turn is paused too."""
    driven, policy = beside_a_stream()
    take(driven, 4, B)
    piece_ran(driven)
    while driven.under_way(IN):
        driven.complete(IN)
    for _ in range(4):  # the stream that has come has a step between two pieces
        if running(driven) == [4]:
            break
        piece_ran(driven)
    driven.stepped(2)
    policy.pauses = [Turn(1, 1, prefills=False, pause=True)]
    piece_ran(driven)
    while running(driven) != [1]:
        driven.stepped(2) if running(driven) else piece_ran(driven)
    driven.on(TakeBack(1, ROOM, PATIENCE_NS))
    assert {s.where for s in driven.core._by_request.values()} == {Where.DEVICE}, "what is paused keeps its KV"
    driven.on(Tick(), after_ns=PATIENCE_NS * 3 // 4)
    said = len(driven.effects)
    driven.stepped(2)
    stopped = [r for phase in driven.said(Phase, driven.effects[said:]) if not phase.running for r in phase.requests]
    assert sorted(stopped) == [1, 4] and driven.core.running == 0


class Filling(Pausing):
    """It pauses for the others that are there while the weights of the first batch are on their way, if it may."""

    def __init__(self, *, fills: bool = True) -> None:
        super().__init__()
        self.rules = TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=16, fills_loads=fills)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        front = next((batch for batch in batches if batch.batch == self.front), None)
        waits = front is not None and front.turn_ns is not None and not front.there
        others = [batch.batch for batch in batches if batch.there and batch.batch != self.front]
        self.pauses = [Turn(batch, NS_PER_S, prefills=False, pause=True) for batch in others if waits]
        return super().plan(batches, now_ns)


def while_b_comes(policy: Filling, lanes: LaneOffers = NO_LANES) -> Driven[DecodeCore]:
    """Batch 1 of model A streams, and batch 2 of model B, for which there is no room besides, is given the turn."""
    core = DecodeCore(InstanceId("mixed-0"), ledger(TIGHT), policy, Hardware(), lanes=lanes)
    driven = Driven(core, (A, B), slabs=64)
    take(driven, 1, A)
    settle(driven)
    policy.front = 2
    driven.on(Submit(make_job(2, B, prompt=10)))
    driven.stepped(2)
    assert driven.under_way(StreamName.WEIGHTS)
    return driven


def test_streams_go_on_while_the_weights_of_the_turn_come() -> None:
    """Run after run, without a run of the turn between them, and until the weights are there."""
    driven = while_b_comes(Filling())
    for _ in range(3):
        (run,) = driven.runs()
        assert run.model == A.model and run.steps > 1
        driven.stepped(2)
    settle(driven)
    assert driven.asked(EndRun), "the run under way ends when they have come"
    driven.stepped(2)
    assert prefills(driven) == [(2, 0, 10)]
    (done,) = driven.said(SwitchDone)
    assert done.model == B.model and done.prefetched, "the device has not stood still for the load"


def test_a_pause_for_weights_is_over_with_the_load() -> None:
    """Pauses are for one run again, between two of the turn."""
    policy = Filling()
    driven = while_b_comes(policy)
    settle(driven)
    driven.stepped(2)
    assert prefills(driven) == [(2, 0, 10)] and policy.pauses == []
    driven.ran()
    assert running(driven) == [2]


def test_nobody_goes_on_meanwhile_unless_the_rules_say_so() -> None:
    driven = while_b_comes(Filling(fills=False))
    assert running(driven) == []
    settle(driven)
    assert prefills(driven) == [(2, 0, 10)] and not driven.said(SwitchDone)[0].prefetched


def test_a_load_that_is_abandoned_in_a_pause_is_begun_again() -> None:
    """Its only request has left, and another one has come before the copy ends."""
    driven = while_b_comes(policy := Filling())
    driven.on(Cancel(RequestId(2), 1))
    policy.front = 3
    driven.on(Submit(make_job(3, B, prompt=10)))
    driven.stepped(2)
    driven.complete(StreamName.WEIGHTS)
    driven.stepped(2)
    assert driven.loads.count(B.model) == 2


class FillingOnLanes(Filling):
    """The next prompt of the stream's model runs beside it."""

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        own = next((c for c in lanes.companions if c.batch.batch == 1 and c.prefills), None)
        return LaneChoice(1, True, own.divisions[0].shares, NS_PER_S) if own else None


def test_a_prompt_beside_a_pause_costs_the_turn_no_load() -> None:
    """There is no room for it, and it is not its batch that has the turn."""
    driven = while_b_comes(FillingOnLanes(), LaneOffers(((250, 750),)))
    driven.on(Submit(make_job(3, A, prompt=90)))
    for _ in range(2):
        driven.stepped(2)
    weights = driven.core.ledger.weights
    assert weights.is_loading(B.model) and not weights.is_abandoned(B.model)
    assert running(driven) == [1]


class Alternating(Filling):
    """Each plan gives the turn to the other batch."""

    plans = 0

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        self.plans += 1
        assert self.plans < 20, "it is asked again and again"
        self.front = 5 - self.front
        return [turn for turn in super().plan(batches, now_ns) if not turn.pause]


def test_turns_that_wait_for_weights_make_one_plan_between_two_runs() -> None:
    """A policy that gives the turn to somebody else in each of them would be asked for ever."""
    policy = Alternating()
    driven = decode(A, B, C, pages=ROOM, policy=policy)
    take(driven, 1, A)
    settle(driven)
    policy.front = 3
    driven.on(Submit(make_job(2, B, prompt=10)))
    driven.on(Submit(make_job(3, C, prompt=10)))
    policy.plans = 0
    driven.stepped(2)
    assert policy.plans == 2
