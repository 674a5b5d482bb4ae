"""Adapters among the served models: what is asked of one that its base decides."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.messages import DropModel
from aegis.core.model import ModelChange
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
