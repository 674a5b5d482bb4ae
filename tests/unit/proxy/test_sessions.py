"""The session core, scripted: a request's life, and what happens when something dies at each point of it."""

from __future__ import annotations

from typing import TypeVar

import pytest

from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import (
    Adopt,
    Broken,
    Cancel,
    FromInstance,
    GaveUp,
    KvReleased,
    Phase,
    Prefilled,
    PromptLogprobs,
    ReleaseKv,
    Started,
    Submit,
    SwitchDone,
    ToInstance,
    Tokens,
)
from aegis.core.request import EventHandle, FinishReason, Job, KvHandle, Sampling, Token
from aegis.core.role import Role
from aegis.sim.faults.pretended import make_spec
from decode.policy import WeightedRoundRobin
from prefill.policy import GroupedFcfs
from proxy.events import (
    Arrived,
    ClientLeft,
    Deliver,
    DeliverPrompt,
    Effect,
    Ended,
    Event,
    ForeignLoad,
    Heard,
    InstanceDown,
    InstanceUp,
    ModelGone,
    ModelLoad,
    ModelUp,
    Replayed,
    To,
)
from proxy.sessions import MAX_LOSSES, MAX_REPLAYS, SessionCore

SPEC = make_spec(0, image_pages=3, block_bytes=1024)
OTHER = make_spec(1, image_pages=3, block_bytes=1024)
P0, P1, D0, D1 = (InstanceId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))
R = RequestId(1)

T = TypeVar("T", bound=ToInstance)


class Proxy:
    """Checks laws 1 and 2 on all that is said to the client."""

    def __init__(self, *instances: InstanceId) -> None:
        self.core = SessionCore(GroupedFcfs(), WeightedRoundRobin(), Hardware())
        self.delivered: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, Ended] = {}
        self.last: list[Effect] = []
        for spec in (SPEC, OTHER):
            self.tell(ModelUp(spec, 1000))
        for instance in instances:
            self.up(instance)

    def tell(self, event: Event) -> list[Effect]:
        self.last = self.core.on(event, 0)
        for effect in self.last:
            match effect:
                case Deliver(request, first, tokens):
                    got = self.delivered.setdefault(request, [])
                    assert first == len(got) and request not in self.ended
                    got += [token.id for token in tokens]
                case Ended(request):
                    assert request not in self.ended
                    self.ended[request] = effect
        return self.last

    def up(self, instance: InstanceId) -> None:
        self.tell(InstanceUp(instance, Role(instance.partition("-")[0])))

    def arrive(self, request: int = 1, *, model: ModelId = SPEC.model, prompt: int = 4) -> None:
        job = Job(RequestId(request), 1, model, tuple(range(prompt)), Sampling(max_tokens=50), 0)
        self.tell(Arrived(job))

    def heard(self, instance: InstanceId, message: FromInstance) -> None:
        self.tell(Heard(instance, message))

    def sent(self, kind: type[T]) -> list[tuple[InstanceId, T]]:
        """Messages of a kind that the last event caused."""
        return [(e.instance, e.message) for e in self.last if isinstance(e, To) and isinstance(e.message, kind)]

    def all_sent(self) -> list[tuple[InstanceId, ToInstance]]:
        return [(e.instance, e.message) for e in self.last if isinstance(e, To)]

    def state(self, request: int = 1) -> State | None:
        found = self.core.states().get(RequestId(request))
        return found[1] if found else None

    # --- as instances do ---

    def prefilled(self, *, owner: InstanceId = P0, attempt: int = 1, token: int = 10, request: RequestId = R) -> None:
        self.heard(owner, Prefilled(request, attempt, Token(token), handle(owner), 5))

    def decodes(self, *, attempt: int = 1, decode: InstanceId = D0) -> None:
        self.heard(decode, Phase((R,), running=True))

    def reach(self, point: str) -> None:
        """Request 1 from its arrival to `point`."""
        self.arrive()
        if point == "queued":
            return
        self.heard(P0, Started(R, 1))
        if point == "prefilling":
            return
        self.prefilled()
        if point == "handed off":
            return
        if point != "decoding, KV not there":
            self.heard(D0, KvReleased(R, 1, handle(P0)))
        self.decodes()
        self.heard(D0, Tokens(R, 1, 1, (Token(11),)))
        if point == "preempted":
            self.heard(D0, Phase((R,), running=False))


def handle(owner: InstanceId) -> KvHandle:
    return KvHandle(owner, ((1, 2),), 4, EventHandle(0, 1))


# --- a life without trouble -------------------------------------------------------------------------------------------


