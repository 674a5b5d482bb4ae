"""Turns of models that share a device in space: short ones, because all of them are resident."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.views import BatchView, Turn


def shared_turns(batches: Sequence[BatchView], slice_ns: int, prompts: Sequence[BatchView] | None = None) -> list[Turn]:
    """Prompts first: those of `prompts` in that order, or in order of arrival. Without any, batches decode for a slice
    each, the one that has waited longest first."""
    waiting = [batch for batch in batches if batch.waiting]
    if waiting:
        order = sorted(waiting, key=_came_ns) if prompts is None else prompts
        return [Turn(batch.batch, None, decodes=False) for batch in order]
    order = sorted(batches, key=lambda batch: (batch.decoded_ns, batch.batch))
    return [Turn(batch.batch, slice_ns if len(order) > 1 else None) for batch in order]


def _came_ns(batch: BatchView) -> tuple[int, int]:
    """When its first request that waits came."""
    assert batch.first_due_ns is not None
    return batch.first_due_ns - batch.ttft_ns, batch.batch
