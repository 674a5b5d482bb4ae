"""Adapters among the served models: what is asked of one that its base decides."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.model import ModelChange
from tests.unit.node.test_absent_images import served_adapter
from tests.unit.node.test_model_catalogue import Adding, while_adding


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