def test_from_arrival_to_the_last_token() -> None:
    proxy = Proxy(P0, D0)
    proxy.arrive()
    ((to, submit),) = proxy.sent(Submit)
    assert to == P0 and submit.job.request == R and proxy.state() is State.QUEUED
    proxy.heard(P0, Started(R, 1))
    assert proxy.state() is State.PREFILLING
    proxy.prefilled()
    assert proxy.sent(Adopt) == [(D0, Adopt(submit.job, (10,), handle(P0)))] and proxy.state() is State.HANDED_OFF
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert proxy.sent(ReleaseKv) == [(P0, ReleaseKv(R, 1))]
    proxy.decodes()
    assert proxy.state() is State.DECODING
    proxy.heard(D0, Phase((R,), running=False))
    assert proxy.state() is State.PREEMPTED
    proxy.decodes()
    proxy.heard(D0, Tokens(R, 1, 1, (Token(11), Token(12))))
    proxy.heard(D0, Tokens(R, 1, 3, (Token(13),), FinishReason.LENGTH))
    assert proxy.delivered[R] == [10, 11, 12, 13]
    assert proxy.ended[R] == Ended(R, State.FINISHED, FinishReason.LENGTH) and proxy.state() is None


def test_a_first_token_that_is_the_last_needs_no_decode_instance() -> None:
    proxy = Proxy(P0)
    proxy.reach("prefilling")
    proxy.heard(P0, Tokens(R, 1, 0, (Token(10),), FinishReason.STOP))
    assert proxy.delivered[R] == [10] and proxy.ended[R].reason is FinishReason.STOP and not proxy.all_sent()


def test_logprobs_of_the_prompt_are_delivered_once() -> None:
    proxy = Proxy(P0, P1, D0)
    proxy.reach("prefilling")
    prompt = (Token(1, -1.0),)
    proxy.heard(P0, PromptLogprobs(R, 1, prompt))
    assert proxy.last == [DeliverPrompt(R, prompt)]
    proxy.tell(InstanceDown(P0))
    proxy.heard(P1, Started(R, 2))
    proxy.heard(P1, PromptLogprobs(R, 2, prompt))
    assert proxy.last == []


def test_groups_fill_up_and_load_is_spread() -> None:
    proxy = Proxy(P0, P1, D0)
    placed = []
    for request in range(1, 11):
        proxy.arrive(request)
        placed += [(to, message.group) for to, message in proxy.sent(Submit)]
    assert placed == [(P0, 1)] * 8 + [(P1, 1)] * 2
    proxy.arrive(11, model=OTHER.model)
    assert [(to, message.group) for to, message in proxy.sent(Submit)] == [(P1, 2)]


def test_prefilling_does_not_make_room_in_a_group() -> None:
    proxy = Proxy(P0, D0)
    for request in range(1, 9):
        proxy.arrive(request)
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    proxy.arrive(9)
    assert [message.group for _, message in proxy.sent(Submit)] == [2]


def test_the_running_model_makes_its_instance_cheaper() -> None:
    proxy = Proxy(P0, P1, D0)
    proxy.heard(P1, SwitchDone(OTHER.model, True, 0, 0, 0, 0))
    proxy.arrive(1)
    assert proxy.sent(Submit)[0][0] == P0
    proxy.arrive(2, model=OTHER.model)
    assert proxy.sent(Submit)[0][0] == P1


def test_a_decode_instance_with_room_in_a_batch_of_the_model_is_preferred() -> None:
    proxy = Proxy(P0, D0, D1)
    placed = []
    for request, model in [(1, SPEC.model), (2, OTHER.model), (3, OTHER.model), (4, SPEC.model)]:
        proxy.arrive(request, model=model)
        proxy.heard(P0, Started(RequestId(request), 1))
        proxy.prefilled(request=RequestId(request))
        placed += [to for to, _ in proxy.sent(Adopt)]
    assert placed == [D0, D1, D1, D0]


def test_a_finished_request_makes_room_again() -> None:
    proxy = Proxy(P0, D0, D1)
    proxy.arrive()
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    proxy.decodes()
    proxy.heard(D0, Tokens(R, 1, 1, (Token(7),), FinishReason.STOP))
    proxy.arrive(2, model=OTHER.model)
    proxy.heard(P0, Started(RequestId(2), 1))
    proxy.prefilled(request=RequestId(2))
    assert [to for to, _ in proxy.sent(Adopt)] == [D0]


# --- waiting for instances --------------------------------------------------------------------------------------------


