"""Promises to clients are kept when instances join; a model that is not wanted any more does not come."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import DropModel
from aegis.core.model import ModelChange, ModelSpec, Slo
from aegis.models.sources import Source
from aegis.models.terms import Terms
from aegis.models.text.text_model import TextModel
from aegis.node.catalogue import image_renewals
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.model_catalogue import COMING_MAX, REGISTRATIONS_AT_ONCE, Catalogue
from aegis.node.registration import RegistrarNotStarted, RegistrationCancelled, Report, register, was_unloaded
from aegis.sim.faults.fake_models import make_adapter, make_spec
from aegis.telemetry.registration import Waiting
from aegis.transport.node_messages import Registering
from memory.budget import Budget
from proxy.routing.events import ModelRemoved, ModelUp
from tests.parity.stand_ins import no_images

PAGE = 2 << 20


def _catalogue(*, host_slabs: int, context_tokens: int) -> Catalogue:
    """Of one model, whose KV the device holds more of than the host; two instances."""
    budget = Budget(pages=100, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=host_slabs, instances=2)
    made = make_spec(0, image_pages=3, block_bytes=PAGE)
    spec = msgspec.structs.replace(made, manifest=msgspec.structs.replace(made.manifest, context_tokens=context_tokens))
    images = no_images()
    catalogue = Catalogue(
        cast(Any, None),
        budget,
        images,
        partial(register, fork_server=cast(Any, None)),
        Terms("", "float32"),
        default_slo=Slo(),
    )
    sizes = spec.manifest.image_bytes, spec.manifest.kv
    limit, on_device = budget.sequence_tokens(*sizes), budget.device_tokens(*sizes)
    source = Source(spec.model, Path(), None, Slo())
    catalogue._models[spec.model] = CatalogueModel(spec, source, images, None, limit, on_device, 0)
    return catalogue


def test_proxies_are_told_what_the_device_holds_and_not_what_the_host_does() -> None:
    catalogue = _catalogue(host_slabs=10, context_tokens=16)
    (model,) = catalogue.models().values()
    model.state = "ready"
    assert catalogue.ready()[1:] == [ModelUp(model.spec, (100 - 3) * 16)]
    assert model.kv_limit_tokens == 9 * 16


def test_host_memory_is_shared_among_more_where_that_breaks_no_promise() -> None:
    catalogue = _catalogue(host_slabs=10, context_tokens=16)
    catalogue.share_among(5)
    assert catalogue.budget.instances == 5
    with pytest.raises(UserError, match="holds 10 KV slabs, 6 instances need 12; raise it"):
        catalogue.share_among(6)
    assert catalogue.budget.instances == 5


def test_a_long_request_that_was_promised_still_fits() -> None:
    catalogue = _catalogue(host_slabs=10, context_tokens=1 << 20)
    with pytest.raises(UserError, match=r"with 3 instances host memory holds KV of .* tokens of .* were promised"):
        catalogue.share_among(3)
    assert catalogue.budget.instances == 2


@pytest.mark.parametrize("source", ["/etc", "../../x", "a\0b", "http://a..b/c"])
def test_what_is_no_checkpoint_is_refused_by_the_parameter_s_name(source: str) -> None:
    with pytest.raises(UserError) as refusal:
        asyncio.run(_catalogue(host_slabs=10, context_tokens=16).add(source, None))
    assert refusal.value.param == "source" and refusal.value.message


@dataclass
class _Node:
    """Implements `catalogue.Wire`."""

    up: set[InstanceId] = field(default_factory=set)
    told: list[object] = field(default_factory=list)

    def notify_proxies(self, event: object) -> None:
        self.told.append(event)

    def broadcast(self, message: object) -> None:
        self.told.append(message)

    def post(self, instance: InstanceId, message: object) -> None:
        self.told.append((instance, message))


@dataclass
class _Registrar:
    """As `register`: of a spec that is there once `go_on` is set. `running` are those that were begun and not ended."""

    spec: ModelSpec
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    refusal: str = ""
    calls: int = 0
    not_started: int = 0
    """So many of those that come next."""

    of: dict[str, ModelSpec] = field(default_factory=dict)
    """Others, by the names of their sources."""

    kept: set[str] = field(default_factory=set)
    """Those that do not go on yet."""

    async def __call__(
        self,
        sources: Sequence[Source],
        *,
        report: Report,
        unwanted: RegistrationCancelled | None,
        wanted: bool,
        **_: Any,
    ) -> AsyncIterator[tuple[Source, ModelSpec | ModelRefused | None]]:
        (source,) = sources
        self.calls += 1
        if source.lazy and not wanted:
            yield source, None
            return
        if self.not_started:
            self.not_started -= 1
            yield source, RegistrarNotStarted(source, "Cannot allocate memory")
            return
        if self.refusal:
            yield source, ModelRefused(self.refusal)
            return
        self.running += 1
        try:
            report(source.model, "loading the weights")
            while (not self.go_on.is_set() or source.model in self.kept) and source.model not in (unwanted or ()):
                await asyncio.sleep(0.001)
            outcome: ModelSpec | ModelRefused = self.of.get(source.model, self.spec)
            if source.model in (unwanted or ()):
                outcome = was_unloaded(source.model)
        finally:
            self.running -= 1
        yield source, outcome


@dataclass
class _Forgetting:
    """Implements `image_cache.Wire`, as far as images are not loaded."""

    catalogue: Catalogue

    def image_forgotten(self, model: ModelId) -> None:
        self.catalogue.uncached(model)


@dataclass
class Adding:
    catalogue: Catalogue
    registrar: _Registrar
    node: _Node
    model: ModelId

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    def states(self) -> tuple[list[str], list[str], int]:
        """Names of models there are, and of those that are coming; how many registrars run."""
        return list(self.catalogue.models()), list(self.catalogue.coming()), self.registrar.running


def while_adding(
    tmp_path: Path,
    work: Callable[[Adding, asyncio.Task[CatalogueModel]], Coroutine[Any, Any, None]],
    *,
    instances: int = 0,
) -> None:
    """`work` is done once the registrar has begun; no instance ever answers."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").touch()
    made = make_spec(0, image_pages=3, block_bytes=PAGE)
    spec = msgspec.structs.replace(made, directory=str(tmp_path), image_path=str(tmp_path / "image.bin"))

    async def main() -> None:
        node, images = _Node({InstanceId(f"i{n}") for n in range(instances)}), no_images()
        registrar = _Registrar(spec)
        catalogue = Catalogue(
            cast(Any, node),
            Budget(pages=100, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=10, instances=2),
            images,
            cast(Any, registrar),
            Terms("", "float32"),
            default_slo=Slo(),
        )
        images.wire = cast(Any, _Forgetting(catalogue))
        adding = Adding(catalogue, registrar, node, spec.model)
        asked = asyncio.create_task(catalogue.add(str(tmp_path / "checkpoint"), spec.model))
        async with asyncio.timeout(10):
            await adding.until(lambda: registrar.running)
            await work(adding, asked)

    asyncio.run(main())


