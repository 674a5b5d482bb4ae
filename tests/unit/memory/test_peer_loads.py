"""Loads over peers' links in the books: who is asked, what is lent, and that it comes back."""

from __future__ import annotations

import random
from collections import deque

import pytest

from aegis.core.effects import AbandonLoad, LoadWeights, PeerWords, RemoteLoad, Send, StageImage, StreamName
from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import (
    CarryBegan,
    CarryImage,
    CarryOver,
    FromInstance,
    GrantPages,
    ImageCached,
    LoadOver,
    NeedLinks,
    NeedPages,
    PeerReady,
    ToInstance,
)
from aegis.core.model import LEAST_PIECES, PEERS_MAX, PIECE_BYTES, PLACES
from aegis.core.request import EventHandle
from aegis.sim.faults.fake_models import PAGE, make_spec
from memory.budget import Budget
from memory.ledger import Ledger
from memory.pages import NoPages
from memory.peers.links import ForLinks, PeerLinks
from tests.long_forms import first_of

LENT = PLACES * PIECE_BYTES // PAGE
IMAGE = LEAST_PIECES * PIECE_BYTES // PAGE + 1
SPECS = [make_spec(i, image_pages=pages, block_bytes=PAGE) for i, pages in enumerate((IMAGE, IMAGE + 3, IMAGE - 1))]
LARGE, LARGER, SMALL = (spec.model for spec in SPECS)
PAGES = 2 * IMAGE + 3 + LENT
BUDGET = Budget(pages=PAGES, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=1, instances=4)
CACHED = (PageRun(0, IMAGE + 3),)
TARGET = InstanceId("mixed-9")


def ledger_of(at: int = 0, *, shares: bool = True, pages: int = PAGES) -> Ledger:
    words = {name: at * len(StreamName) + i for i, name in enumerate(StreamName)}
    peer_words = PeerWords(tuple((1000 + at,) for _ in range(PEERS_MAX)), 2000 + at) if shares else None
    ledger = Ledger(BUDGET, words, address_pages=10 * PAGES, peer_words=peer_words)
    ledger.balloon.granted(GrantPages((PageRun(0, pages),)))
    for spec in SPECS:
        ledger.add_model(spec)
        ledger.on_message(ImageCached(spec.model, CACHED))
    ledger.drain()
    return ledger


def sent(ledger: Ledger) -> list[FromInstance]:
    return [effect.message for effect in ledger.drain() if isinstance(effect, Send)]


def carry(load: int = 1, peer: int = 0) -> CarryImage:
    return CarryImage(TARGET, EventHandle(77, load), peer, 5 * PAGE, CACHED, (3, 4, 5))


def test_a_demanded_load_begins_at_once_and_asks_for_links() -> None:
    ledger = ledger_of()
    event = ledger.load(LARGE, [])
    assert not isinstance(event, NoPages)
    _, load, asks = ledger.drain()
    assert load == LoadWeights(StreamName.WEIGHTS, LARGE, event, CACHED, True)
    assert asks == Send(NeedLinks(event, IMAGE * PAGE - 5, CACHED, tuple((1000,) for _ in range(PEERS_MAX))))
    ledger.progress(StreamName.WEIGHTS, event.value)
    assert sent(ledger) == [LoadOver(event)]


@pytest.mark.parametrize("why", ["prefetch", "small", "not cached", "off"])
def test_other_loads_ask_for_none(why: str) -> None:
    ledger = ledger_of(shares=why != "off")
    if why == "not cached":
        ledger._cached.clear()
    ledger.load(SMALL if why == "small" else LARGE, [], prefetch=why == "prefetch")
    [load] = [effect for effect in ledger.drain() if isinstance(effect, LoadWeights)]
    assert not load.shared
    ledger.progress(load.stream, 1)
    assert sent(ledger) == []


