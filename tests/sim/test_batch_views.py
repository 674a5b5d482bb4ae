"""What is kept of batches that rest, and counted of those that run, is what looking at all of them would find."""

from __future__ import annotations

from typing import Any

import pytest

from aegis.core.effects import Effect
from aegis.core.events import InstanceEvent
from aegis.core.model import Slo
from decode import batch_view
from decode.batch_requests import BatchRequests
from decode.core import DecodeCore
from decode.worklist import LOOKAHEAD_BLOCKS, Batch
from tests.sim.seeds import run_seed
from tests.sim.test_starvation import FLOOD, play

_LOOK = batch_view.BatchViews._seen
_kept: list[bool] = []


def _checked(views: batch_view.BatchViews, batch: Batch, slo: Slo, *, defers: bool) -> Any:
    _kept.append(batch.resting is not None)
    seen = _LOOK(views, batch, slo, defers=defers)
    had = views.work.turn is not None and views.work.turn.batch is batch
    again = BatchRequests(batch.sequences, slo, defers_refused=defers, defers_arriving=defers and had)
    if seen.blocks_ahead is not None:
        again.blocks_ahead = sum([sequence.blocks_ahead(LOOKAHEAD_BLOCKS) for sequence in batch.sequences])
    for name in BatchRequests.__slots__:
        assert getattr(seen, name) == getattr(again, name), name
    return seen


def test_what_is_kept_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_view.BatchViews, "_seen", _checked)
    _kept.clear()
    play(FLOOD, 0)
    for seed in range(60):
        run_seed(seed)
    assert sum(_kept) > 100


_ON = DecodeCore.on
_ran: list[int] = []


def _counted(core: DecodeCore, event: InstanceEvent, now_ns: int) -> list[Effect]:
    effects = _ON(core, event, now_ns)
    assert core.running == sum([sequence.running for sequence in core._by_request.values()])
    _ran.append(core.running)
    return effects


def test_those_that_run_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeCore, "on", _counted)
    _ran.clear()
    for seed in range(60):
        run_seed(seed)
    assert max(_ran) > 1
