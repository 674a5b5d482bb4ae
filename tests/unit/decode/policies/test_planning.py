"""The turns that the rivals plan."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.ids import ModelId, RequestId
from aegis.core.views import BatchView, RoundPolicy, Turn
from decode.policies.decode_first import DecodeFirst
from decode.policies.dedicated import Dedicated
from decode.policies.muxserve import MuxServe
from decode.policies.prefill_first import PrefillFirst
from decode.policies.qlm import Qlm
from decode.policies.serverlessllm import ServerlessLlm, ServerlessLlmAsPublished
from decode.policies.serverlessllm_oracle_sjf import ServerlessLlmOracleSjf, ServerlessLlmOracleSjfAsPublished

_MS = 1_000_000


def batch(
    number: int,
    *,
    waiting: int = 0,
    requests: int = 1,
    due_ms: int | None = None,
    active: bool = False,
    decoded_ns: int = -1,
) -> BatchView:
    """Of a model of its own; its requests are `10 * number`, `10 * number + 1`, …"""
    return BatchView(
        number,
        ModelId(f"m{number}"),
        10 * _MS,
        100 * _MS,
        500 * _MS,
        requests=tuple(RequestId(10 * number + i) for i in range(requests)),
        waiting=waiting,
        prefill_ns=waiting * 100 * _MS,
        first_due_ns=None if due_ms is None else due_ms * _MS,
        active=active,
        decoded_ns=decoded_ns,
    )


def order(policy: RoundPolicy, *batches: BatchView) -> list[int]:
    return [turn.batch for turn in policy.plan(batches, 0)]


def test_first_come_first_served_to_the_end() -> None:
    for policy in (ServerlessLlm(), ServerlessLlmAsPublished(), Dedicated()):
        assert policy.plan([batch(2), batch(1)], 0) == [Turn(2, None), Turn(1, None)]


def test_the_shortest_batch_comes_first_but_after_those_of_the_running_model() -> None:
    left = {10: 500, 20: 100, 30: 50, 31: 300, 40: 900}
    policy = ServerlessLlmOracleSjf(lambda request: left[request])
    assert order(policy, batch(1), batch(2), batch(3, requests=2), batch(4, active=True)) == [4, 2, 3, 1]


def test_as_published_prefills_go_before_the_batch_that_decodes() -> None:
    left = {10: 500, 20: 100, 30: 900, 40: 1}
    policy = ServerlessLlmOracleSjfAsPublished(lambda request: left[request])
    batches = (batch(1, active=True), batch(2), batch(3, waiting=1, due_ms=5), batch(4))
    assert order(policy, *batches) == [4, 3, 2, 1]


def test_groups_go_by_deadline() -> None:
    batches = (batch(1), batch(2, waiting=1, due_ms=30), batch(3, waiting=1, due_ms=20))
    assert order(Qlm(), *batches) == [3, 2, 1]


def test_a_group_is_swapped_out_just_in_time_for_a_first_token() -> None:
    """A switch of 500 and a prefill of 100 ms have to end at 700 ms, and the running group's step takes 10."""
    running = replace(batch(1, active=True), turn_ns=5)
    batches = (running, batch(2, waiting=1, due_ms=700), batch(3, waiting=1, due_ms=2000))
    assert Qlm().plan(batches, 0) == [Turn(1, 90 * _MS), Turn(2, None), Turn(3, None)]
    assert Qlm().plan(batches, 90 * _MS) == [Turn(2, None), Turn(3, None), Turn(1, None)]
    assert Qlm().plan(batches[:2], 101 * _MS)[0] == Turn(1, None), "it is late whatever is done"
    assert Qlm().plan(batches, 101 * _MS)[0] == Turn(1, (1390 - 101) * _MS), "and the next one can wait"
    assert Qlm(preempts=False).plan(batches, 90 * _MS)[0] == Turn(1, None)


def test_nothing_is_swapped_out_for_its_own_model_and_who_was_goes_on_by_its_next_token() -> None:
    running, own = replace(batch(1), turn_ns=5), replace(batch(2, waiting=1, due_ms=700), model=ModelId("m1"))
    assert Qlm().plan([running, own], 90 * _MS)[0] == Turn(1, None)
    swapped, waiting = replace(batch(1), due_ns=20 * _MS), batch(2, waiting=1, due_ms=30)
    assert order(Qlm(), waiting, swapped) == [1, 2]


def test_multiplexed_models_take_short_turns_prefills_first() -> None:
    policy = MuxServe(1, slice_ns=7)
    assert policy.plan([batch(1), batch(2, waiting=1, due_ms=1)], 0) == [Turn(2, None, decodes=False)]
    assert policy.plan([batch(1, decoded_ns=9), batch(2, decoded_ns=3)], 0) == [Turn(2, 7), Turn(1, 7)]
    assert policy.plan([batch(1)], 0) == [Turn(1, None)]


def test_prefills_first_in_order_of_their_deadlines() -> None:
    batches = (batch(1), batch(2, waiting=1, due_ms=30), batch(3, waiting=1, due_ms=20))
    turns = PrefillFirst().plan(batches, 0)
    assert turns == [Turn(3, None, decodes=False), Turn(2, None, decodes=False)]


def test_with_nothing_to_prefill_who_has_not_decoded_for_longest_comes_first() -> None:
    turns = PrefillFirst().plan([batch(1, decoded_ns=9), batch(2, decoded_ns=3)], 0)
    assert [turn.batch for turn in turns] == [2, 1] and all(turn.quota_ns for turn in turns)


def test_decodes_first_and_one_batch_is_prefilled_when_there_are_none() -> None:
    waiting = batch(2, waiting=2, requests=2, due_ms=30), batch(3, waiting=1, due_ms=20)
    (turn,) = DecodeFirst().plan([batch(1), *waiting], 0)
    assert turn.batch == 1 and turn.decodes and not turn.prefills
    assert DecodeFirst().plan(waiting, 0) == [Turn(3, None, decodes=False)]