def test_a_peer_joins_a_load_that_has_not_ended() -> None:
    ledger = ledger_of()
    event = ledger.load(LARGE, [])
    assert not isinstance(event, NoPages)
    ledger.drain()
    ready = PeerReady(event, 2, InstanceId("other"), "there", (PageRun(1, 13),), 8)
    ledger.on_message(ready)
    assert ledger.drain() == [RemoteLoad(event, 2, InstanceId("other"), "there", (PageRun(1, 13),), 8)]
    ledger.progress(StreamName.WEIGHTS, event.value)
    ledger.drain()
    ledger.on_message(ready)
    assert ledger.drain() == []


def test_free_pages_are_lent_and_come_back() -> None:
    ledger = ledger_of()
    ledger.on_message(carry())
    stage, began = ledger.drain()
    assert isinstance(stage, StageImage) and (stage.load, stage.requests) == (EventHandle(77, 1), (3, 4, 5))
    assert began == Send(CarryBegan(TARGET, EventHandle(77, 1), 0, stage.runs, 2000))
    assert sum(run.pages for run in stage.runs) == ledger.accounts()["device_pages_lent"] == LENT
    assert ledger.pool.free == PAGES - LENT
    ledger.check()
    ledger.progress(StreamName.RELAY, 1)
    assert sent(ledger) == [CarryOver(TARGET, EventHandle(77, 1))]
    assert ledger.pool.free == PAGES and ledger.accounts()["device_pages_lent"] == 0
    ledger.check()


def test_who_loads_itself_carries_nothing() -> None:
    ledger = ledger_of()
    event = ledger.load(LARGE, [])
    assert not isinstance(event, NoPages)
    ledger.drain()
    ledger.on_message(carry())
    assert sent(ledger) == [CarryOver(TARGET, EventHandle(77, 1))]
    ledger.progress(StreamName.WEIGHTS, event.value)
    ledger.drain()
    ledger.on_message(carry(load=2))
    assert isinstance(ledger.drain()[0], StageImage)


def test_a_prefetch_keeps_nobody_from_carrying() -> None:
    ledger = ledger_of()
    ledger.load(LARGE, [], prefetch=True)
    ledger.drain()
    ledger.on_message(carry())
    assert isinstance(ledger.drain()[0], StageImage)


def test_who_carries_already_carries_nothing_else() -> None:
    ledger = ledger_of()
    ledger.on_message(carry())
    ledger.drain()
    ledger.on_message(carry(load=2))
    assert sent(ledger) == [CarryOver(TARGET, EventHandle(77, 2))]


def test_without_free_pages_it_asks_for_some_first() -> None:
    ledger = ledger_of(pages=LENT - 1)
    ledger.on_message(carry())
    assert sent(ledger) == [NeedPages(1, urgent=False)]
    ledger.on_message(carry(load=2))
    assert sent(ledger) == [CarryOver(TARGET, EventHandle(77, 2))]
    ledger.check()
    ledger.on_message(GrantPages((PageRun(LENT - 1, LENT),)))
    _, stage, began = ledger.drain()
    assert isinstance(stage, StageImage) and stage.load == EventHandle(77, 1)
    assert isinstance(began, Send) and isinstance(began.message, CarryBegan)
    ledger.check()


def test_where_the_device_has_no_pages_nothing_is_carried() -> None:
    ledger = ledger_of(pages=LENT - 1)
    ledger.on_message(carry())
    ledger.drain()
    ledger.on_message(GrantPages((), refused=True))
    assert sent(ledger) == [CarryOver(TARGET, EventHandle(77, 1))]
    ledger.on_message(carry(load=2))
    assert sent(ledger) == [CarryOver(TARGET, EventHandle(77, 2))]


def test_the_laws_see_pages_that_are_lent_twice_or_lost() -> None:
    ledger = ledger_of()
    ledger.on_message(carry())
    ledger._peers._runs = ledger._peers._runs[:-1]
    with pytest.raises(LawBroken, match=r"L1: 12 pages are booked for staging, 0 are lent"):
        ledger._peers.check()
    ledger = ledger_of()
    ledger.on_message(carry())
    ledger._peers._carried = None
    with pytest.raises(LawBroken, match="L2"):
        ledger.check()


# --- the node's account -----------------------------------------------------------------------------------------------