async def _refused(asked: asyncio.Task[Any]) -> tuple[int, str]:
    with pytest.raises(UserError) as refusal:
        await asked
    return refusal.value.status, refusal.value.message


def test_a_checkpoint_that_is_refused_is_so_by_the_parameter_s_name(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        adding.registrar.refusal = "it is cut off"
        with pytest.raises(ModelRefused, match="it is cut off") as refusal:
            await adding.catalogue.add(str(tmp_path / "checkpoint"), "other")
        assert (refusal.value.param, refusal.value.code) == ("source", "model_refused")
        adding.registrar.go_on.set()
        await asked

    while_adding(tmp_path, work)


def test_a_model_that_is_being_registered_can_be_unloaded(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        await adding.catalogue.remove(adding.model)
        assert adding.states() == ([], [], 0)
        status, message = await _refused(asked)
        assert status == 409 and "was unloaded while it was registered" in message
        with pytest.raises(UserError) as nothing:
            await adding.catalogue.remove(adding.model)
        assert nothing.value.status == 404

    while_adding(tmp_path, work)


@pytest.mark.parametrize("comes", [True, False])
def test_proxies_hear_of_a_model_that_is_expected_until_it_is_registered(tmp_path: Path, comes: bool) -> None:
    """Or requests that wait for it would find none."""

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        expected = Source(ModelId("expected"), path=str(tmp_path / "checkpoint"))
        adding.catalogue.expect(expected, "is being made")
        before = len(adding.node.told)
        adding.catalogue.expect_no_more(expected.model, comes=comes)
        registering = asyncio.create_task(anext(adding.catalogue.register([expected]))) if comes else None
        await asyncio.sleep(0)
        heard = [event for event in adding.node.told[before:] if isinstance(event, Registering)]
        assert heard and all((expected.model in event.models) == comes for event in heard)
        await adding.catalogue.remove(adding.model)
        await _refused(asked)
        if registering:
            await adding.catalogue.remove(expected.model)
            assert isinstance((await registering)[1], ModelRefused)

    while_adding(tmp_path, work)


def test_its_name_is_taken_meanwhile_and_free_afterwards(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        again = adding.catalogue.add(str(tmp_path / "checkpoint"), adding.model)
        assert (await _refused(asyncio.create_task(again)))[0] == 409
        await adding.catalogue.remove(adding.model)
        await _refused(asked)
        adding.registrar.go_on.set()
        assert (await adding.catalogue.add(str(tmp_path / "checkpoint"), adding.model)).state == "ready"

    while_adding(tmp_path, work)


def test_a_registration_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        assert adding.states() == ([], [], 0)

    while_adding(tmp_path, work)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_model_that_instances_are_binding_does_not_stay(tmp_path: Path, leaves: bool) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        adding.registrar.go_on.set()
        await adding.until(adding.catalogue.models)
        if leaves:
            asked.cancel()
            await asyncio.wait([asked])
        else:
            await adding.catalogue.remove(adding.model)
            assert (await _refused(asked))[0] == 409
        assert adding.states() == ([], [], 0)
        assert DropModel(adding.model) in adding.node.told

    while_adding(tmp_path, work, instances=1)


def test_so_many_registrations_are_under_way_and_others_wait_for_their_turn(tmp_path: Path) -> None:
    """Whoever waits can be unloaded, or leave."""

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        catalogue, source = adding.catalogue, str(tmp_path / "checkpoint")
        names = [f"more-{number}" for number in range(5)]
        more = {name: asyncio.create_task(catalogue.add(source, name)) for name in names}
        await adding.until(lambda: adding.registrar.running == REGISTRATIONS_AT_ONCE)
        await adding.until(lambda: len(catalogue.coming()) == 1 + len(names))

        def waiting() -> list[str]:
            return [name for name, coming in catalogue.coming().items() if coming.progress == "waiting to be read"]

        unloaded, left, *others = waiting()
        assert len(others) + 2 == 1 + len(names) - REGISTRATIONS_AT_ONCE
        await catalogue.remove(unloaded)
        assert (await _refused(more[unloaded]))[0] == 409
        more[left].cancel()
        await asyncio.wait([more[left]])
        assert (adding.registrar.running, waiting()) == (REGISTRATIONS_AT_ONCE, others)
        await catalogue.remove(adding.model)
        await _refused(asked)
        await adding.until(lambda: adding.registrar.running == REGISTRATIONS_AT_ONCE)
        assert waiting() == others[1:]
        for name in list(catalogue.coming()):
            await catalogue.remove(name)
            assert (await _refused(more[name]))[0] == 409
        assert adding.states() == ([], [], 0)
        adding.registrar.go_on.set()
        assert (await catalogue.add(source, adding.model)).state == "ready"

    while_adding(tmp_path, work)


def test_sources_elsewhere_keep_no_directory_waiting(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        catalogue, stalled = adding.catalogue, range(REGISTRATIONS_AT_ONCE + 1)
        more = [asyncio.create_task(catalogue.add(f"https://127.0.0.1:1/{n}/", f"far-{n}")) for n in stalled]
        await adding.until(lambda: adding.registrar.running == 1 + REGISTRATIONS_AT_ONCE)
        more.append(asyncio.create_task(catalogue.add(str(tmp_path / "checkpoint"), "near")))
        await adding.until(lambda: adding.registrar.running == 2 + REGISTRATIONS_AT_ONCE)
        for name in list(catalogue.coming()):
            await catalogue.remove(name)
        for task in (asked, *more):
            await _refused(task)

    while_adding(tmp_path, work)


def test_no_more_than_so_many_are_coming(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        catalogue, source = adding.catalogue, str(tmp_path / "checkpoint")
        more = [asyncio.create_task(catalogue.add(source, f"more-{number}")) for number in range(COMING_MAX - 1)]
        await adding.until(lambda: len(catalogue.coming()) == COMING_MAX)
        status, message = await _refused(asyncio.create_task(catalogue.add(source, "another")))
        assert status == 503 and "add 'another' when some of them are ready" in message
        await catalogue.remove("more-0")
        another = asyncio.create_task(catalogue.add(source, "another"))
        await adding.until(lambda: len(catalogue.coming()) == COMING_MAX)
        for task in (asked, another, *more):
            task.cancel()
        await asyncio.wait([asked, another, *more])

    while_adding(tmp_path, work)


def test_a_gap_target_shorter_than_what_a_stream_needs_is_refused_with_what_is_possible() -> None:
    catalogue = _catalogue(host_slabs=10, context_tokens=16)
    (model,) = catalogue.models()
    with pytest.raises(UserError, match=r"a gap target of 0\.001 ms is too short .* or more") as raised:
        asyncio.run(catalogue.change(model, ModelChange(gap_ns=1_000)))
    assert catalogue.models()[model].spec.slo == Slo()
    possible = re.search(r"(\d+) ms or more", raised.value.message)
    assert possible
    catalogue._wire = _Node()
    asyncio.run(catalogue.change(model, ModelChange(gap_ns=int(possible[1]) * 1_000_000)))
    assert catalogue.models()[model].spec.slo.gap_ns == int(possible[1]) * 1_000_000


def test_a_model_has_another_pace_at_once_and_keeps_it() -> None:
    catalogue = _catalogue(host_slabs=10, context_tokens=16)
    catalogue._wire = _Node()
    (model,) = catalogue.models()
    for change, pace in ((ModelChange(pace="smooth"), "smooth"), (ModelChange(priority=1), "smooth")):
        asyncio.run(catalogue.change(model, change))
        assert catalogue.models()[model].pace == pace
    asyncio.run(catalogue.change(model, ModelChange(pace="made")))
    assert catalogue.models()[model].pace == "made"


def test_a_lazy_model_waits_for_a_request_and_then_comes(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue, source = adding.catalogue, str(tmp_path / "checkpoint")
        assert await catalogue.add(source, adding.model, lazy=True) == Waiting(adding.model, source)
        assert adding.states() == ([], [adding.model], 0) and catalogue.coming()[adding.model].lazy
        with pytest.raises(UserError, match="already a model named"):
            await catalogue.add(source, adding.model)
        adding.registrar.refusal = "the hub is away"
        catalogue.want(adding.model)
        await adding.until(lambda: catalogue.coming()[adding.model].tries)
        card = catalogue.coming()[adding.model]
        assert (card.lazy, card.tries, card.refusal) == (True, 1, "the hub is away")
        adding.registrar.refusal, adding.registrar.calls = "", 0
        for _ in range(3):
            catalogue.want(adding.model)
        await adding.until(lambda: adding.registrar.running)
        card = catalogue.coming()[adding.model]
        assert (card.lazy, card.tries, card.progress) == (False, 1, "loading the weights")
        adding.registrar.go_on.set()
        await adding.until(catalogue.models)
        await adding.until(lambda: adding.states() == ([adding.model], [], 0))
        catalogue.want(adding.model)
        assert adding.states() == ([adding.model], [], 0) and adding.registrar.calls == 1

    while_adding(tmp_path, work)


def test_a_lazy_model_can_be_removed_before_it_comes_and_while_it_does(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue, source = adding.catalogue, str(tmp_path / "checkpoint")
        for wanted in (False, True):
            await catalogue.add(source, adding.model, lazy=True)
            if wanted:
                catalogue.want(adding.model)
                await adding.until(lambda: adding.registrar.running)
            await catalogue.remove(adding.model)
            assert adding.states() == ([], [], 0) and not catalogue.has(adding.model)
            assert adding.node.told[-1] == Registering({})

    while_adding(tmp_path, work)


def test_a_lazy_model_that_has_left_the_disk_is_fetched_again_or_waits_again(tmp_path: Path) -> None:
    """Its image is not damaged: it may leave as often as others need the room."""

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue = adding.catalogue
        adding.registrar.go_on.set()
        await catalogue.add(str(tmp_path / "checkpoint"), adding.model, lazy=True)
        catalogue.want(adding.model)
        await adding.until(catalogue.models)
        for _ in range(20):
            catalogue.damaged(adding.model, "it cannot be opened", wanted=True)
            assert catalogue.models()[adding.model].away
            await adding.until(lambda: not catalogue.models()[adding.model].away)
        assert (catalogue.models()[adding.model].state, catalogue.models()[adding.model].detail) == ("ready", "")
        adding.registrar.go_on.clear()
        catalogue.damaged(adding.model, "it cannot be opened", wanted=True)
        told = "it has left the disk; it is being made again: loading the weights"
        await adding.until(lambda: catalogue.models()[adding.model].detail == told)
        adding.registrar.go_on.set()
        await adding.until(lambda: not catalogue.models()[adding.model].away)
        adding.registrar.refusal = "the hub is away"
        catalogue.damaged(adding.model, "it cannot be opened", wanted=True)
        await adding.until(lambda: not catalogue.models())
        assert ModelRemoved(adding.model, "cannot be served now: the hub is away", returns=True) in adding.node.told
        card = catalogue.coming()[adding.model]
        assert (card.lazy, card.refusal) == (True, "the hub is away")

    while_adding(tmp_path, work)


def test_an_image_is_made_again_later_where_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_renewals, "AGAIN_S", 0.001)

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        adding.registrar.go_on.set()
        model = await asked
        adding.registrar.not_started = 3
        adding.catalogue.damaged(adding.model, "it is damaged", wanted=True)
        await adding.until(lambda: not model.away)
        assert (model.state, model.detail, adding.registrar.not_started) == ("ready", "", 0)

    while_adding(tmp_path, work)


def test_a_lazy_model_comes_on_the_terms_that_its_file_has_by_then(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue = adding.catalogue
        await catalogue.add(str(tmp_path / "checkpoint"), adding.model, lazy=True)
        source = Source(adding.model, str(tmp_path / "checkpoint"), lazy=True, priority=-3)
        assert catalogue.revise(source)
        adding.registrar.go_on.set()
        catalogue.want(adding.model)
        await adding.until(catalogue.models)
        await adding.until(lambda: not catalogue.coming())
        assert catalogue.models()[adding.model].priority == -3
        assert not catalogue.revise(source), "of one that is served what may be changed is"

    while_adding(tmp_path, work)


def adapter_in(tmp_path: Path) -> str:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8}))
    return str(directory)


@pytest.mark.parametrize("returns", [True, False])
def test_an_adapter_whose_base_became_another_model_meanwhile_is_refused(tmp_path: Path, returns: bool) -> None:
    """Its matrices would be read as if they had the shapes of the other one's layers."""

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        catalogue, registrar = adding.catalogue, adding.registrar
        registrar.go_on.set()
        base = (await asked).spec
        registrar.of, registrar.kept = {"a0": make_adapter(0, base)}, {"a0"}
        coming = asyncio.create_task(catalogue.add(adapter_in(tmp_path), "a0", base=base.model))
        await adding.until(lambda: registrar.running)
        await catalogue.remove(base.model)
        told = "its base 'm0' was removed"
        if returns:
            other = msgspec.structs.replace(base.manifest, fingerprint="another")
            registrar.spec = msgspec.structs.replace(base, manifest=other)
            await catalogue.add(str(tmp_path / "checkpoint"), base.model)
            told = "its base 'm0' became another model meanwhile; add it again"
        registrar.kept.clear()
        assert told in (await _refused(coming))[1] and "a0" not in catalogue.models()

    while_adding(tmp_path, work)


def test_an_adapter_whose_base_is_removed_while_its_image_is_brought_is_refused(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        catalogue, registrar = adding.catalogue, adding.registrar
        registrar.go_on.set()
        base = (await asked).spec

        async def supply(spec: ModelSpec, *, renewed: bool = False) -> None:
            await catalogue.remove(base.model)

        catalogue._images.supply = supply
        registrar.spec = make_adapter(0, base)
        coming = asyncio.create_task(catalogue.add(adapter_in(tmp_path), "a0", base=base.model))
        assert "its base 'm0' was removed" in (await _refused(coming))[1]
        assert adding.states() == ([], [], 0)

    while_adding(tmp_path, work)


def test_an_image_that_left_before_its_model_was_served_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(directory: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        monkeypatch.setattr(TextModel, "load_to_decode", left)
        adding.registrar.go_on.set()
        assert "its image cannot be read: No such file or directory" in (await _refused(asked))[1]

    while_adding(tmp_path, work)
