"""Adapters among the served models: what is asked of one that its base decides."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ModelId
from aegis.core.messages import DropModel
from aegis.core.model import ModelChange
from aegis.models.sources import Source
from aegis.node.catalogue.adapters import find_base
from aegis.sim.faults.fake_models import make_adapter
from tests.unit.node.test_absent_images import served_adapter
from tests.unit.node.test_model_catalogue import Adding, adapter_in, while_adding


def test_an_adapter_that_is_refused_other_deadlines_stays_as_it_was(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[object]) -> None:
        adding.registrar.go_on.set()
        await asked
        adapter = served_adapter(adding.catalogue, adding.catalogue.models()[adding.model])
        change = ModelChange(ttft_ns=1, priority=3, pace="smooth")
        with pytest.raises(UserError, match="'a1' is run with 'm0' and has its deadlines; set them there"):
            await adding.catalogue.change(adapter.spec.model, change)
        assert (adapter.priority, adapter.pace) == (0, None)

    while_adding(tmp_path, work)


def test_an_adapter_of_a_model_whose_client_leaves_goes_with_it(tmp_path: Path) -> None:
    """Both are still being bound."""

    async def work(adding: Adding, asked: asyncio.Task[object]) -> None:
        catalogue, registrar = adding.catalogue, adding.registrar
        registrar.go_on.set()
        await adding.until(catalogue.models)
        base = catalogue.models()[adding.model].spec
        registrar.of = {"a0": make_adapter(0, base)}
        coming = asyncio.create_task(catalogue.add(adapter_in(tmp_path), "a0", base=base.model))
        await adding.until(lambda: "a0" in catalogue.models())
        asked.cancel()
        with pytest.raises(UserError, match="'a0' was unloaded while it was registered"):
            await coming
        assert adding.states() == ([], [], 0) and catalogue.least_pages() == 1
        dropped = [told.model for told in adding.node.told if isinstance(told, DropModel)]
        assert dropped == ["a0", "m0"], "adapters are let go of before what they are run in"

    while_adding(tmp_path, work, instances=1)


def test_an_adapter_whose_directory_cannot_be_looked_at_is_refused() -> None:
    adapter = Source(ModelId("a"), path=f"/{'a' * 300}", base="b", adapter=True)
    refusal = asyncio.run(find_base(adapter, {}))
    assert isinstance(refusal, ModelRefused) and refusal.message.endswith(": File name too long")


def test_adapters_of_a_lazy_model_that_cannot_be_fetched_again_wait_with_it(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[object]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue, registrar = adding.catalogue, adding.registrar
        registrar.go_on.set()
        base = registrar.spec
        await catalogue.add(str(tmp_path / "checkpoint"), base.model, lazy=True)
        catalogue.want(base.model)
        await adding.until(catalogue.models)
        registrar.spec = make_adapter(0, base)
        await catalogue.add(adapter_in(tmp_path), "a0", base=base.model)
        registrar.refusal = "the hub is away"
        catalogue.damaged(base.model, "it cannot be opened", wanted=True)
        await adding.until(lambda: not catalogue.models())
        assert catalogue.least_pages() == 1 and set(catalogue.coming()) == {"m0", "a0"}
        assert catalogue.coming()["a0"].refusal == "its base 'm0' waits: the hub is away"
        drops = [told.model for told in adding.node.told if isinstance(told, DropModel)]
        assert drops[-2:] == ["a0", "m0"], "adapters are let go of before what they are run in"
        registrar.refusal, registrar.spec = "", base
        registrar.of = {"a0": make_adapter(0, base)}
        catalogue.want(ModelId("a0"))
        await adding.until(lambda: set(catalogue.models()) == {"m0", "a0"})

    while_adding(tmp_path, work)


def test_an_adapter_that_is_wanted_while_its_base_is_fetched_again_comes_after_it(tmp_path: Path) -> None:
    async def work(adding: Adding, asked: asyncio.Task[object]) -> None:
        asked.cancel()
        await asyncio.wait([asked])
        catalogue, registrar = adding.catalogue, adding.registrar
        base = registrar.spec
        registrar.of = {"a0": make_adapter(0, base)}
        catalogue._lazy.add(Source(base.model, str(tmp_path / "checkpoint"), lazy=True))
        catalogue._lazy.add(Source(ModelId("a0"), adapter_in(tmp_path), base=base.model, adapter=True))
        catalogue.want(base.model)
        await adding.until(lambda: registrar.running)
        catalogue.want(ModelId("a0"))
        await asyncio.sleep(0.05)
        registrar.go_on.set()
        await adding.until(lambda: base.model in catalogue.models())
        await adding.until(lambda: "a0" in catalogue.models() or catalogue.coming()["a0"].refusal)
        assert "a0" in catalogue.models(), catalogue.coming()["a0"].refusal

    while_adding(tmp_path, work)