def test_requests_wait_for_a_prefill_instance_in_order_of_arrival() -> None:
    proxy = Proxy()
    for request in (1, 2, 3):
        proxy.arrive(request)
        assert proxy.last == []
    proxy.up(P0)
    assert [message.job.request for _, message in proxy.sent(Submit)] == [1, 2, 3]


def test_kv_waits_for_a_decode_instance() -> None:
    proxy = Proxy(P0)
    proxy.reach("handed off")
    assert proxy.delivered[R] == [10] and not proxy.all_sent()
    proxy.up(D0)
    assert [message.tokens for _, message in proxy.sent(Adopt)] == [(10,)]
    proxy.up(D1)
    assert proxy.all_sent() == [], "it is adopted once"


def test_kv_that_waits_is_released_when_the_client_leaves() -> None:
    proxy = Proxy(P0)
    proxy.reach("handed off")
    proxy.tell(ClientLeft(R))
    assert proxy.all_sent() == [(P0, ReleaseKv(R, 1))] and proxy.ended[R].state is State.CANCELLED


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["queued", "prefilling", "handed off", "decoding, KV not there"])
def test_a_prefill_instance_dies_while_it_matters(point: str) -> None:
    proxy = Proxy(P0, P1, D0)
    proxy.reach(point)
    sent = tuple(proxy.delivered.get(R, ()))
    proxy.tell(InstanceDown(P0))
    assert Replayed(R) in proxy.last and proxy.state() is State.QUEUED
    ((to, submit),) = proxy.sent(Submit)
    assert to == P1 and (submit.job.attempt, submit.job.sent) == (2, sent)
    assert proxy.sent(Cancel) == ([(D0, Cancel(R, 1))] if "d" in point and sent else [])
    assert not proxy.sent(ReleaseKv), "its owner is dead"
    proxy.heard(P1, Started(R, 2))
    proxy.prefilled(owner=P1, attempt=2, token=20)
    assert proxy.delivered[R] == [*sent, 20]


@pytest.mark.parametrize("point", ["decoding", "preempted"])
def test_a_prefill_instance_dies_when_the_kv_has_left_it(point: str) -> None:
    proxy = Proxy(P0, D0)
    proxy.reach(point)
    proxy.tell(InstanceDown(P0))
    assert proxy.last == []


@pytest.mark.parametrize("point", ["handed off", "decoding, KV not there", "decoding", "preempted"])
def test_a_decode_instance_dies(point: str) -> None:
    """Law 3: KV it had not fetched yet is released by the core, and only that."""
    proxy = Proxy(P0, D0, D1)
    proxy.reach(point)
    sent = tuple(proxy.delivered[R])
    proxy.tell(InstanceDown(D0))
    released = [] if point in ("decoding", "preempted") else [(P0, ReleaseKv(R, 1))]
    assert proxy.sent(ReleaseKv) == released and not proxy.sent(Cancel)
    ((to, submit),) = proxy.sent(Submit)
    assert to == P0 and (submit.job.attempt, submit.job.sent) == (2, sent)
    proxy.heard(P0, Started(R, 2))
    proxy.prefilled(attempt=2, token=20)
    assert proxy.sent(Adopt)[0][0] == D1 and proxy.sent(Adopt)[0][1].tokens == (*sent, 20)
    proxy.heard(D1, KvReleased(R, 2, handle(P0)))
    assert proxy.sent(ReleaseKv) == [(P0, ReleaseKv(R, 2))]


def test_instances_that_were_asked_to_end_do_not_count_against_their_requests() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    for attempt in range(2, 3 * MAX_REPLAYS):
        proxy.tell(InstanceDown(P0, asked=True))
        proxy.up(P0)
        assert [submit.job.attempt for _, submit in proxy.sent(Submit)] == [attempt]
        proxy.heard(P0, Started(R, attempt))
    assert proxy.state() is State.PREFILLING


def test_the_only_prefill_instance_dies_and_comes_back() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    proxy.tell(InstanceDown(P0))
    assert not proxy.all_sent() and proxy.state() is State.QUEUED
    proxy.up(P0)
    assert [(to, message.job.attempt) for to, message in proxy.sent(Submit)] == [(P0, 2)]


def test_others_are_not_disturbed_by_a_death() -> None:
    proxy = Proxy(P0, P1, D0, D1)
    proxy.reach("decoding")
    for request in range(2, 10):
        proxy.arrive(request)
    proxy.tell(InstanceDown(D1))
    assert proxy.last == []


