"""A proxy and what it hears of instances: from themselves that they live, from its node that they do not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aegis.core.api_keys import Caller, Key, Keyring, digest_of
from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ProxyId, RequestId, nth_request
from aegis.core.messages import (
    BringIn,
    Broken,
    BroughtIn,
    Cancel,
    FromInstance,
    Greeting,
    HandedOver,
    HandOver,
    Phase,
    Prefilled,
    Started,
    StepsTook,
    Submit,
    ToInstance,
    Tokens,
)
from aegis.core.messages import Reused as ReusedTokens
from aegis.core.request import Failure, Job, KeptPrefix, Sampling, Token
from aegis.core.role import Role
from aegis.sim.faults.fake_models import make_spec
from aegis.telemetry.history import History
from aegis.telemetry.records import REFUSED
from aegis.transport.node_messages import (
    Drain,
    FromProxy,
    InstanceLost,
    KeysSet,
    ModelUsed,
    Noted,
    OnPrefixFound,
    Unserved,
)
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.http.market import Delivery, Delta, Failed, Reused
from proxy.live.proxy import Proxy
from proxy.live.sequence_handle import UNREAD_MAX, LiveSequenceHandle
from proxy.live.unread_answers import ANSWER_BYTES_MAX
from proxy.routing.events import ForeignLoad, ModelLoad, ModelMoved, ModelRemoved, ModelUp, MoveModel, PlacesSet
from proxy.routing.router import Router

NUMBER = ProxyId(3)
SPEC = make_spec(0, image_pages=3, block_bytes=1024)
D0, D1 = (InstanceId(f"mixed-{at}") for at in range(2))
FIRST = nth_request(NUMBER, 1)


class Wires:
    """All that the proxy is connected to. As `Hub` and `NodeEnd`."""

    address = "ipc://here"
    queries: Any = None

    def __init__(self) -> None:
        self.sent: list[tuple[str, ToInstance]] = []
        self.posts: list[int] = []  # how many messages went at a time
        self.told: list[FromProxy] = []
        self.kept: KeptPrefix | None = None
        self.asked: list[OnPrefixFound] = []  # of what is kept, and not answered
        self.answers = True
        self.served = {SPEC.model: SimpleNamespace(spec=SPEC, state="ready", detail="", priority=0)}

    def send(self, identity: str, messages: Sequence[object]) -> None:
        self.posts.append(len(messages))
        self.sent += [(identity, cast(ToInstance, message)) for message in messages]

    def models(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self.served)

    def look_up(self, instance: InstanceId, job: Job, found: OnPrefixFound) -> None:
        if self.answers:
            found(self.kept)
        else:
            self.asked.append(found)

    def notify(self, message: FromProxy) -> None:
        self.told.append(message)


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


class Stand:
    """A proxy of a pool of mixed instances."""

    def __init__(self, *, refuses_late: bool = False) -> None:
        self.wires = Wires()
        core = Router(GroupedFcfs(), WeightedRoundRobin(), Hardware())
        self.clock = Clock()
        history = History(spans=0, records=9, decisions=0, token_times=False)
        self.proxy = Proxy(
            NUMBER, core, cast(Any, self.wires), cast(Any, self.wires), self.clock, history, refuses_late=refuses_late
        )
        self.proxy.deliver(ModelUp(SPEC, 1000))

    def hear(self, instance: InstanceId, incarnation: int, *messages: FromInstance) -> None:
        self.proxy._on_messages(instance, incarnation, messages)
        self.proxy._outbox.flush()

    def greet(self, instance: InstanceId, incarnation: int = 1) -> None:
        self.hear(instance, incarnation, Greeting(Role.MIXED))

    def sent(self, kind: type[ToInstance]) -> list[str]:
        """To whom, of that kind."""
        return [identity for identity, message in self.wires.sent if isinstance(message, kind)]

    def submit(self) -> deque[Delivery]:
        """What a client is delivered, so far."""
        call_id = self.proxy.submit(SPEC.model, [1, 2], Sampling(max_tokens=5))
        return cast(deque[Delivery], call_id._unread)  # type: ignore[attr-defined]

    def start(self, instance: InstanceId, request: RequestId = FIRST, *, incarnation: int = 1) -> None:
        first = Prefilled(request, 1, Token(5), None, 1)
        self.hear(instance, incarnation, Started(request, 1), first, Phase((request,), running=True))


def test_it_has_the_keys_that_its_node_told_last() -> None:
    stand = Stand()
    for name in ("alice", "bob"):
        stand.proxy.deliver(KeysSet(Keyring((Key(digest_of(name), Caller(name)),))))
    assert stand.proxy.keys.find("bob") == Caller("bob") and stand.proxy.keys.find("alice") is None


def test_requests_wait_for_an_instance_that_greets() -> None:
    stand = Stand()
    got = stand.submit()
    assert stand.wires.sent == [] and stand.wires.told == [ModelUsed(SPEC.model)]
    stand.greet(D0, 4)
    assert stand.sent(Submit) == ["mixed-0/4"]
    stand.start(D0, incarnation=4)
    assert list(got) == [Delta((Token(5),))]


def test_what_is_submitted_together_is_sent_at_once() -> None:
    stand = Stand()
    stand.greet(D0)
    stand.submit()
    before = len(stand.wires.posts)
    with stand.proxy.together(), stand.proxy.together():
        stand.submit()
        stand.submit()
        assert len(stand.wires.posts) == before
    assert stand.wires.posts[before:] == [2] and stand.sent(Submit) == ["mixed-0/1"] * 3
    stand.submit()
    assert stand.wires.posts[before:] == [2, 1]


def test_an_answer_whose_logprobs_nobody_reads_is_given_up_and_holds_nothing() -> None:
    """All its choices, together long before one of them is as far behind as it may be in parts; no other answer."""
    top = tuple((token, -1.0 - token) for token in range(20))

    async def main() -> None:
        stand = Stand()
        stand.greet(D0)
        sampling = Sampling(max_tokens=UNREAD_MAX, logprobs=20)
        handles: list[LiveSequenceHandle] = []
        for _ in range(4):
            handles.append(stand.proxy.submit(SPEC.model, [1, 2], sampling, among=handles[-1] if handles else None))
        other = stand.proxy.submit(SPEC.model, [1, 2], sampling)
        for call_id in (*handles, other):
            stand.start(D0, call_id.request)
        for index in range(1, 4000):
            for call_id in (*handles, other):
                stand.hear(D0, 1, Tokens(call_id.request, 1, index, (Token(7, -1.0, top),)))
            await asyncio.sleep(0)
        assert stand.sent(Cancel) == ["mixed-0/1"] * 4
        for call_id in handles:
            (failed,) = call_id._unread
            assert isinstance(failed, Failed) and "were not read" in failed.message
        assert len(other._unread) == 4000
        assert stand.proxy._unread_answers.nbytes < ANSWER_BYTES_MAX, "that of the other answer only"

    asyncio.run(main())


def test_nothing_is_heard_of_a_process_that_is_lost() -> None:
    stand = Stand()
    stand.greet(D0)
    got = stand.submit()
    stand.proxy.deliver(InstanceLost(D0, 1))
    assert stand.wires.told[-1] == Noted(D0, 1)
    stand.start(D0)
    stand.greet(D0)
    assert list(got) == [] and stand.sent(Submit) == ["mixed-0/1"]
    stand.greet(D0, 2)
    assert stand.sent(Submit) == ["mixed-0/1", "mixed-0/2"]


def test_a_successor_may_greet_before_the_loss_is_told() -> None:
    stand = Stand()
    stand.greet(D0)
    stand.submit()
    stand.greet(D0, 2)
    assert stand.sent(Submit) == ["mixed-0/1", "mixed-0/2"]
    stand.proxy.deliver(InstanceLost(D0, 1))
    stand.submit()
    assert stand.sent(Submit) == ["mixed-0/1", "mixed-0/2", "mixed-0/2"], "it lives"


def test_a_loss_may_be_told_before_the_greeting_arrives() -> None:
    stand = Stand()
    stand.proxy.deliver(InstanceLost(D0, 1))
    stand.greet(D0)
    stand.submit()
    assert stand.sent(Submit) == []


def test_a_model_that_goes_ends_its_requests() -> None:
    stand = Stand()
    stand.greet(D0)
    got = stand.submit()
    stand.proxy.deliver(ModelRemoved(SPEC.model))
    assert isinstance(got[-1], Failed) and stand.sent(Cancel) == ["mixed-0/1"]
    stand.hear(D0, 1, Broken(FIRST, 1, "there is no such model"))
    assert len(got) == 1


def test_a_request_fails_with_the_reason_of_its_instance_and_its_kind() -> None:
    stand = Stand()
    stand.greet(D0)
    got = stand.submit()
    stand.hear(D0, 1, Broken(FIRST, 1, "why", Failure.SLOW_GRAMMAR))
    assert list(got) == [Failed("why", kind=Failure.SLOW_GRAMMAR)]


def test_who_drains_takes_no_more_and_finishes_what_there_is() -> None:
    stand = Stand()
    stand.greet(D0)
    got = stand.submit()
    stand.proxy.deliver(Drain(3.0))
    with pytest.raises(UserError, match="shutting down") as refused:
        stand.submit()
    assert refused.value.code == "shutting_down"
    assert stand.proxy.busy and not stand.sent(Cancel)
    stand.proxy.abandon()
    assert not stand.proxy.busy and stand.sent(Cancel) == ["mixed-0/1"]
    assert list(got) == [Failed(refused.value.message, 503, Failure.SHUTTING_DOWN)]


def test_where_nothing_can_be_served_all_ends_with_the_reason() -> None:
    stand = Stand()
    stand.greet(D0)
    got = stand.submit()
    stand.proxy.deliver(Unserved("its instances do not come up any more"))
    assert list(got) == [Failed("its instances do not come up any more", 503)]
    with pytest.raises(UserError, match="do not come up"):
        stand.submit()


def test_others_are_told_of_what_was_placed() -> None:
    stand = Stand()
    stand.greet(D0)
    stand.greet(D1)
    stand.submit()
    loads = {load.instance: load.models for load in stand.proxy.report().loads}
    assert [model.requests for model in loads[D0]] == [1] and loads[D1] == ()


def test_what_others_have_on_an_instance_counts_once_it_greets() -> None:
    stand = Stand()
    stand.proxy.deliver(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 1, 5000),)))
    stand.greet(D0)
    stand.greet(D1)
    stand.submit()
    assert stand.sent(Submit) == ["mixed-1/1"]


def test_metrics_are_those_of_its_requests() -> None:
    stand = Stand()
    stand.submit()
    families = {family.name: family for family in asyncio.run(stand.proxy.scrape())}
    assert [value for _, _, value in families["aegis:num_requests_waiting"].samples] == [1]


def test_a_prompt_takes_what_is_kept_of_it_with_it() -> None:
    stand = Stand()
    stand.wires.kept = KeptPrefix(((3, 5),), 32, 7)
    stand.greet(D0)
    got = stand.submit()
    (submit,) = [message for _, message in stand.wires.sent if isinstance(message, Submit)]
    assert submit.job.kept == stand.wires.kept
    stand.hear(D0, 1, Started(FIRST, 1), ReusedTokens(FIRST, 1, 32), Prefilled(FIRST, 1, Token(5), None, 1))
    assert list(got) == [Reused(32), Delta((Token(5),))]


def test_what_follows_a_prompt_waits_until_it_was_looked_up() -> None:
    """Or an instance would be told to cancel what it does not know."""
    stand = Stand()
    stand.wires.answers = False
    stand.greet(D0)
    stand.greet(D1)
    call_id = stand.proxy.submit(SPEC.model, [1, 2], Sampling(max_tokens=5))
    stand.submit()
    call_id.cancel()
    assert stand.sent(Submit) == stand.sent(Cancel) == []
    first, second = stand.wires.asked
    second(None)
    stand.proxy.flush()
    first(None)
    stand.proxy.flush()
    kinds = [type(message) for _, message in stand.wires.sent if isinstance(message, Submit | Cancel)]
    assert kinds in ([Submit, Submit, Cancel], [Submit, Cancel, Submit])
    stand.proxy.flush()
    assert len(stand.sent(Submit)) == 2


def test_of_a_request_that_was_begun_elsewhere_only_what_it_still_owes_is_missed() -> None:
    stand = Stand()
    stand.greet(D0)
    stand.proxy.submit(SPEC.model, [1], Sampling(max_tokens=5), sent=(7, 8))
    stand.hear(D0, 1, Broken(FIRST, 1, "broken"))
    (tally,), (record,) = stand.proxy.tallies(), stand.proxy._history.records.since(0)
    assert (tally.due, tally.met, record.ended, record.output_tokens) == (3, 0, "failed", 3)


def test_who_would_be_late_is_refused_where_it_is_to_be_told() -> None:
    patient, hasty = Stand(), Stand(refuses_late=True)
    long_ns = SPEC.slo.ttft_ns + 3 * NS_PER_S
    others = ModelLoad(SPEC.model, 1, 2, prefill_ns=long_ns)
    for stand in (patient, hasty):
        stand.greet(D0)
        stand.submit()
        stand.proxy.deliver(ForeignLoad(D0, long_ns, (others,)))
    patient.submit()
    with pytest.raises(UserError, match="no time for requests of model 'm0' now; try again in 4 s") as caught:
        hasty.submit()
    assert (caught.value.status, caught.value.code) == (429, "would_be_late")
    assert caught.value.retry_after_s and caught.value.retry_after_s >= 3
    (refused,) = hasty.proxy._history.records.since(0)
    assert (refused.ended, refused.input_tokens, refused.output_tokens, refused.on_time) == (REFUSED, 2, 5, 0)
    assert hasty.proxy.submit(SPEC.model, [1], Sampling(max_tokens=5), sent=(7,)), "a retry is none"
    soon_ns = round(0.9 * SPEC.slo.ttft_ns)  # it would be in time, but once refused, more than that is asked for
    hasty.proxy.deliver(ForeignLoad(D0, soon_ns, (ModelLoad(SPEC.model, 1, 2, prefill_ns=soon_ns),)))
    with pytest.raises(UserError, match="no time for requests of model 'm0' now; try again in 2 s"):
        hasty.submit()
    hasty.proxy.deliver(ForeignLoad(D0, 0, ()))
    hasty.submit()


def test_who_was_taken_is_refused_later_where_its_first_token_does_not_come() -> None:
    for refuses_late in (False, True):
        stand = Stand(refuses_late=refuses_late)
        stand.greet(D0)
        got = stand.submit()
        stand.clock.ns = 3 * SPEC.slo.ttft_ns
        stand.hear(D0, 1, *[StepsTook(SPEC.model, 100, 1, 2 * SPEC.slo.tbt_ns)] * 500)
        if not refuses_late:
            assert not got and stand.sent(Cancel) == []
            continue
        (failed,) = got
        assert isinstance(failed, Failed)
        error = failed.error()
        assert (error.status, error.code, error.kind) == (429, "would_be_late", "rate_limit_error")
        assert error.message == f"there is no time for requests of model 'm0' now; try again in {error.retry_after_s} s"
        (refused,) = stand.proxy._history.records.since(0)
        assert (refused.ended, refused.on_time) == (REFUSED, 0)
        labels = {"model_name": SPEC.model, "reason": REFUSED}
        assert stand.proxy.registry.get_sample_value("aegis:request_failure_total", labels) == 1
        assert stand.sent(Cancel) == ["mixed-0/1"]


def test_a_model_s_priority_is_added_to_its_requests() -> None:
    stand = Stand()
    stand.greet(D0)
    stand.wires.served[SPEC.model].priority = -3
    for own in (0, 5, -8):
        stand.proxy.submit(SPEC.model, [1], Sampling(max_tokens=5), priority=own)
    jobs = [message.job for _, message in stand.wires.sent if isinstance(message, Submit)]
    assert [job.priority for job in jobs] == [-3, 2, -8]


def test_a_move_that_its_node_orders_is_answered_and_where_requests_go_is_set() -> None:
    stand = Stand()
    stand.greet(D0)
    stand.greet(D1)
    stand.proxy.deliver(PlacesSet(SPEC.model, (D1,)))
    stand.submit()
    assert stand.sent(Submit) == ["mixed-1/1"]
    stand.proxy.deliver(MoveModel(SPEC.model, D0))
    assert stand.sent(BringIn) == ["mixed-0/1"]
    stand.hear(D0, 1, BroughtIn(SPEC.model, there=True))
    assert stand.sent(HandOver) == ["mixed-1/1"]
    stand.hear(D1, 1, HandedOver(FIRST, 1, 0, None))
    assert stand.sent(Submit) == ["mixed-1/1", "mixed-0/1"]
    assert stand.wires.told[-1] == ModelMoved(SPEC.model, D0, 0, 1)
