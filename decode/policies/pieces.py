"""The turns of an order in which prefills that take long are cut into pieces, with pauses for others.

If the prefills of a turn take longer than half a gap target, they are cut into pieces, so that streams whose models are
there go on between them: each has a step, in a pause of the turn, before its last token is half its gap target ago, and
before a token is late that can still be saved. Half, since estimates err and a piece is not all that takes time. The
step comes earlier if even the least piece, or a prompt that is not cut, would end too late for it. A piece takes at
least two steps of its model, or most of the time would go into reading weights. It takes at most a gap target or, where
nobody streams, `piece_steps` steps if that is longer, since a request that arrives during it waits for its end. Steps
in pauses take no more than `stream_share` of the time: if they would, each stream has one as often as that allows.

A prompt that fits in a piece need not wait for one that does not: it comes before it, in a pause of its turn, if its
rank is lower. Rank is arrival plus length, so a prompt that takes d is overtaken by none that comes d later.
"""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.views import BatchView, Turn


def turns(
    order: list[BatchView],
    quotas_ns: list[int],
    now_ns: int,
    *,
    piece_steps: int,
    stream_share: float,
    forecast: bool,
) -> list[Turn]:
    """The turns in this order. The first one pauses for streams and for a short prompt, if its own prompts would
    make them wait for longer than half a gap."""
    front = order[0]
    # Prompts that take long are cut: in later turns at once, and a new plan says then how long pieces are. One of
    # its own for each batch, these are most of the time of a plan, so that nothing is called for them.
    planned = [
        Turn(
            b.batch,
            quota_ns,
            0 if b.prefill_ns > b.gap_ns // 2 and b.prompt_rank_ns is not None else None,
            forecast=forecast,
        )
        for b, quota_ns in zip(order, quotas_ns, strict=True)
    ]
    if front.prompt_rank_ns is None:
        return planned
    streams = [b for b in order if b.stream_ns is not None and b.there]
    ends_ns = now_ns + front.prefill_ns
    if front.prefill_ns <= front.gap_ns // 2 and all([b is front or _half_gap_ns(b) >= ends_ns for b in streams]):
        return planned
    free_ns = front.gap_ns if streams else max(front.gap_ns, piece_steps * front.step_ns)
    free_until_ns = now_ns + free_ns
    pauses: list[Turn] = []
    busy_ns = sum([batch.step_ns + 2 * batch.change_ns for batch in streams])
    least_ns = round(busy_ns / stream_share)
    saves = sum([(b.step_ns + 2 * b.change_ns) / b.tbt_ns for b in streams]) <= stream_share
    soon_ns = now_ns + front.step_ns
    for batch in streams:
        by_ns = _stream_by_ns(batch, least_ns=least_ns, saves=saves)
        early = by_ns < now_ns + front.piece_ns and _step_by_ns(batch, least_ns) <= soon_ns
        if batch is not front and (by_ns <= soon_ns or early):
            pauses.append(Turn(batch.batch, 1, prefills=False, pause=True))
        if by_ns < free_until_ns:  # also of one that pauses: it may have had its pause just now
            free_until_ns = by_ns
    short = _overtaking(order)
    if short is not None:
        pauses.append(Turn(short.batch, 1, decodes=False, pause=True))
    free_until_ns = max(free_until_ns, now_ns + max(2 * front.step_ns, busy_ns))
    planned[0] = Turn(front.batch, quotas_ns[0], free_until_ns)
    return pauses + planned


def _stream_by_ns(batch: BatchView, *, least_ns: int, saves: bool) -> int:
    """When its next step has to begin so that no stream stands still for long, though not oftener than every
    `least_ns`, and where it `saves` them so that no token is late that can still be saved."""
    assert batch.stream_ns is not None
    within_ns = max(batch.gap_ns // 2, least_ns)
    if saves and batch.savable_due_ns is not None:
        within_ns = min(within_ns, batch.savable_due_ns - batch.stream_ns)
    return _step_by_ns(batch, within_ns)


def _half_gap_ns(batch: BatchView) -> int:
    return _step_by_ns(batch, batch.gap_ns // 2)


def _step_by_ns(batch: BatchView, within_ns: int) -> int:
    """When its next step has to begin to end so long after that of the stream that waits the longest."""
    assert batch.stream_ns is not None
    by_ns = batch.stream_ns + within_ns - batch.step_ns
    return by_ns if batch.active else by_ns - batch.change_ns


def _overtaking(order: Sequence[BatchView]) -> BatchView | None:
    """The batch whose prompt is short enough to come before the first one's."""
    front = order[0]
    piece_ns = front.gap_ns // 2
    if front.prompt_rank_ns is None or front.prompt_ns <= piece_ns:
        return None
    short = None
    for batch in order[1:]:
        rank_ns = batch.prompt_rank_ns
        if rank_ns is None or not batch.there or batch.prompt_ns > piece_ns or rank_ns >= front.prompt_rank_ns:
            continue
        if short is None or short.prompt_rank_ns is None or rank_ns < short.prompt_rank_ns:
            short = batch
    return short
