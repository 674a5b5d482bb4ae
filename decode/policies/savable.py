"""The first tokens for which a turn pauses: they would be late at its end, and need not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aegis.core.views import BatchView, Turn


def pauses(
    order: Sequence[BatchView], quotas_ns: Sequence[int], by_ns: Mapping[int, int], began_ns: int, now_ns: int
) -> list[Turn]:
    """For the next prompts of those who have to begin before the first of the `order`, which `began_ns` and keeps its
    turn. One is run in a pause if it would be late when all turns before its own are over, each with its last step, and
    is in time now; if its weights are there, so that nothing has to be brought in for it; and if it fits in a piece, as
    streams wait for it."""
    found, ends_ns = list[Turn](), began_ns
    for at, (batch, quota_ns) in enumerate(zip(order, quotas_ns, strict=True)):
        if by_ns[batch.batch] > by_ns[order[0].batch]:
            break
        takes_ns = batch.change_ns + batch.prompt_ns
        if at and _can_pause(batch) and now_ns + takes_ns <= (batch.first_due_ns or 0) < ends_ns + takes_ns:
            found.append(Turn(batch.batch, 1, decodes=False, pause=True))
            now_ns += takes_ns
        ends_ns += quota_ns + batch.step_ns + (0 if batch.there else batch.switch_ns)
    return found


def _can_pause(batch: BatchView) -> bool:
    return batch.there and batch.prompt_rank_ns is not None and batch.prompt_ns <= batch.gap_ns // 2
