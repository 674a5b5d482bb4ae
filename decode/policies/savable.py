"""The first tokens for which a turn pauses: they would be late at its end, and need not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aegis.core.views import BatchView, Turn


def pauses(
    order: Sequence[BatchView], quotas_ns: Sequence[int], by_ns: Mapping[int, int], began_ns: int, now_ns: int
) -> list[Turn]:
    """Pauses for the next prompts of batches that have to begin before the first of the `order`, which `began_ns` and
    keeps its turn. Such a prompt is run in a pause if it is on time now and would be late when all turns before its own
    are over, each with its last step; if its weights are there, so that nothing has to be brought in for it; and if it
    takes no longer than half the gap target of the streams that wait for it."""
    front, found, ends_ns = order[0], list[Turn](), began_ns
    for batch, quota_ns in zip(order, quotas_ns, strict=True):
        if by_ns[batch.batch] > by_ns[front.batch]:
            break
        due_ns, takes_ns = batch.first_due_ns, batch.change_ns + batch.prompt_ns
        can = batch is not front and batch.there and batch.prompt_rank_ns is not None
        can = can and batch.prompt_ns <= front.gap_ns // 2
        if can and due_ns is not None and now_ns + takes_ns <= due_ns < ends_ns + takes_ns:
            found.append(Turn(batch.batch, 1, decodes=False, pause=True))
            now_ns += takes_ns
        ends_ns += quota_ns + batch.step_ns + (0 if batch.there else batch.switch_ns)
    return found
