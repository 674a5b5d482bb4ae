"""What is kept of batches that nothing has happened to is what looking at them again would find."""

from __future__ import annotations

from typing import Any

import pytest

from aegis.core.model import Slo
from decode import batch_view
from decode.batch_requests import BatchRequests
from decode.worklist import Batch
from tests.sim.seeds import run_seed
from tests.sim.test_starvation import FLOOD, play

_LOOK = batch_view.BatchViews._seen
_kept: list[bool] = []


def _checked(views: batch_view.BatchViews, batch: Batch, slo: Slo, *, defers: bool) -> Any:
    _kept.append(batch.untouched is not None)
    seen = _LOOK(views, batch, slo, defers=defers)
    had = views.work.turn is not None and views.work.turn.batch is batch
    again = BatchRequests(batch.sequences, slo, defers_refused=defers, defers_arriving=defers and had)
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
