"""The model cache's books: what comes in, what has to leave for it, and who has to agree."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, ModelId, PageRun
from aegis.core.messages import EvictImage, ImageCached
from memory.image_cache import (
    ONE_USE_NS,
    AbandonFill,
    CacheEffect,
    Fill,
    Forgotten,
    ImageUse,
    ModelCache,
    NotifyInstance,
    State,
)
from memory.pages import NoPages, count_pages

A, B = InstanceId("decode-0"), InstanceId("prefill-0")
NAMES = [ModelId(name) for name in "klmnopqr"]
K, L, M, N = NAMES[:4]
LATER_NS = 2 * ONE_USE_NS


class Books:
    """A cache without instances, whose fills end at once unless they are to be watched."""

    def __init__(self, capacity: int, **counts: int) -> None:
        self.cache = ModelCache(capacity)
        self.now_ns = 0
        for model, count in counts.items():
            self.end_fills(self.added(ModelId(model), count))

    def added(self, model: ModelId, count: int, *, pinned: bool = False) -> list[CacheEffect]:
        effects = self.cache.add(model, count, pinned=pinned)
        assert not isinstance(effects, NoPages)
        self.cache.check()
        return effects

    def use(self, *models: ModelId) -> None:
        """Each, one after the other, far enough apart to count."""
        for model in models:
            self.now_ns += LATER_NS
            self.end_fills(self.cache.use(model, self.now_ns))

    def end_fills(self, effects: list[CacheEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Fill):
                self.end_fills(self.cache.filled(effect.model))
        self.cache.check()

    def cached(self) -> set[ModelId]:
        return {model for model in NAMES if model in self.cache and self.cache.state(model) is State.CACHED}


def test_images_come_in_as_long_as_there_is_room_and_instances_learn_where_they_lie() -> None:
    cache = ModelCache(5)
    cache.join(A)
    fills = [effect for model in (K, L, M) for effect in cache.add(model, 2)]  # type: ignore[union-attr]
    assert fills == [Fill(K, (PageRun(0, 2),)), Fill(L, (PageRun(2, 4),))]
    assert cache.filled(K) == [NotifyInstance(A, ImageCached(K, (PageRun(0, 2),)))]
    assert cache.join(B) == [NotifyInstance(B, ImageCached(K, (PageRun(0, 2),)))]
    assert [tell.instance for tell in cache.filled(L) if isinstance(tell, NotifyInstance)] == [A, B]
    assert cache.accounts() == {"free": 1, "filling": 0, "cached": 4, "evicting": 0}
    assert cache.images()[L] == ImageUse(State.CACHED, 2, pinned=False)
    assert cache.images()[M] == ImageUse(State.ABSENT, 2, pinned=False)


def test_an_extent_is_taken_again_only_when_every_instance_has_answered() -> None:
    books = Books(2, k=2, l=2)
    books.cache.join(A)
    books.cache.join(B)
    assert books.cache.use(L, 0) == [NotifyInstance(A, EvictImage(K)), NotifyInstance(B, EvictImage(K))]
    assert books.cache.evicted(K, B) == []
    assert books.cache.evicted(K, A) == [Fill(L, (PageRun(0, 2),))]


def test_a_lost_instance_has_answered() -> None:
    books = Books(2, k=2, l=2)
    books.cache.join(A)
    books.cache.use(L, 0)
    assert books.cache.lost(A) == [Fill(L, (PageRun(0, 2),))]
    assert books.cache.join(A) == []


def test_the_least_recently_used_leaves_first() -> None:
    books = Books(3, k=1, l=1, m=1, n=1)
    books.use(L, K, M, N)
    assert books.cached() == {K, L, M}
    books.use(N)
    assert books.cached() == {K, M, N}


def test_what_was_used_since_the_missing_one_was_used_before_stays() -> None:
    books = Books(3, k=1, l=1, m=1, n=1)
    books.use(K, L, M, N, K, L, N)
    assert books.cached() == {K, L, N}


def test_what_is_asked_for_once_drives_nobody_out() -> None:
    books = Books(3, k=1, l=1, m=1, n=1, o=1, p=1)
    books.use(K, L, M)
    books.use(*NAMES[3:6])
    assert books.cached() == {K, L, M}
    for _ in range(4):
        books.use(K, L, M, N)
    assert books.cached() == {K, L, M}
    assert books.cache.counters.refused == 7


def test_a_burst_is_one_use() -> None:
    books = Books(1, k=1, l=1)
    books.use(K)
    for nth in range(10):
        books.end_fills(books.cache.use(L, books.now_ns + 1 + nth * ONE_USE_NS // 10))
    assert books.cached() == {K}
    books.use(L)
    assert books.cached() == {L}


def test_an_image_nobody_ever_used_makes_room_at_once() -> None:
    books = Books(1, k=1, l=1)
    books.use(L)
    assert books.cached() == {L}


def test_nobody_leaves_if_that_would_not_suffice() -> None:
    books = Books(4, k=2, l=2, m=5)
    books.use(M, M, M)
    assert books.cached() == {K, L}
    assert books.cache.counters.evictions == 0


def test_a_pinned_image_makes_room_and_stays() -> None:
    books = Books(4, k=2, l=2)
    books.end_fills(books.added(M, 2, pinned=True))
    assert M in books.cached()
    for _ in range(3):
        books.use(K, L)
    assert M in books.cached()
    assert books.cache.add(N, 3, pinned=True) == NoPages(3, 2)
    assert N not in books.cache
    books.end_fills(books.added(N, 2, pinned=True))
    assert books.cached() == {M, N}


def test_a_pinned_image_comes_in_once_those_in_its_way_may_leave() -> None:
    """As when a server starts: images that were added before it fill the cache."""
    cache = ModelCache(4)
    cache.join(A)
    cache.add(K, 2)
    cache.add(L, 2)
    assert cache.add(M, 3, pinned=True) == [], "nothing can leave: both are being filled"
    assert cache.filled(K) == [NotifyInstance(A, ImageCached(K, (PageRun(0, 2),)))], "that alone is too little"
    assert cache.filled(L)[1:] == [NotifyInstance(A, EvictImage(K)), NotifyInstance(A, EvictImage(L))]
    cache.evicted(K, A)
    assert cache.evicted(L, A) == [Fill(M, (PageRun(0, 3),))]
    assert cache.counters.refused == 0, "nobody asked for it"
    assert cache.unfillable(M) == [], "it is not read again and again"
    cache.use(K, 0)
    assert cache.filled(K) == [NotifyInstance(A, ImageCached(K, (PageRun(0, 2),)))], "nor does anything leave for it"
    assert cache.use(M, 0) == [NotifyInstance(A, EvictImage(K))], "but for its next use"
    cache.check()


def test_a_pinned_image_whose_fill_failed_comes_in_after_a_use_that_was_too_early() -> None:
    cache = ModelCache(4)
    cache.add(M, 3, pinned=True)
    cache.unfillable(M)
    cache.add(K, 2)
    assert cache.use(M, 0) == [], "K is being filled"
    assert cache.filled(K) == [Fill(M, (PageRun(0, 3),))]
    cache.check()


def test_an_image_is_pinned_later_and_let_go_again() -> None:
    books = Books(4, k=2, l=2, m=2)
    effects = books.cache.pin(M)
    assert not isinstance(effects, NoPages)
    books.end_fills(effects)
    books.use(K, L, K, L)
    assert M in books.cached()
    books.end_fills(books.added(N, 4))
    assert books.cache.pin(N) == NoPages(4, 2)
    books.cache.unpin(M)
    books.use(K, L, K, L)
    assert books.cached() == {K, L}


def test_an_unloaded_image_leaves_and_comes_back_with_its_next_use() -> None:
    books = Books(4, k=2, l=2)
    books.cache.join(A)
    assert books.cache.unload(K) == [NotifyInstance(A, EvictImage(K))]
    assert books.cache.evicted(K, A) == []
    assert books.cached() == {L} and books.cache.accounts()["free"] == 2
    assert books.cache.unload(K) == [], "it has left"
    books.use(K)
    assert books.cached() == {K, L}
    assert books.cache.counters.evictions == 0, "nobody took its room"


@pytest.mark.parametrize("wanted", [False, True])
def test_an_image_unloaded_while_it_is_filled_leaves_then_unless_it_is_wanted_again(wanted: bool) -> None:
    cache = ModelCache(2)
    cache.join(A)
    cache.add(K, 2)
    assert cache.unload(K) == []
    if wanted:
        assert cache.use(K, 0) == []
        assert cache.filled(K) == [NotifyInstance(A, ImageCached(K, (PageRun(0, 2),)))]
        return
    assert cache.filled(K) == [], "nobody is told of it"
    assert cache.state(K) is State.ABSENT
    assert cache.use(K, 0) == [Fill(K, (PageRun(0, 2),))]
    assert isinstance(cache.filled(K)[0], NotifyInstance), "it was asked for once"


def test_an_image_unloaded_while_it_is_filled_stays_where_it_is_pinned() -> None:
    cache = ModelCache(2)
    cache.add(K, 2)
    cache.unload(K)
    cache.pin(K)
    cache.filled(K)
    assert cache.state(K) is State.CACHED


def test_an_image_unloaded_while_it_waits_gives_its_place_to_the_next() -> None:
    books = Books(3, k=1, l=1, o=1, m=2, n=1)
    books.cache.join(A)
    books.cache.use(M, 0)
    books.cache.use(N, 0)
    assert books.cache.evicted(K, A) == []
    assert books.cache.unload(M) == [Fill(N, (PageRun(0, 1),))]


def test_a_model_dropped_while_it_is_filled_is_forgotten_when_the_fill_has_ended() -> None:
    cache = ModelCache(2)
    cache.join(A)
    cache.add(K, 2)
    assert cache.drop(K) == [AbandonFill(K)]
    assert cache.filled(K) == [Forgotten(K)]
    cache.add(K, 2)
    cache.drop(K)
    assert cache.unfillable(K) == [Forgotten(K)]
    assert cache.counters.failed_fills == 0


def test_a_model_dropped_while_it_waits_gives_its_place_to_the_next() -> None:
    books = Books(3, k=1, l=1, o=1, m=2, n=1)
    books.cache.join(A)
    books.cache.use(M, 0)
    books.cache.use(N, 0)
    assert books.cache.evicted(K, A) == []
    assert books.cache.drop(M) == [Forgotten(M), Fill(N, (PageRun(0, 1),))]


def test_an_image_used_while_it_leaves_goes_and_may_come_back() -> None:
    books = Books(2, k=1, l=2)
    books.cache.join(A)
    books.use(L, K)
    assert books.cache.state(K) is State.EVICTING
    assert books.cache.evicted(K, A) == [Fill(L, (PageRun(0, 2),))]
    books.cache.filled(L)
    books.use(K)
    assert books.cache.state(L) is State.EVICTING


def test_what_cannot_be_read_leaves_its_room() -> None:
    cache = ModelCache(1)
    cache.add(K, 1)
    assert cache.unfillable(K) == []
    assert cache.counters.failed_fills == 1
    assert cache.add(L, 1) == [Fill(L, (PageRun(0, 1),))]


class Node(RuleBasedStateMachine):
    """Instances that load, answer late and die; an owner that adds, uses, drops. The extents hold who filled them."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 7
        self.cache = ModelCache(self.capacity)
        self.now_ns = 0
        self.counts: dict[ModelId, int] = {}
        self.dropped: set[ModelId] = set()
        self.filling: dict[ModelId, tuple[PageRun, ...]] = {}
        self.known: dict[InstanceId, dict[ModelId, tuple[PageRun, ...]]] = {}
        self.asked: dict[InstanceId, list[ModelId]] = {}
        self.content: list[ModelId | None] = [None] * self.capacity

    def take(self, effects: list[CacheEffect]) -> None:
        for effect in effects:
            match effect:
                case Fill(model, extents):
                    assert model not in self.filling and count_pages(extents) == self.counts[model]
                    self.filling[model] = extents
                    self.write(model, extents)
                case AbandonFill(model):
                    assert model in self.filling
                case NotifyInstance(instance, ImageCached(model, extents)):
                    assert model not in self.known[instance]
                    self.known[instance][model] = extents
                case NotifyInstance(instance, EvictImage(model)):
                    self.asked[instance].append(model)
                case Forgotten(model):
                    self.dropped.remove(model)
                    del self.counts[model]
                    assert all(model not in known for known in self.known.values())

    def write(self, model: ModelId, extents: tuple[PageRun, ...]) -> None:
        for start, stop in extents:
            self.content[start:stop] = [model] * (stop - start)

    @rule(model=st.sampled_from(NAMES), count=st.integers(1, 8), pinned=st.booleans())
    def add(self, model: ModelId, count: int, pinned: bool) -> None:
        if model not in self.counts:
            effects = self.cache.add(model, count, pinned=pinned)
            if not isinstance(effects, NoPages):
                self.counts[model] = count
                self.take(effects)

    @precondition(lambda self: self.counts.keys() - self.dropped)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.counts.keys() - self.dropped)))
        self.now_ns += data.draw(st.sampled_from([0, LATER_NS]))
        self.take(self.cache.use(model, self.now_ns))

    @precondition(lambda self: self.counts.keys() - self.dropped)
    @rule(data=st.data(), pinned=st.booleans())
    def pin_or_unpin(self, data: st.DataObject, pinned: bool) -> None:
        model = data.draw(st.sampled_from(sorted(self.counts.keys() - self.dropped)))
        if not pinned:
            self.cache.unpin(model)
        elif self.cache.state(model) is not State.EVICTING:
            effects = self.cache.pin(model)
            self.take([] if isinstance(effects, NoPages) else effects)

    @precondition(lambda self: self.counts.keys() - self.dropped)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.counts.keys() - self.dropped)))
        if not self.cache.pinned(model):
            self.take(self.cache.unload(model))

    @precondition(lambda self: self.counts.keys() - self.dropped)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.counts.keys() - self.dropped)))
        self.dropped.add(model)
        self.take(self.cache.drop(model))

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), well=st.booleans())
    def end_fill(self, data: st.DataObject, well: bool) -> None:
        model = data.draw(st.sampled_from(sorted(self.filling)))
        del self.filling[model]
        self.take(self.cache.filled(model) if well else self.cache.unfillable(model))

    @rule(instance=st.sampled_from([A, B]))
    def come_or_go(self, instance: InstanceId) -> None:
        if instance in self.known:
            del self.known[instance], self.asked[instance]
            self.take(self.cache.lost(instance))
        else:
            self.known[instance], self.asked[instance] = {}, []
            self.take(self.cache.join(instance))

    @precondition(lambda self: any(self.asked.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        instance, model = data.draw(st.sampled_from([(i, m) for i, asked in self.asked.items() for m in asked]))
        self.asked[instance].remove(model)
        del self.known[instance][model]
        self.take(self.cache.evicted(model, instance))

    @invariant()
    def laws_hold(self) -> None:
        self.cache.check()

    @invariant()
    def what_an_instance_may_load_is_there(self) -> None:
        for known in self.known.values():
            for model, extents in known.items():
                assert all(self.content[start:stop] == [model] * (stop - start) for start, stop in extents)


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("law", ["I1", "I2", "I3", "I4", "I5"])
def test_check_finds_what_is_broken(law: str) -> None:
    books = Books(4, k=2, l=2, m=3)
    cache = books.cache
    cache.join(A)
    match law:
        case "I1":
            cache._images[K].extents = ()
        case "I2":
            cache._waiting.append(M)
        case "I3":
            books.end_fills(cache.drop(K))
            cache.evicted(K, A)
            cache._images[M].count = 2
            cache._waiting.append(M)
        case "I4":
            cache.drop(K)
            cache._images[K].answers.clear()
        case "I5":
            cache.drop(K)
            cache._images[K].dropped, cache._images[K].pinned = False, True
    with pytest.raises(LawBroken, match=law):
        cache.check()