def links_of(devices: dict[str, str], most: int = PEERS_MAX) -> PeerLinks:
    links = PeerLinks(most)
    for instance, address in devices.items():
        links.join(InstanceId(instance), address)
    return links


def needs(load: int = 1) -> NeedLinks:
    return NeedLinks(EventHandle(77, load), 5 * PAGE, CACHED, tuple((at,) for at in range(PEERS_MAX)))


def asked(links: PeerLinks, instance: str, message: ForLinks) -> list[str]:
    return [receiver for receiver, _ in links.on_message(InstanceId(instance), message)]


def test_each_idle_device_is_asked_once_those_behind_the_target_first() -> None:
    links = links_of({"a": "0", "b": "1", "c": "2", "d": "2", "e": "3"})
    messages = links.on_message(InstanceId("b"), needs())
    assert [receiver for receiver, _ in messages] == ["c", "e", "a"]
    assert [message.requests for _, message in messages if isinstance(message, CarryImage)] == [(0,), (1,), (2,)]
    links.check()


def test_no_more_are_asked_than_the_peer_link_follows() -> None:
    assert asked(links_of({"a": "0", "b": "1", "c": "2"}, most=1), "a", needs()) == ["b"]
    assert asked(links_of({"a": "0", "b": "1", "c": "2"}, most=0), "a", needs()) == []


def test_devices_that_load_or_carry_are_not_idle_until_that_is_over() -> None:
    links = links_of({"a": "0", "b": "1", "c": "2"})
    assert asked(links, "a", needs()) == ["b", "c"]
    assert asked(links, "b", needs(2)) == []
    links.on_message(InstanceId("c"), CarryOver(InstanceId("a"), EventHandle(77, 1)))
    assert asked(links, "b", needs(3)) == ["c"]
    links.on_message(InstanceId("a"), LoadOver(EventHandle(77, 1)))
    links.on_message(InstanceId("c"), CarryOver(InstanceId("b"), EventHandle(77, 3)))
    assert asked(links, "b", needs(4)) == ["c", "a"]


def test_the_target_hears_of_a_peer_while_it_loads() -> None:
    links = links_of({"a": "0", "b": "1"})
    links.on_message(InstanceId("a"), needs())
    began = CarryBegan(InstanceId("a"), EventHandle(77, 1), 0, CACHED, 6)
    assert links.on_message(InstanceId("b"), began) == [
        (InstanceId("a"), PeerReady(EventHandle(77, 1), 0, InstanceId("b"), "1", CACHED, 6))
    ]
    links.on_message(InstanceId("a"), LoadOver(EventHandle(77, 1)))
    assert links.on_message(InstanceId("b"), began) == []


def test_of_a_lost_peer_the_word_is_told_by_which_it_staged() -> None:
    links = links_of({"a": "0", "b": "1"})
    assert links.lost(InstanceId("b")) is None
    links.join(InstanceId("b"), "1")
    links.on_message(InstanceId("a"), needs())
    links.on_message(InstanceId("b"), CarryBegan(InstanceId("a"), EventHandle(77, 1), 0, CACHED, 6))
    assert links.lost(InstanceId("b")) == 6
    assert links.lost(InstanceId("b")) is None
    assert links.on_message(InstanceId("b"), needs()) == []
    links.check()


# --- all of it --------------------------------------------------------------------------------------------------------


