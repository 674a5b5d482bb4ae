"""Models whose images have left the disk, or cannot be read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.core.ids import InstanceId
from aegis.core.messages import AddModel
from aegis.core.model import Slo
from aegis.device.image_directory import TOKENIZER
from aegis.models.sources import Source
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.model_catalogue import Catalogue
from aegis.sim.faults.fake_models import make_adapter
from aegis.transport.node_messages import Registering
from proxy.routing.events import ModelAway, ModelUp
from tests.unit.node.test_model_catalogue import Adding, while_adding


def test_a_lazy_model_that_has_left_the_disk_is_fetched_again_where_a_proxy_wants_it(tmp_path: Path) -> None:
    """One that came after it had left. Instances that have its weights go on meanwhile."""

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue = adding.catalogue
        adding.registrar.go_on.set()
        await catalogue.add(str(tmp_path / "checkpoint"), adding.model, lazy=True)
        catalogue.want(adding.model)
        await adding.until(catalogue.models)
        model, calls, before = catalogue.models()[adding.model], adding.registrar.calls, len(adding.node.told)
        catalogue.want(adding.model)
        assert model.renewing and not model.away
        await adding.until(lambda: not model.renewing)
        assert adding.registrar.calls == calls + 1
        assert [type(event) for event in adding.node.told[before:]] == [Registering], "it may be looked at again"
        Path(model.spec.image_path).touch()
        catalogue.want(adding.model)
        assert not model.renewing

    while_adding(tmp_path, work)


def test_an_instance_that_finds_the_image_gone_binds_the_model_when_it_is_fetched_again(tmp_path: Path) -> None:
    """One that was started again. The others' requests go on, new ones wait until all can serve them."""
    instance = InstanceId("i0")

    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue, node = adding.catalogue, adding.node
        adding.registrar.go_on.set()
        await catalogue.add(str(tmp_path / "checkpoint"), adding.model, lazy=True)
        catalogue.want(adding.model)
        await adding.until(catalogue.models)
        model = catalogue.models()[adding.model]
        adapter = served_adapter(catalogue, model)
        node.up.add(instance)
        before = len(node.told)
        catalogue.refused(adding.model, instance, "no such directory")
        catalogue.refused(adapter.spec.model, instance, "its base cannot be run here")
        assert (model.state, adapter.state, model.away, adapter.away) == ("ready", "ready", True, True)
        await adding.until(lambda: not model.renewing)
        told = [event for event in node.told[before:] if not isinstance(event, Registering)]
        names = [adding.model, adapter.spec.model]
        offered = [(instance, AddModel(each.spec)) for each in (model, adapter)]
        assert told == [*map(ModelAway, names), *offered] and model.away
        for each in (model, adapter):
            catalogue.added(each.spec.model, instance)
            assert not each.away and node.told[-1] == ModelUp(each.spec, each.device_tokens)
        Path(model.spec.image_path).touch()
        catalogue.refused(adding.model, instance, "broken")
        assert (model.state, model.detail, adapter.state) == ("failed", "broken", "failed")

    while_adding(tmp_path, work)


def test_an_image_whose_text_cannot_be_read_refuses_its_model(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        (tmp_path / TOKENIZER).write_text("{")
        adding.registrar.go_on.set()
        with pytest.raises(ModelRefused) as refused:
            await asked
        assert f"its image {tmp_path} cannot be read; add the model again" in refused.value.message
        assert adding.states() == ([], [], 0)

    while_adding(tmp_path, work)


def served_adapter(catalogue: Catalogue, base: CatalogueModel) -> CatalogueModel:
    spec = make_adapter(1, base.spec)
    source = Source(spec.model, Path(), None, Slo(), base=base.spec.model)
    adapter = catalogue._models[spec.model] = CatalogueModel(spec, source, base.images, None, 1, 1, 0, state="ready")
    return adapter