@pytest.mark.parametrize(
    "message",
    [
        Tokens(R, 1, 2, (Token(99),)),
        Tokens(R, 1, 2, (Token(99),), FinishReason.STOP),
        Started(R, 1),
        GaveUp(R, 1),
        Broken(R, 1, "why"),
        PromptLogprobs(R, 1, (Token(1),)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_what_an_older_attempt_says_is_not_heard(message: FromInstance) -> None:
    """Law 1: its tokens may differ, and they are late."""
    proxy = Proxy(P0, P1, D0)
    proxy.reach("decoding, KV not there")
    proxy.tell(InstanceDown(P0))
    proxy.heard(D0, message)
    assert proxy.last == [] and proxy.delivered[R] == [10, 11]


def test_kv_of_an_older_attempt_is_released_at_once() -> None:
    """The first attempt's prefill had ended when its decode instance's death was heard of — or was cancelled late."""
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    proxy.tell(ClientLeft(R))
    assert proxy.sent(Cancel) == [(P0, Cancel(R, 1))]
    proxy.prefilled()
    assert proxy.all_sent() == [(P0, ReleaseKv(R, 1))] and R not in proxy.delivered


def test_three_losses_fail_a_request() -> None:
    proxy = Proxy(P0, D0)
    proxy.arrive()
    for loss in range(1, MAX_LOSSES + 1):
        assert R not in proxy.ended
        proxy.heard(P0, Started(R, loss))
        proxy.tell(InstanceDown(P0))
        proxy.up(P0)
    assert proxy.ended[R].state is State.FAILED and "lost 3 times" in proxy.ended[R].message


def test_who_only_waited_is_not_blamed_as_soon() -> None:
    """What was running may be what kills instances; its neighbours in the queue are not failed with it."""
    proxy = Proxy(P0, D0)
    proxy.arrive()
    for death in range(1, MAX_REPLAYS):
        proxy.tell(InstanceDown(P0))
        proxy.up(P0)
        assert [submit.job.attempt for _, submit in proxy.sent(Submit)] == [death + 1]
    proxy.tell(InstanceDown(P0))
    assert proxy.ended[R].state is State.FAILED


def test_requests_wait_for_a_model_that_is_not_up_yet() -> None:
    proxy = Proxy(P0, D0)
    late = make_spec(2, image_pages=3, block_bytes=1024)
    proxy.arrive(model=late.model)
    assert not proxy.all_sent() and proxy.state() is State.QUEUED
    proxy.tell(ModelUp(late, 1000))
    assert [submit.job.model for _, submit in proxy.sent(Submit)] == [late.model]


# --- giving up, breaking ----------------------------------------------------------------------------------------------


def test_a_request_whose_kv_was_given_up_is_prefilled_again() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("preempted")
    proxy.heard(D0, GaveUp(R, 1))
    ((_, submit),) = proxy.sent(Submit)
    assert (submit.job.attempt, submit.job.sent) == (2, (10, 11)) and Replayed(R) in proxy.last
    assert not proxy.sent(Cancel), "it is gone there"


def test_giving_up_is_no_loss() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("decoding")
    for attempt in range(1, 3 * MAX_LOSSES):
        proxy.heard(D0, GaveUp(R, attempt))
        proxy.heard(P0, Started(R, attempt + 1))
        proxy.prefilled(attempt=attempt + 1)
        proxy.heard(D0, KvReleased(R, attempt + 1, handle(P0)))
    assert R not in proxy.ended


def test_what_cannot_run_fails_with_its_reason() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    proxy.heard(P0, Broken(R, 1, "why"))
    assert proxy.ended[R] == Ended(R, State.FAILED, message="why")
    assert proxy.sent(Cancel) == [(P0, Cancel(R, 1))]


# --- clients that leave, models that go -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "to"),
    [("queued", P0), ("prefilling", P0), ("handed off", D0), ("decoding", D0), ("preempted", D0)],
)
def test_who_works_for_a_client_that_left_is_told(point: str, to: InstanceId) -> None:
    proxy = Proxy(P0, D0)
    proxy.reach(point)
    proxy.tell(ClientLeft(R))
    assert proxy.all_sent() == [(to, Cancel(R, 1))]
    assert proxy.ended[R].state is State.CANCELLED and proxy.state() is None
    proxy.tell(ClientLeft(R))
    assert proxy.last == []


def test_a_client_leaves_after_the_adopter_died() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("handed off")
    proxy.tell(ClientLeft(R))
    proxy.tell(InstanceDown(D0))
    assert proxy.all_sent() == [(P0, ReleaseKv(R, 1))], "law 3: the session is gone, its handle is not"


def test_law_3_a_handle_is_released_once() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("handed off")
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert proxy.sent(ReleaseKv) == [(P0, ReleaseKv(R, 1))]
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert proxy.all_sent() == []
    proxy.tell(InstanceDown(D0))
    assert not proxy.sent(ReleaseKv)


def test_law_3_nothing_is_released_to_the_owners_successor() -> None:
    """A new process with the old name never had that handle."""
    proxy = Proxy(P0, D0)
    proxy.reach("handed off")
    proxy.tell(InstanceDown(P0))
    proxy.up(P0)
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert not proxy.sent(ReleaseKv)


def test_requests_of_a_removed_model_fail_and_others_go_on() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("decoding")
    proxy.arrive(2)
    proxy.arrive(3, model=OTHER.model)
    proxy.tell(ModelGone(SPEC.model))
    assert {r: e.state for r, e in proxy.ended.items()} == {R: State.FAILED, RequestId(2): State.FAILED}
    assert "m0" in proxy.ended[R].message and "removed" in proxy.ended[R].message
    assert sorted(proxy.all_sent(), key=lambda x: x[0]) == [(D0, Cancel(R, 1)), (P0, Cancel(RequestId(2), 1))]
    proxy.arrive(4, model=OTHER.model)
    assert proxy.sent(Submit) and proxy.state(3) is State.QUEUED
    proxy.tell(ModelUp(SPEC, 1000))
    proxy.arrive(5)
    assert proxy.sent(Submit)


def test_a_request_known_to_nobody_is_ignored() -> None:
    proxy = Proxy(P0, D0)
    proxy.heard(D0, Phase((RequestId(77),), running=True))
    proxy.heard(D0, Tokens(RequestId(77), 1, 0, (Token(1),)))
    assert proxy.last == []


def test_switches_teach_the_estimates() -> None:
    """Prefetched ones do not: their time is that of waiting, not of copying."""
    proxy = Proxy(P0, D0)
    before = proxy.core._latency[SPEC.model].switch_ns()
    proxy.heard(D0, SwitchDone(SPEC.model, True, 0, 10 * before, 0, 0))
    assert proxy.core._latency[SPEC.model].switch_ns() == before
    proxy.heard(D0, SwitchDone(SPEC.model, False, 0, 10 * before, 0, 0))
    assert proxy.core._latency[SPEC.model].switch_ns() == pytest.approx(10 * before, rel=0.1)


# --- other proxies ---------------------------------------------------------------------------------------------------


def test_requests_keep_out_of_other_proxies_way() -> None:
    proxy = Proxy(P0, P1, D0, D1)
    proxy.tell(ForeignLoad(P0, 10**12, ()))
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(OTHER.model, 3, 5000), ModelLoad(ModelId("unknown"), 1, 1))))
    proxy.arrive()
    assert [instance for instance, _ in proxy.sent(Submit)] == [P1]
    proxy.heard(P1, Started(R, 1))
    proxy.prefilled(owner=P1)
    assert [instance for instance, _ in proxy.sent(Adopt)] == [D1]


