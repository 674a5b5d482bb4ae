"""The proxy's mirror of the work lists: always what looking through everything would find."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.model import Slo
from aegis.core.views import MAX_BATCH, Length, PlacedModels, Pressure, Work
from aegis.sim.faults.fake_models import make_spec
from decode.policies.weighted_round_robin import WeightedRoundRobin
from proxy.routing.decode_lists import DecodeLists
from proxy.routing.demand import NOTHING, Demand
from proxy.routing.events import ModelLoad
from tests.unit.proxy.routing import naive_placement as naive

A, B, C = MODELS = [ModelId(name) for name in ("m0", "m1", "m2")]
INSTANCES = [InstanceId(name) for name in ("d-0", "d-1", "d-10", "d-2")]
I = INSTANCES[0]  # noqa: E741

models, instances = st.sampled_from(MODELS), st.sampled_from(INSTANCES)

CAPACITY = {A: 100, B: 1000, C: 10_000}
WEIGHT_BYTES = {A: 1, B: 10, C: 100}
TBT_NS = {A: NS_PER_S // 10, B: NS_PER_S, C: 4 * NS_PER_S}
SPECS = {
    model: make_spec(at, image_pages=1, block_bytes=1024, slo=Slo(ttft_ns=NS_PER_S, tbt_ns=TBT_NS[model]))
    for at, model in enumerate(MODELS)
}


class Decodes(RuleBasedStateMachine):
    """Requests and instances that come and go; Algorithm 2 places the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = WeightedRoundRobin()
        self.price = dict.fromkeys(MODELS, 1)
        self.kept = DecodeLists(CAPACITY, WEIGHT_BYTES, self.wants, SPECS)
        self.growing: set[RequestId] = set()
        self.now_ns = 0
        self.naive: dict[InstanceId, naive.List] = {}
        self.placed: dict[RequestId, InstanceId] = {}
        self.requests = 0

    def wants(self, model: ModelId, tokens: int) -> Demand:
        return Demand(self.price[model] * tokens, self.price[model], 800_000)

    @rule(model=models, price=st.integers(1, 1000))
    def steps_take_longer_or_less(self, model: ModelId, price: int) -> None:
        self.price[model] = price
        self.kept.reprice(model)

    @rule()
    def look(self) -> None:
        """At what nobody had asked for since it changed."""
        pressed = sorted(
            Pressure(self.load_ppm(known), sum(WEIGHT_BYTES[model] for model in known.placed), instance)
            for instance, known in self.naive.items()
        )
        assert list(self.kept.by_pressure) == pressed
        assert all(self.kept.load_ppm(each.instance) == each.load_ppm for each in pressed)

    def load_ppm(self, known: naive.List) -> int:
        total = NOTHING
        for model in MODELS:
            requests, tokens = known.foreign.get(model, (0, 0))
            own = [its for of, its in known.held.values() if of == model]
            if requests or own:
                total = total.instead(NOTHING, self.wants(model, tokens + sum(own)))
        return total.load_ppm

    @rule(instance=instances)
    def up_or_down(self, instance: InstanceId) -> None:
        if instance in self.naive:
            self.kept.down(instance)
            del self.naive[instance]
            self.placed = {r: i for r, i in self.placed.items() if i != instance}
        else:
            self.kept.up(instance)
            self.naive[instance] = naive.List(instance)

    @precondition(lambda self: self.naive)
    @rule(model=models, tokens=st.integers(1, 150), count=st.sampled_from([1, 2, MAX_BATCH]))
    def adopt(self, model: ModelId, tokens: int, count: int) -> None:
        for _ in range(count):
            work = Work(model, tokens)
            chosen = self.policy.place(work, self.kept)
            self.requests += 1
            request = RequestId(self.requests)
            self.placed[request] = chosen
            self.kept.add(chosen, request, work)
            self.naive[chosen].held[request] = (model, tokens)
            self.naive[chosen].placed.add(model)

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def make_tokens(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.placed)))
        self.kept.makes_tokens(self.placed[request], request)
        self.growing.add(request)

    @rule(after_ns=st.integers(1, 10 * NS_PER_S))
    def time_passes(self, after_ns: int) -> None:
        """Whole seconds count, and tokens that are whole by then."""
        before_s, self.now_ns = self.now_ns // NS_PER_S, self.now_ns + after_ns
        self.kept.grow(self.now_ns)
        for known in self.naive.values():
            for request, (model, tokens) in known.held.items():
                if request in self.growing:
                    made = [second * NS_PER_S // TBT_NS[model] for second in (before_s, self.now_ns // NS_PER_S)]
                    known.held[request] = (model, tokens + made[1] - made[0])

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), model=models)
    def switch(self, data: st.DataObject, model: ModelId) -> None:
        instance = data.draw(st.sampled_from(sorted(self.naive)))
        self.kept.switched(instance, model)
        self.naive[instance].active = model

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), loads=st.dictionaries(models, st.tuples(st.integers(1, 70), st.integers(1, 300))))
    def others(self, data: st.DataObject, loads: dict[ModelId, tuple[int, int]]) -> None:
        instance = data.draw(st.sampled_from(sorted(self.naive)))
        self.kept.set_foreign(instance, [ModelLoad(model, *load) for model, load in loads.items()])
        self.naive[instance].foreign = loads
        self.naive[instance].placed |= loads.keys()

    @invariant()
    def what_is_told_to_others_is_what_was_placed_here(self) -> None:
        for instance, known in self.naive.items():
            own = {load.model: (load.requests, load.tokens) for load in self.kept.own(instance)}
            held = {m: [t for its, t in known.held.values() if its == m] for m, _ in known.held.values()}
            assert own == {model: (len(tokens), sum(tokens)) for model, tokens in held.items()}

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.placed)))
        instance = self.placed.pop(request)
        self.kept.remove(instance, request)
        del self.naive[instance].held[request]

    @rule(model=models)
    def forget(self, model: ModelId) -> None:
        for instance, known in self.naive.items():
            for request in [r for r, (of, _) in known.held.items() if of == model]:
                self.kept.remove(instance, request)
                del known.held[request], self.placed[request]
            known.foreign = {other: load for other, load in known.foreign.items() if other != model}
            known.placed.discard(model)
            known.active = None if known.active == model else known.active
        self.kept.forget(model)

    @invariant()
    def lists_are_as_long_as_their_batches(self) -> None:
        """Algorithm 2, line 2: the KV capacity makes them."""
        batches = {i: sum(known.batches(m, CAPACITY[m]) for m in MODELS) for i, known in self.naive.items()}
        assert self.kept.by_length == sorted(Length(count, instance) for instance, count in batches.items())
        assert all(self.kept.batches(instance) == count for instance, count in batches.items())

    @invariant()
    def what_ran_and_what_came_is_known(self) -> None:
        for model in MODELS:
            active = sorted(i for i, known in self.naive.items() if known.active == model)
            assert list(self.kept.active_on(model)) == active
            assert set(self.kept.instances_of(model)) == {i for i, known in self.naive.items() if model in known.placed}
        for instance, known in self.naive.items():
            assert self.kept.tail(instance) == known.tail()
            weights = sum(WEIGHT_BYTES[model] for model in known.placed)
            assert self.kept.placed_models(instance) == PlacedModels(len(known.placed), weights)

    @invariant()
    def the_decision_is_that_of_algorithm_2(self) -> None:
        ordered = [known for _, known in sorted(self.naive.items())]
        for model in MODELS if ordered else []:
            for tokens in (1, 30, 100):
                assert self.policy.place(Work(model, tokens), self.kept) == naive.algorithm_2(
                    model, tokens, ordered, CAPACITY
                )