class Market:
    """Ledgers on devices of their own around the node's account; messages arrive late, in order of each pair."""

    def __init__(self, rng: random.Random, instances: int) -> None:
        self.rng, self.links = rng, PeerLinks(rng.randint(0, 3))
        self.ledgers: dict[InstanceId, Ledger] = {}
        self.to: dict[InstanceId, deque[ToInstance]] = {}
        self.out: dict[InstanceId, deque[FromInstance]] = {}
        self.submitted: dict[InstanceId, dict[StreamName, int]] = {}
        self.over: dict[EventHandle, bool] = {}
        self.waits: dict[InstanceId, list[tuple[EventHandle, EventHandle]]] = {}  # relays, and the loads they wait for
        self.number = 0
        for at in range(instances):
            self.start(InstanceId(f"mixed-{at}"))

    def start(self, name: InstanceId) -> None:
        self.number += 1
        self.ledgers[name] = ledger_of(self.number, pages=self.rng.choice((PAGES, IMAGE + 3 + LENT)))
        self.to[name], self.out[name], self.waits[name] = deque(), deque(), []
        self.links.join(name, name)

    def act(self) -> None:
        name = self.rng.choice(sorted(self.ledgers))
        ledger = self.ledgers[name]
        for action in self.rng.sample([self.load, self.deliver, self.hear, self.end, self.abandon, self.die], 6):
            if action(name, ledger):
                break
        self.perform(name)
        self.links.check()
        for each in self.ledgers.values():
            each.check()

    def load(self, name: InstanceId, ledger: Ledger) -> bool:
        model = self.rng.choice((LARGE, LARGER, SMALL))
        if ledger.weights.loading() or ledger.weights.is_resident(model):
            return False
        return not isinstance(ledger.load(model, [*ledger.weights.resident()]), NoPages)

    def deliver(self, name: InstanceId, ledger: Ledger) -> bool:
        if not self.to[name]:
            return False
        message = self.to[name].popleft()
        assert isinstance(message, CarryImage | PeerReady | GrantPages)
        ledger.on_message(message)
        return True

    def hear(self, name: InstanceId, ledger: Ledger) -> bool:
        if not self.out[name]:
            return False
        message = self.out[name].popleft()
        if isinstance(message, NeedPages):
            self.to[name].append(GrantPages((), refused=True))
        elif isinstance(message, ForLinks):
            for receiver, answer in self.links.on_message(name, message):
                self.to[receiver].append(answer)
        return True

    def end(self, name: InstanceId, ledger: Ledger) -> bool:
        for _, event in ledger.weights.loading():
            self.over[event] = True
            ledger.progress(StreamName.WEIGHTS, event.value)
            return True
        for relay, load in [wait for wait in self.waits[name] if self.over.get(wait[1])]:
            self.waits[name].remove((relay, load))
            ledger.progress(StreamName.RELAY, relay.value)
            return True
        return False

    def abandon(self, name: InstanceId, ledger: Ledger) -> bool:
        wanted = [model for model, _ in ledger.weights.loading() if not ledger.weights.is_abandoned(model)]
        if wanted:
            ledger.abandon(wanted[0])
        return bool(wanted)

    def die(self, name: InstanceId, ledger: Ledger) -> bool:
        if self.rng.random() > 0.02:
            return False
        self.over.update({event: True for _, event in ledger.weights.loading()})
        self.links.lost(name)
        self.start(name)
        return True

    def perform(self, name: InstanceId) -> None:
        for effect in self.ledgers[name].drain():
            match effect:
                case Send(message):
                    self.out[name].append(message)
                case StageImage(load=load, event=event):
                    self.waits[name].append((event, load))
                case RemoteLoad(load):
                    assert not self.over.get(load) and load in [e for _, e in self.ledgers[name].weights.loading()]
                case AbandonLoad():
                    pass

    def settle(self) -> None:
        """Everything ends, in some order."""
        while any(
            [
                action(name, ledger)
                for name, ledger in self.ledgers.items()
                for action in (self.end, self.deliver, self.hear)
            ]
        ):
            for name in self.ledgers:
                self.perform(name)


@pytest.mark.parametrize("seed", first_of(20, range(60)))
def test_whatever_happens_lent_pages_come_back_and_links_are_idle_again(seed: int) -> None:
    market = Market(random.Random(seed), 2 + seed % 4)
    for _ in range(400):
        market.act()
    market.settle()
    assert not market.links._carrying and not any(market.links._loading.values())
    for ledger in market.ledgers.values():
        ledger.check()
        assert ledger.accounts()["device_pages_lent"] == 0


def test_harsh_markets_share_loads() -> None:
    """Otherwise the test above would show nothing."""
    joined = 0
    for seed in range(10):
        market = Market(random.Random(seed), 4)
        for _ in range(200):
            market.act()
        joined += len({load for waits in market.waits.values() for _, load in waits})
    assert joined > 0
