"""Lazy models in a simulation: who waits for a fetch, how long, and who leaves for it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec, Slo
from aegis.models.disk_cache import DiskCache, use
from aegis.policies import recipe
from aegis.sim.event_queue import EventQueue
from aegis.sim.fetched_images import Fetch, FetchedImages
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.shapes import SHAPES
from aegis.sim.simulation import Outcome, Pool, simulate

S = 10**9
A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
SHAPE = SHAPES["llama-3.2-1b"]
SPECS = tuple(SHAPE.spec(model, Slo(ttft_ns=60 * S)) for model in (A, B, C))


class Cache:
    """Of 10 bytes a second, by default."""

    def __init__(self, fetched: dict[ModelId, int], images: dict[ModelId, int], limit_bytes: int = 0) -> None:
        self.agenda = EventQueue()
        self.images = FetchedImages(
            self.agenda, bytes_per_s=10, limit_bytes=limit_bytes, fetched=fetched, images=images
        )
        self.told: list[tuple[ModelId, float, bool]] = []

    def want(self, model: ModelId, at_s: float = 0, *, stays: bool = False) -> None:
        def told(there: bool) -> None:
            self.told.append((model, self.agenda.now_ns / S, there))
            if not stays:
                self.images.ended(model)

        self.agenda.at(round(at_s * S), self.images.want, model, told)

    def run(self) -> list[tuple[ModelId, float, bool]]:
        self.agenda.run()
        self.images.check()
        return self.told


def test_the_first_request_waits_for_the_fetch_and_the_next_does_not() -> None:
    cache = Cache({A: 50}, {A: 20, B: 20})
    for at_s in (0, 2, 9):
        cache.want(A, at_s)
    cache.want(B, 1)
    assert cache.run() == [(B, 1, True), (A, 5, True), (A, 5, True), (A, 9, True)]
    assert cache.images.fetches == [Fetch(A, 0, 5 * S, 50)]


def test_fetches_share_what_comes() -> None:
    cache = Cache({A: 50, B: 50}, {A: 50, B: 50})
    cache.want(A)
    cache.want(B, 2)
    assert cache.run() == [(A, 8, True), (B, 10, True)]


def test_checkpoints_leave_before_images_that_are_used_and_an_image_can_be_made_again() -> None:
    """Room is for twice the checkpoint: of the three that come one after another the first one's image leaves last of
    all that was not used."""
    cache = Cache({A: 10, B: 10, C: 10}, {A: 4, B: 4, C: 4}, limit_bytes=34)
    for at_s, model in enumerate((A, B, A)):
        cache.want(model, 10 * at_s)
    cache.run()
    assert cache.images.there() == [("checkpoints", A), ("checkpoints", B), ("images", B), ("images", A)]
    cache.want(C, 40)
    cache.run()
    assert cache.images.there() == [("images", B), ("images", A), ("checkpoints", C), ("images", C)]
    cache.want(B, 50)
    assert cache.run()[-1] == (B, 50, True)
    cache.want(ModelId("b"), 60)
    assert len(cache.images.fetches) == 3


def test_an_image_of_which_only_the_checkpoint_is_left_takes_no_fetch() -> None:
    cache = Cache({A: 10, B: 10}, {A: 10, B: 10}, limit_bytes=40)
    cache.want(A)
    cache.want(B, 10)
    cache.run()
    cache.images._entries.pop(("images", A))
    cache.want(A, 20)
    assert cache.run()[-1] == (A, 20, True)
    assert cache.images.fetches[-1] == Fetch(A, 20 * S, 20 * S, 0)


def test_an_image_of_a_request_under_way_stays_and_who_finds_no_room_is_told() -> None:
    cache = Cache({A: 10, B: 10}, {A: 10, B: 10}, limit_bytes=25)
    cache.want(A, stays=True)
    cache.want(B, 5)
    assert cache.run() == [(A, 1, True), (B, 5, False)]
    assert cache.images.fetches[-1] == Fetch(B, 5 * S, 5 * S, 0, refused=True)
    cache.images.ended(A)
    cache.want(B, 6)
    assert cache.run()[-1] == (B, 7, True)


def test_images_that_are_not_lazy_stay() -> None:
    cache = Cache({A: 10}, {A: 10, B: 15}, limit_bytes=30)
    cache.want(A)
    assert cache.run() == [(A, 0, False)]


def served(cache: Path, disk: DiskCache, model: str, whole: int, image: int, clock: list[int]) -> bool:
    """What registering a lazy model does to the cache that serves, with files in the places of its bytes."""
    checkpoint, made = cache / "checkpoints" / model, cache / "images" / model

    def used(entry: Path) -> None:
        clock[0] += 1
        use(entry)
        os.utime(entry.with_name(f".{entry.name}.held"), (clock[0], clock[0]))

    if not made.is_dir():
        weights = checkpoint / "files" / "model.safetensors"
        missing = 0 if weights.is_file() else whole
        try:
            with disk.room(whole + missing, checkpoint):
                weights.parent.mkdir(parents=True, exist_ok=True)
                weights.write_bytes(bytes(whole))
                used(checkpoint)
                made.mkdir(parents=True)
                (made / "image.bin").write_bytes(bytes(image))
        except ModelRefused:
            return False
        used(made)
        disk.trim([made])
    used(made)
    return True


@pytest.mark.parametrize("seed", range(12))
def test_the_same_leave_as_in_the_cache_that_serves(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    models = [ModelId(name) for name in "abcdef"]
    fetched = {model: draws.randrange(10, 60) for model in models}
    images = {model: draws.randrange(5, fetched[model] + 1) for model in models}
    limit = draws.randrange(max(fetched.values()), 5 * max(fetched.values()))
    cache, disk, clock = Cache(fetched, images, limit), DiskCache(tmp_path, limit), [1_000]
    for step in range(40):
        model = draws.choice(models)
        cache.want(model, 100 * step)
        (_, _, there), *_ = reversed(cache.run())
        assert there is served(tmp_path, disk, model, fetched[model], images[model], clock)
        entries = sorted(disk.entries(), key=lambda entry: entry.used_ns)
        assert cache.images.there() == [(entry.path.parent.name, entry.path.name) for entry in entries]


def play(specs: tuple[ModelSpec, ...], wanted: list[SimRequest], **changes: object) -> Outcome:
    pool = Pool(gpu=gpu("h800"), specs=specs, recipe=recipe("least-slack"), mixed=1, **changes)  # type: ignore[arg-type]
    return simulate(pool, wanted)


def test_a_lazy_market_is_late_by_its_fetches_and_then_the_same() -> None:
    wanted = [SimRequest(at_s * S, model, 100, 20) for at_s in (0, 100) for model in (A, B, C)]
    there = play(SPECS, wanted).records
    fetched = {spec.model: spec.manifest.image_bytes for spec in SPECS}
    outcome = play(SPECS, wanted, fetched=fetched, fetch_bytes_per_s=SHAPE.weight_bytes)
    late, again = sorted(outcome.records, key=lambda record: record.request)[:3], outcome.records[3:]
    for record in late:
        assert record.first_ns is not None and 2.9 * S < record.first_ns - record.arrival_ns < 4 * S
    for before, after in zip(sorted(there, key=lambda record: record.request)[3:], again, strict=True):
        assert before == after
    assert [fetch.nbytes for fetch in outcome.fetches] == [SHAPE.weight_bytes] * 3


def test_who_has_left_meanwhile_asks_for_nothing_and_who_finds_no_room_fails() -> None:
    fetched = {spec.model: spec.manifest.image_bytes for spec in SPECS}
    wanted = [SimRequest(0, A, 100, 20, leaves_ns=S), SimRequest(0, B, 100, 20)]
    outcome = play(
        SPECS, wanted, fetched=fetched, fetch_bytes_per_s=SHAPE.weight_bytes // 2, cache_bytes=3 * SHAPE.weight_bytes
    )
    assert {record.model: record.ended for record in outcome.records} == {A: "cancelled", B: "failed"}
    assert all(record.on_time == 0 and record.first_ns is None for record in outcome.records)
    assert [(fetch.model, fetch.refused) for fetch in outcome.fetches] == [(B, True), (A, False)]
