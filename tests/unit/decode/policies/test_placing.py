"""The places that the rivals choose for a request, given what instances hold."""

from __future__ import annotations

from itertools import count

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import MAX_BATCH, DecodePolicy, Work
from decode.policies.dedicated import Dedicated
from decode.policies.muxserve import MuxServe
from decode.policies.qlm import Qlm
from decode.policies.serverlessllm import ServerlessLlm, ServerlessLlmAsPublished
from decode.policies.serverlessllm_oracle_sjf import ServerlessLlmOracleSjfAsPublished
from proxy.routing.decode_lists import DecodeLists

A, B, C, D = (ModelId(name) for name in "ABCD")
X, Y, Z = (InstanceId(name) for name in "XYZ")


class Pool:
    """Three instances; every model holds 1 000 tokens of KV beside 10 bytes of weights (D: 25)."""

    def __init__(self, *, max_batch: int = MAX_BATCH) -> None:
        self.lists = DecodeLists(dict.fromkeys((A, B, C, D), 1000), {A: 10, B: 10, C: 10, D: 25}, max_batch=max_batch)
        self._requests = map(RequestId, count())
        for instance in (X, Y, Z):
            self.lists.up(instance)

    def holds(self, instance: InstanceId, *models: ModelId) -> list[RequestId]:
        requests = [next(self._requests) for _ in models]
        for request, model in zip(requests, models, strict=True):
            self.lists.add(instance, request, Work(model, 10))
        return requests

    def ran(self, instance: InstanceId, model: ModelId, *, last_token_ns: int = 0) -> None:
        self.lists.switched(instance, model)
        self.lists.tokens_came(instance, last_token_ns)

    def asks(self, policy: DecodePolicy, model: ModelId) -> InstanceId | None:
        return policy.place(Work(model, 10), self.lists)

    def places(self, policy: DecodePolicy, *models: ModelId) -> list[InstanceId | None]:
        """One after the other, each to stay."""
        chosen = []
        for model in models:
            instance = self.asks(policy, model)
            chosen.append(instance)
            if instance:
                self.holds(instance, model)
        return chosen


def test_request_level_joins_the_running_model_before_it_takes_an_idle_instance() -> None:
    pool, policy = Pool(), ServerlessLlm()
    pool.holds(X, A)
    pool.ran(X, A)
    assert pool.asks(policy, A) == X and pool.asks(policy, B) == Y


def test_request_level_prefers_an_idle_instance_that_has_the_model_then_the_longest_rested() -> None:
    pool, policy = Pool(), ServerlessLlm()
    pool.ran(X, A, last_token_ns=30)
    pool.ran(Y, B, last_token_ns=20)
    pool.ran(Z, C, last_token_ns=10)
    assert [pool.asks(policy, model) for model in (A, B, C, D)] == [X, Y, Z, Z]


def test_request_level_waits_in_line_with_its_model_else_in_the_shortest_line() -> None:
    pool, policy = Pool(), ServerlessLlm()
    pool.holds(X, A, B)
    pool.holds(Y, C, B, A)
    pool.holds(Z, C, A)
    for instance, model in ((X, A), (Y, C), (Z, C)):
        pool.ran(instance, model)
    assert pool.asks(policy, B) == X and pool.asks(policy, D) == X and pool.asks(policy, C) == Y


def test_as_published_a_run_takes_four_and_a_newcomer_goes_where_a_step_ended_first() -> None:
    pool, policy = Pool(max_batch=4), ServerlessLlmAsPublished()
    assert pool.places(policy, A, A, A, A, A) == [X, X, X, X, Y]
    for instance, last_token_ns in ((X, 50), (Y, 40), (Z, 45)):
        pool.ran(instance, A, last_token_ns=last_token_ns)
    pool.holds(Z, C)
    assert pool.asks(policy, B) == Y, "which is busy"


def test_as_published_a_run_is_not_joined_past_another_model() -> None:
    pool, policy = Pool(max_batch=4), ServerlessLlmAsPublished()
    pool.holds(X, A, B)
    pool.holds(Y, A)
    assert pool.asks(policy, A) == Y


def test_as_published_sjf_joins_the_first_batch_with_room_else_the_fewest_batches() -> None:
    pool, policy = Pool(max_batch=4), ServerlessLlmOracleSjfAsPublished(lambda request: 1)
    pool.holds(X, A, A, A, A)
    pool.holds(Y, A)
    assert pool.asks(policy, A) == Y and pool.asks(policy, B) == Z


def test_groups_are_joined_else_made_where_nothing_waits() -> None:
    pool, policy = Pool(), Qlm()
    assert pool.places(policy, A, B, A, C, D) == [X, Y, X, Z, X]


def test_dedicated_models_are_refused_when_no_instance_is_left() -> None:
    pool, policy = Pool(), Dedicated()
    assert pool.places(policy, A, B, A, C, D, B) == [X, Y, X, Z, None, Y]


def test_a_dedicated_instance_is_free_again_when_its_model_is_gone() -> None:
    pool, policy = Pool(), Dedicated()
    (request,) = pool.holds(X, A)
    pool.places(policy, B, C)
    pool.lists.remove(X, request)
    assert pool.asks(policy, D) is None
    pool.lists.forget(A)
    assert pool.asks(policy, D) == X


def test_models_are_multiplexed_as_memory_allows() -> None:
    pool, policy = Pool(), MuxServe(30)
    assert pool.places(policy, A, D, B, C, D) == [X, Y, Z, X, Y]
    assert pool.places(MuxServe(20), A, B, C) == [X, Z, X], "where they are"
    pool = Pool()
    assert pool.places(MuxServe(20), D) == [None]
    assert pool.places(MuxServe(1000, models_max=1), A, B, C, D) == [X, Y, Z, None]


def test_a_place_is_lost_with_its_instance() -> None:
    pool, policy = Pool(), MuxServe(30)
    pool.places(policy, A)
    pool.lists.down(X)
    assert pool.asks(policy, A) == Y