def test_others_are_told_of_own_requests_alone() -> None:
    proxy = Proxy(P0, D0)
    proxy.tell(ForeignLoad(P0, 10**12, ()))
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 3, 5000),)))
    assert proxy.core.loads() == [ForeignLoad(P0, 0, ()), ForeignLoad(D0, 0, ())]
    proxy.arrive()
    prefills, _ = proxy.core.loads()
    assert 0 < prefills.prefill_ns < 10**12
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    assert proxy.core.loads() == [ForeignLoad(P0, 0, ()), ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 1, 5),))]


def test_a_model_that_goes_takes_others_requests_with_it() -> None:
    proxy = Proxy(D0)
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 3, 5000),)))
    proxy.tell(ModelGone(SPEC.model))
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 3, 5000),)))
    proxy.tell(ModelUp(SPEC, 1000))
    proxy.tell(InstanceDown(D0))
    assert proxy.last == []


# --- what another proxy began -----------------------------------------------------------------------------------------


def test_a_request_that_was_begun_elsewhere_goes_on_after_its_tokens() -> None:
    proxy = Proxy(P0, D0)
    job = Job(R, 1, SPEC.model, (0, 1), Sampling(max_tokens=50), 0, sent=(8, 9))
    proxy.delivered[R] = [8, 9]
    proxy.tell(Arrived(job))
    ((_, submit),) = proxy.sent(Submit)
    assert submit.job.sent == (8, 9)
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    ((_, adopt),) = proxy.sent(Adopt)
    assert adopt.tokens == (8, 9, 10)
    proxy.tell(InstanceDown(D0))
    proxy.up(D0)
    assert proxy.delivered[R] == [8, 9, 10]
