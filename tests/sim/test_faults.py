"""Seeds of faulty markets keep every law, and break one as soon as the code is broken; `make test-faults-sim` plays
many more of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aegis.core.clock import NS_PER_MS
from aegis.core.effects import Send
from aegis.core.messages import KvReleased, ReleaseKv
from aegis.sim.faults import seed_runs
from aegis.sim.faults.plan import EVERY, Kind
from aegis.sim.faults.random_scenarios import faulty_scenario_of
from aegis.sim.faults.seed_runs import run_to_end
from aegis.sim.faults.world import World
from decode.core import DecodeCore
from decode.hand_overs import HandOvers
from decode.kv_swap import KvSwap
from memory.balloon import Balloon
from memory.handed_kv import HandedKv
from memory.kept_prefixes import KeptPrefixes
from memory.ledger import Ledger
from memory.prefix_offers import PrefixOffers
from memory.slab_leases import SlabLeases
from memory.slab_pool import SlabPool
from proxy.routing.events import InstanceDown
from proxy.routing.moves import Moves
from proxy.routing.router import Router
from tests.long_forms import first_of
from tests.sim.starvation import WatchedDecodeCore, WatchedPrefillCore

CHUNK = 25
FEW = 150
TELLING = (98, 100, 44, 31, 26, 200)
"""Seeds that break what few others do."""
CRASHES = frozenset({Kind.CRASH, Kind.SLOW, Kind.DELAY})

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("first", first_of(1, range(0, 150, CHUNK)))
def test_no_seed_breaks_a_law(first: int) -> None:
    assert seed_runs.broken_seeds(range(first, first + CHUNK)) == []


def test_a_peer_is_not_forgotten_with_the_one_that_came_after_it() -> None:
    """Seed 2555: who hands over KV is lost, comes up again and hands over more; that others are to forget it arrives
    last."""
    assert seed_runs.broken_seeds([2555]) == []


def test_what_was_kept_is_read_at_the_readers_own_risk_also_when_it_is_no_longer_kept() -> None:
    """Seed 2687: a prompt's kept KV is given up between the lookup and the copy, and its slab changes hands twice."""
    assert seed_runs.broken_seeds([2687]) == []


@pytest.mark.parametrize("kind", first_of(2, list(Kind)))
def test_each_kind_alone_breaks_no_law(kind: Kind) -> None:
    assert seed_runs.broken_seeds(range(6), frozenset({kind})) == []


@pytest.mark.parametrize("seed", first_of(12, range(24)))
def test_nobody_starves_whoever_dies_leaves_or_fails(seed: int) -> None:
    """Where processes and copies are as fast as they say."""
    kinds = frozenset({Kind.CRASH, Kind.LEAVE, Kind.REMOVE, Kind.STEP, Kind.TWICE, Kind.DELAY, Kind.REORDER})
    setup, scenario = faulty_scenario_of(seed, kinds)
    if setup.recipe.name.startswith("least-slack"):
        world = World(replace(scenario, decode_core=WatchedDecodeCore, prefill_core=WatchedPrefillCore), seed)
        run_to_end(world)


def test_a_seed_is_played_again_to_the_byte() -> None:
    for seed in range(4):
        assert seed_runs.run_seed(seed).log == seed_runs.run_seed(seed).log


def test_faults_of_every_kind_happen() -> None:
    plans = [faulty_scenario_of(seed, EVERY)[1].plan for seed in range(40)]
    assert {kind for plan in plans for kind in plan.kinds} == EVERY
    for number in range(8):
        some, every = (faulty_scenario_of(number, kinds)[1].plan for kinds in (frozenset({Kind.CRASH}), EVERY))
        assert some.kinds == {Kind.CRASH} and (Kind.CRASH not in every.kinds or some.crashes == every.crashes)


def test_what_happened_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandedKv, "release", lambda *_: None)
    found = seed_runs.broken_seeds(range(8), events=5)
    assert found and all(len(one.events) == 5 for one in found)
    assert found == seed_runs.broken_seeds(range(8), events=5)


def _skips(owner: type, name: str, answer: Any = None) -> Patch:
    return lambda patch: patch.setattr(owner, name, lambda self, *_, **__: answer)


def _doubles(owner: type, name: str) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        once = getattr(owner, name)

        def twice(self: Any, *arguments: Any) -> Any:
            once(self, *arguments)
            return once(self, *arguments)

        patch.setattr(owner, name, twice)

    return apply


def _deaf_to_attempts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Router, "_current", lambda self, request, attempt: self._sessions.get(request))


def _silent_about_kv(patch: pytest.MonkeyPatch) -> None:
    on = DecodeCore.on

    def mute(self: DecodeCore, *arguments: Any) -> Any:
        effects = on(self, *arguments)
        return [each for each in effects if not (isinstance(each, Send) and isinstance(each.message, KvReleased))]

    patch.setattr(DecodeCore, "on", mute)


