"""Copies that the links of other devices carry parts of: how long they take, and what they do to others."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from aegis.core.copy_order import NOW, WEIGHTS
from aegis.core.effects import LoadWeights, StageImage, StreamName
from aegis.core.ids import ModelId
from aegis.core.request import EventHandle
from aegis.policies import recipe
from aegis.sim.catalogue import models
from aegis.sim.copies import Links, Streams
from aegis.sim.event_queue import EventQueue
from aegis.sim.flows import Bus, Flow, Link
from aegis.sim.gpu_costs import GPUS, gpu
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Outcome, Pool, simulate
from aegis.sim.timeline_semaphores import TimelineSemaphores
from aegis.telemetry.spans import SpanKind

GB = 10**9
LONG = 1 << 60


class Stand:
    """Links of a byte per nanosecond on one bus. `ended` says when each copy did."""

    def __init__(self, links: int, *, bus: int = 0, overhead_ns: int = 0) -> None:
        self.agenda = EventQueue()
        shared = Bus(self.agenda, bus)
        self.links = [Link(shared, GB, overhead_ns=overhead_ns) for _ in range(links)]
        self.ended: dict[str, int] = {}

    def start(self, name: str, link: int, nbytes: int, urgency: int = WEIGHTS) -> Flow:
        return self.links[link].start(nbytes, partial(self._ended, name), urgency=urgency)

    def _ended(self, name: str, flow: Flow) -> None:
        self.ended[name] = self.agenda.now_ns


@pytest.mark.parametrize(("helpers", "takes_ns"), [(0, 1200), (1, 600), (2, 400), (3, 300)])
def test_a_copy_takes_as_long_as_all_links_together(helpers: int, takes_ns: int) -> None:
    stand = Stand(4)
    flow = stand.start("load", 0, 1200)
    for link in range(1, 1 + helpers):
        stand.links[link].help(flow, LONG)
    stand.agenda.run()
    assert stand.ended == {"load": takes_ns}
    assert all(not link.flows for link in stand.links)


def test_help_counts_from_when_it_comes() -> None:
    stand = Stand(2)
    flow = stand.start("load", 0, 1000)
    stand.agenda.at(400, stand.links[1].help, flow, LONG)
    stand.agenda.run()
    assert stand.ended == {"load": 700}


def test_help_that_comes_too_late_is_none() -> None:
    stand = Stand(2)
    flow = stand.start("load", 0, 1000)
    stand.agenda.at(1000, stand.links[1].help, flow, LONG)
    stand.agenda.run()
    assert stand.ended == {"load": 1000} and not stand.links[1].flows


def test_what_goes_on_from_a_helper_is_bounded() -> None:
    stand = Stand(2)
    stand.links[1].help(stand.start("load", 0, 1000), GB // 4)
    stand.agenda.run()
    assert stand.ended == {"load": 800}


def test_a_helpers_own_copies_come_first_and_lose_nothing() -> None:
    stand = Stand(2)
    stand.links[1].help(stand.start("load", 0, 1000), LONG)
    stand.agenda.at(100, stand.start, "own", 1, 300)
    stand.agenda.run()
    assert stand.ended == {"own": 400, "load": 100 + 300 + 250}


def test_a_copy_that_yields_is_carried_by_its_helpers() -> None:
    """Something more urgent has its own link meanwhile."""
    stand = Stand(2)
    stand.links[1].help(stand.start("load", 0, 1000), LONG)
    stand.agenda.at(100, stand.start, "kv", 0, 200, NOW)
    stand.agenda.run()
    assert stand.ended == {"kv": 300, "load": 100 + 200 + 300}


def test_helpers_may_end_a_copy_that_yields() -> None:
    stand = Stand(2)
    stand.links[1].help(stand.start("load", 0, 1000), LONG)
    stand.agenda.at(100, stand.start, "kv", 0, 5000, NOW)
    stand.agenda.run()
    assert stand.ended == {"load": 900, "kv": 5100}


def test_two_loads_may_help_each_other_and_do_not() -> None:
    """Their own copies come first."""
    stand = Stand(2)
    first, second = stand.start("first", 0, 1000), stand.start("second", 1, 400)
    stand.links[1].help(first, LONG)
    stand.links[0].help(second, LONG)
    stand.agenda.run()
    assert stand.ended == {"second": 400, "first": 400 + 300}


def test_help_goes_over_the_bus_too() -> None:
    stand = Stand(2, bus=GB)
    stand.links[1].help(stand.start("load", 0, 1000), LONG)
    stand.agenda.run()
    assert stand.ended == {"load": 1000}


def test_an_abandoned_copy_lets_its_helpers_go() -> None:
    stand = Stand(2)
    flow = stand.start("load", 0, 1000)
    stand.links[1].help(flow, LONG)
    stand.agenda.at(100, stand.links[0].stop, flow)
    stand.agenda.at(100, stand.start, "own", 1, 300)
    stand.agenda.run()
    assert stand.ended == {"load": 100, "own": 400}


def test_a_copy_is_helped_once_it_moves_bytes() -> None:
    stand = Stand(2, overhead_ns=50)
    stand.links[1].help(stand.start("load", 0, 1000), LONG)
    stand.agenda.run()
    assert stand.ended == {"load": 550}


@pytest.mark.parametrize("seed", range(40))
def test_all_bytes_are_carried_and_no_link_exceeds_its_rate(seed: int) -> None:
    """Whatever begins, helps and is hurried when: as many bytes as were asked for need that time at least."""
    rng, stand = random.Random(seed), Stand(3)
    flows: list[tuple[int, Flow]] = []
    asked = 0

    def begin(at: int) -> None:
        nonlocal asked
        nbytes, link = rng.randint(1, 500), rng.randrange(3)
        asked += nbytes
        flows.append((link, stand.start(f"{at}", link, nbytes, rng.choice((NOW, WEIGHTS)))))

    def help_one() -> None:
        link, flow = rng.choice(flows)
        other = rng.choice([each for each in range(3) if each != link])
        stand.links[other].help(flow, rng.choice((LONG, GB // 3)))

    for at in range(30):
        time_ns = rng.randint(0, 2000)
        stand.agenda.at(time_ns, begin, at)
        stand.agenda.at(time_ns + rng.randint(0, 300), help_one)
    stand.agenda.run()
    assert len(stand.ended) == 30 and all(not link.flows and link._helps == 0 for link in stand.links)
    assert all(flow.left <= 0 for _, flow in flows)
    assert 3 * max(stand.ended.values()) >= asked


def test_a_stream_is_helped_with_a_copy_that_waits_for_its_turn() -> None:
    stand = Stand(2)
    semaphores = TimelineSemaphores()
    ended: list[tuple[StreamName, int]] = []
    to_host = Link(stand.links[0].bus, GB)
    streams = Streams(
        semaphores,
        Links(stand.links[0], to_host),
        done=lambda copy: ended.append((copy.stream, stand.agenda.now_ns)),
    )
    first, second = EventHandle(0, 1), EventHandle(0, 2)
    for event in (first, second):
        streams.load(LoadWeights(StreamName.WEIGHTS, ModelId("m"), event), 1000)
    streams.stage(StageImage(second, 1000, (), (), (), EventHandle(5, 1)))
    streams.help(second, stand.links[1], LONG)
    stand.agenda.run()
    assert ended[:2] == [(StreamName.WEIGHTS, 1000), (StreamName.WEIGHTS, 1500)]
    assert ended[2] == (StreamName.RELAY, 1500)
    assert semaphores.passed(EventHandle(5, 1))


# --- in a market ------------------------------------------------------------------------------------------------------


def run(instances: int, *, peer_loads: bool, kind: str = "h800") -> Outcome:
    """One request, of a model that no instance has."""
    specs = tuple(models("mix:1"))
    pool = Pool(
        recipe=recipe("least-slack"),
        gpu=gpu(kind),
        specs=specs,
        mixed=instances,
        keep_spans=True,
        peer_loads=peer_loads,
    )
    return simulate(pool, [SimRequest(0, specs[0].model, 100, 3)])


def load_ns(outcome: Outcome) -> int:
    [load] = [span for span in outcome.spans if span.kind is SpanKind.LOAD]
    return load.stop_ns - load.start_ns


@pytest.mark.parametrize(("instances", "links"), [(1, 1), (2, 2), (4, 4), (8, 5), (9, 5)])
def test_a_load_takes_as_long_as_the_links_that_the_peer_link_follows(instances: int, links: int) -> None:
    """NVLink of an H800 takes what four host links bring. The ninth GPU is on another node."""
    nbytes, rate = next(iter(models("mix:1"))).manifest.image_bytes, GPUS["h800"].in_bytes_per_s
    asking_ns = 6 * GPUS["h800"].handover_ns // 2  # a peer without pages asks for some
    took_ns = load_ns(run(instances, peer_loads=True))
    least_ns = nbytes * 10**9 // (rate * links)
    assert least_ns <= took_ns <= least_ns + asking_ns
    assert load_ns(run(instances, peer_loads=False)) == -(-nbytes * 10**9 // rate)


@pytest.mark.parametrize("kind", ["a10", "h800x2"])
def test_without_peer_links_there_is_no_help(kind: str) -> None:
    assert load_ns(run(2, peer_loads=True, kind=kind)) == load_ns(run(2, peer_loads=False, kind=kind))


def test_peers_are_as_many_as_the_peer_link_takes() -> None:
    assert {name: spec.peers_max for name, spec in GPUS.items()} == {
        "h100": 9,
        "h800": 4,
        "h20": 9,
        "a10": 0,
        "a100": 12,
    }


def test_a_file_of_a_gpu_may_have_a_peer_link(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "memory: 40GiB\nlink_in: 20GB\nhost_bus: 100GB\nmemory_bandwidth: 800GB\ntflops: 300\npeer_link: 70GB\n"
    )
    assert (gpu(str(file)).peer_bytes_per_s, gpu(str(file)).peers_max) == (70 * GB, 3)
    file.write_text(file.read_text().replace("70GB", "5GB"))
    assert gpu(str(file)).peers_max == 1