TestDecodes = Decodes.TestCase


def lists() -> DecodeLists:
    made = DecodeLists({A: 10_000, B: 10})
    made.up(I)
    return made


def test_a_batch_is_bounded_in_sequences_too() -> None:
    made = lists()
    for request in range(MAX_BATCH):
        assert request == 0 or made.shares(A)[0].room_tokens == 10_000 - request
        made.add(I, RequestId(request), Work(A, 1))
    assert made.shares(A)[0].room_tokens == 0 and made.batches(I) == 1
    made.add(I, RequestId(99), Work(A, 1))
    assert made.batches(I) == 2 and made.shares(A)[0].room_tokens == 20_000 - MAX_BATCH - 1


def test_who_left_counts_no_more() -> None:
    made = lists()
    made.add(I, RequestId(1), Work(B, 11))
    assert made.batches(I) == 2
    made.remove(I, RequestId(1))
    made.remove(I, RequestId(1))
    assert made.batches(I) == 0 and not made.shares(B)


def test_answers_grow_by_a_token_each_tbt_once_they_have_begun() -> None:
    made = DecodeLists({A: 100}, specs=SPECS)
    made.grow(3 * NS_PER_S)
    made.up(I)
    for request in (1, 2):
        made.add(I, RequestId(request), Work(A, 20))
    made.makes_tokens(I, RequestId(1))
    made.grow(4 * NS_PER_S - 1)
    assert made.placed_tokens(I, RequestId(1)) == 20
    made.grow(9 * NS_PER_S)
    assert [made.placed_tokens(I, RequestId(request)) for request in (1, 2)] == [80, 20]
    assert made.batches(I) == 1 and made.shares(A)[0].room_tokens == 0
    made.grow(10 * NS_PER_S)
    assert made.batches(I) == 2, "its KV takes more than the instance holds"
    made.remove(I, RequestId(1))
    made.makes_tokens(I, RequestId(1))
    assert made.batches(I) == 1 and made.shares(A)[0].room_tokens == 80