def _keeps_what_moved(patch: pytest.MonkeyPatch) -> None:
    on = HandOvers.on_message
    patch.setattr(HandOvers, "on_message", lambda self, event: isinstance(event, ReleaseKv) or on(self, event))


def _too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a transfer still touches are handed out."""
    patch.setattr(SlabPool, "free_after", lambda self, shape, blocks, event: self.free(shape, blocks))


def _orphans_at_once(patch: pytest.MonkeyPatch) -> None:
    """Slabs of a lost instance are leased anew, whoever reads from them."""
    lost = SlabLeases.lost

    def forget(self: SlabLeases, instance: Any) -> Any:
        lost(self, instance)
        self._orphans[instance].answers.clear() if instance in self._orphans else None
        return self._settle()

    patch.setattr(SlabLeases, "lost", forget)


def _under_the_writer(patch: pytest.MonkeyPatch) -> None:
    """What is to be written to is given away like anything that is kept."""
    release = KeptPrefixes.release

    def all_of_them(self: KeptPrefixes, count: int) -> Any:
        for slab in self._slabs.values():
            slab.writers = 0
        return release(self, count)

    patch.setattr(KeptPrefixes, "idle", property(lambda self: self.slabs))
    patch.setattr(KeptPrefixes, "release", all_of_them)


def _images_too_early(patch: pytest.MonkeyPatch) -> None:
    let_go = Ledger._let_images_go

    def at_once(self: Ledger) -> None:
        loading, self.weights._loading = self.weights._loading, {}
        let_go(self)
        self.weights._loading = loading

    patch.setattr(Ledger, "_let_images_go", at_once)


def _unwiped(patch: pytest.MonkeyPatch) -> None:
    leave = Balloon._leave
    patch.setattr(Balloon, "_leave", lambda self, number, clean, dirty: leave(self, number, clean + dirty, ()))


def _before_the_proxy_knows(patch: pytest.MonkeyPatch) -> None:
    """Instances go on from the KV of one that is lost while the proxy still believes what they say."""

    def at_once(self: World, process: Any, absent_ns: int, for_good: bool) -> None:
        del self.instances[process.instance]
        self.lost.append(process)
        self._part(process, absent_ns + 60 * NS_PER_MS, for_good)
        self.inform(InstanceDown(process.instance))

    patch.setattr(World, "_notice", at_once)


@pytest.mark.parametrize(
    ("spoil", "kinds"),
    [
        pytest.param(_skips(HandedKv, "release"), EVERY, id="handed KV is not freed"),
        pytest.param(_keeps_what_moved, {Kind.MOVE}, id="KV that moved away is not freed"),
        pytest.param(_skips(HandOvers, "take_back"), {Kind.MOVE, Kind.CRASH}, id="nobody takes its own KV back"),
        pytest.param(_skips(Router, "_handed_over"), {Kind.MOVE}, id="who was handed over goes on nowhere"),
        pytest.param(_skips(Moves, "left"), {Kind.MOVE}, id="moves never end"),
        pytest.param(_silent_about_kv, EVERY, id="adopted KV is not released"),
        pytest.param(_skips(Router, "_release"), EVERY, id="releases are not passed on"),
        pytest.param(_doubles(Router, "_deliver"), EVERY, id="tokens are delivered twice"),
        pytest.param(_deaf_to_attempts, {Kind.CRASH, Kind.DELAY}, id="attempts are not told apart"),
        pytest.param(_skips(Router, "_down"), EVERY, id="lost requests are not replayed"),
        pytest.param(_skips(DecodeCore, "_forget"), EVERY, id="peers are not forgotten"),
        pytest.param(_skips(KvSwap, "reads_from", False), CRASHES, id="peers are forgotten too early"),
        pytest.param(_orphans_at_once, CRASHES, id="orphaned slabs are leased at once"),
        pytest.param(_too_early, EVERY, id="blocks are freed under a transfer"),
        pytest.param(_unwiped, EVERY, id="pages are not wiped"),
        pytest.param(_skips(Ledger, "_let_images_go"), EVERY, id="images are not let go of"),
        pytest.param(_images_too_early, {Kind.SLOW}, id="images are let go of too early"),
        pytest.param(_skips(KeptPrefixes, "intact", True), EVERY, id="what was kept is never gone"),
        pytest.param(_skips(PrefixOffers, "progress"), EVERY, id="nobody says that it was kept"),
        pytest.param(_skips(KeptPrefixes, "lost"), CRASHES, id="who was lost writes for ever"),
        pytest.param(
            _under_the_writer, CRASHES | {Kind.MEMORY, Kind.SLOW}, id="slabs are leased while they are written"
        ),
        pytest.param(_before_the_proxy_knows, CRASHES | {Kind.REORDER}, id="losses are told before the proxy knows"),
    ],
)
def test_broken_code_is_found(spoil: Patch, kinds: frozenset[Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    assert any(seed_runs.broken_seeds([seed], frozenset(kinds)) for seed in (*TELLING, *range(FEW)))
