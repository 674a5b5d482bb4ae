"""What is kept of batches that rest, and counted of those that run, is what looking at all of them would find."""

from __future__ import annotations

from typing import Any

import pytest

from aegis.core.effects import Effect
from aegis.core.events import InstanceEvent
from aegis.core.model import Slo
from aegis.core.views import BatchView
from decode import batch_view
from decode.batch_requests import BatchRequests
from decode.core import DecodeCore
from decode.worklist import LOOKAHEAD_BLOCKS, Batch
from tests.sim.seeds import run_seed
from tests.sim.test_starvation import FLOOD, play

_LOOK = batch_view.BatchViews._seen
_VIEW = batch_view.BatchViews.of
_kept: list[bool] = []
_again: list[object] = []

OF_TIME = {
    "abreast",
    "change_ns",
    "in_time_by_ns",
    "late_ns",
    "on_time",
    "piece_ns",
    "prefill_ns",
    "prompt_ns",
    "savable_due_ns",
    "stall_ns",
    "step_ns",
    "steps_share",
    "switch_ns",
    "worth",
}
"""What a view says by estimates, which runs of others change, or as of its time."""


def _checked(views: batch_view.BatchViews, batch: Batch, slo: Slo, *, defers: bool) -> Any:
    _kept.append(batch.resting is not None)
    seen = _LOOK(views, batch, slo, defers=defers)
    had = views.work.turn is not None and views.work.turn.batch is batch
    again = BatchRequests(batch.sequences, slo, defers_refused=defers, defers_arriving=defers and had)
    if seen.blocks_ahead is not None:
        assert seen.blocks_ahead == sum([sequence.blocks_ahead(LOOKAHEAD_BLOCKS) for sequence in batch.sequences])
    for name in set(BatchRequests.__slots__) - {"blocks_ahead", "view", "view_until_ns"}:
        assert getattr(seen, name) == getattr(again, name), name
    return seen


def _viewed(views: batch_view.BatchViews, batch: Batch, now_ns: int) -> BatchView:
    resting = batch.resting
    kept = resting.view if resting else None
    view = _VIEW(views, batch, now_ns)
    if resting and view is kept:
        _again.append(view.requests)
        resting.view = None
        fresh = _VIEW(views, batch, now_ns)
        for name in set(view.__struct_fields__) - OF_TIME:
            assert getattr(view, name) == getattr(fresh, name), name
        resting.view = view
    return view


def test_what_is_kept_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_view.BatchViews, "_seen", _checked)
    monkeypatch.setattr(batch_view.BatchViews, "of", _viewed)
    _kept.clear()
    _again.clear()
    play(FLOOD, 0)
    for seed in range(60):
        run_seed(seed)
    assert sum(_kept) > 100 and len(_again) > 100


_ON = DecodeCore.on
_ran: list[int] = []


def _counted(core: DecodeCore, event: InstanceEvent, now_ns: int) -> list[Effect]:
    effects = _ON(core, event, now_ns)
    assert core.running == sum([sequence.running for sequence in core._by_request.values()])
    _ran.append(core.running)
    return effects


@pytest.mark.long
def test_those_that_run_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeCore, "on", _counted)
    _ran.clear()
    for seed in range(60):
        run_seed(seed)
    assert max(_ran) > 1
